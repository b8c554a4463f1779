"""Parts of a model by themselves, views that are kept, changes in place, errors: released memory is not read."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import shardwell
from shardwell.runtime.hooks import SavedViews
from shardwell.sharding import Residency
from tests.support.internals import open_calls_of, units_of
from tests.support.models import zero

WIDTH = 6


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        x = torch.tanh(self.a(x))
        if fail:
            raise ValueError("in the middle")
        return self.b(x)


class Encoder(nn.Module):
    """Parameters of the root, its own and those of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.inner = Inner()

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        return torch.tanh(self.inner(x, fail)) @ self.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.kept = Inner(), None
        self.wide = nn.Linear(WIDTH, 64)  # much larger than what the root has, which is no unit of its own then

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) + self.wide(x).mean(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x)
        return x


def plain(kind: type[nn.Module] = Model) -> Any:
    torch.manual_seed(0)
    return kind().double()


def engine_at(stage: int = 3, kind: type[nn.Module] = Model, **extra: Any) -> shardwell.Engine:
    model = plain(kind)
    config = zero(stage, shardwell={"shard_at_world_one": True}, **extra)
    return shardwell.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config, device="cpu"
    ).engine


def rows(seed: int = 1) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit_of(engine: shardwell.Engine, name: str) -> Any:
    return next(unit for unit in units_of(engine) if unit.name == name)


def assert_same(engine: shardwell.Engine, model: nn.Module) -> None:
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-12, atol=1e-12)


def train_a_step(engine: shardwell.Engine, model: nn.Module) -> None:
    """And both are where they were together."""
    engine.backward(engine(rows()).square().mean())
    engine.step()
    model.zero_grad()
    model(rows()).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_same(engine, model)


# ------------------------------------------------------------------------------------------------------------ parts


@pytest.mark.parametrize("grad", [False, True])
def test_a_part_of_the_root_that_has_parts_runs_alone(grad: bool) -> None:
    engine, model = engine_at(), plain()
    with torch.set_grad_enabled(grad):
        assert torch.equal(engine.module.encoder(rows()), model.encoder(rows()))
    assert unit_of(engine, "").use.in_parts == 0
    if grad:  # and is trained alone
        engine.module.encoder(rows()).square().mean().backward()
        engine.step()
        model.encoder(rows()).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert_same(engine, model)
    assert unit_of(engine, "").residency is Residency.SHARDED
    train_a_step(engine, model)


def test_a_part_that_fails_ends_its_loan() -> None:
    engine, model = engine_at(), plain()
    with torch.no_grad(), pytest.raises(ValueError, match="in the middle"):
        engine.module.encoder(rows(), fail=True)
    assert unit_of(engine, "").residency is Residency.SHARDED
    with torch.no_grad():
        assert torch.equal(engine.module.encoder(rows()), model.encoder(rows()))
    train_a_step(engine, model)


class Catches(Model):
    """A block fails, and the model goes on without it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        for index, block in enumerate(self.blocks):
            try:
                x = block(x) if index != 1 else block(None)
            except TypeError:
                x = x * 2
        return x


def test_an_error_that_a_model_catches_leaves_nothing_behind() -> None:
    engine, model = engine_at(kind=Catches), plain(Catches)
    train_a_step(engine, model)
    assert not open_calls_of(engine)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert all(unit.residency == "sharded" for unit in engine.units)
    with pytest.raises(TypeError):
        engine(None)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not any(unit.use.in_forward for unit in units_of(engine))


def test_naming_the_root_makes_one_unit_of_all() -> None:
    engine = engine_at(zero_optimization={"leaf_module": {"classes": ["Model"]}})
    assert [unit.name for unit in engine.units] == [""]
    train_a_step(engine, plain())


# ------------------------------------------------------------------------------------------------------------ views


class Shows(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.inner.a.weight.detach().t()
        return super().forward(x)


class Showing(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Shows() for _ in range(3)])


def test_a_view_that_a_forward_hides_is_read_after_its_unit_was_released() -> None:
    engine = engine_at(kind=Showing)
    with torch.no_grad():
        engine(rows())
    assert unit_of(engine, "blocks.1").residency is Residency.SHARDED
    assert torch.equal(engine.module.blocks[1].kept, plain(Showing).blocks[1].inner.a.weight.t())


def test_a_view_that_is_kept_is_told_of_once_by_the_units_name() -> None:
    engine = engine_at(kind=Showing)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            engine.backward(engine(rows()).square().mean())
            engine.step()
    found = sorted(str(one.message).split("'")[1] for one in told if "a view of a parameter" in str(one.message))
    assert found == ["blocks.0", "blocks.1", "blocks.2"]


def test_memory_that_views_kept_comes_back_with_them() -> None:
    engine = engine_at(kind=Showing)
    with torch.no_grad():
        engine(rows())
        flat = unit_of(engine, "blocks.1").groups[0].flat
        assert flat.tensor.untyped_storage().nbytes() == flat.nbytes
        for block in engine.module.blocks:
            block.kept = None
        engine.module.blocks[2](rows())  # whatever runs next
    assert flat.tensor.untyped_storage().nbytes() == 0


def test_nobody_else_keeps_memory_after_forward_and_backward() -> None:
    engine = engine_at()
    for _ in range(2):
        loss = engine(rows()).square().mean()
        held = {u.name for u in units_of(engine) if u.groups[0].flat.tensor.untyped_storage().nbytes()}
        assert held == set()
        loss.backward()
        engine.step()
        held = {u.name for u in units_of(engine) if u.groups[0].flat.tensor.untyped_storage().nbytes()}
        assert held == set()


class Gated(nn.Module):
    """Saves its own results: exp and sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        self.result = self.inner(x).exp()
        return self.result.sigmoid()


class Gates(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Gated() for _ in range(3)])


def test_a_graph_that_is_dropped_is_freed_without_a_collection() -> None:
    engine = engine_at(kind=Gates)
    gc.collect()
    gc.disable()
    try:
        out = engine(rows())
        watched = [StorageWeakRef(block.result.untyped_storage()) for block in engine.module.blocks]
        for block in engine.module.blocks:
            block.result = None
        assert not any(one.expired() for one in watched)
        del out
        assert all(one.expired() for one in watched)
    finally:
        gc.enable()


# --------------------------------------------------------------------------------------------------- changes in place


def test_an_activation_that_was_changed_in_place_is_torchs_error() -> None:
    engine = engine_at(kind=Gates)
    out = engine(rows())
    engine.module.blocks[1].result.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.square().mean().backward()


def test_a_weight_that_was_changed_in_place_is_torchs_error() -> None:
    engine = engine_at()
    loss = engine(rows()).square().mean()
    weight = engine.module.blocks[1].inner.b.weight
    with shardwell.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_that_outlives_a_step_is_torchs_error() -> None:
    engine = engine_at()
    loss = engine(rows()).square().mean()
    loss.backward(retain_graph=True)
    engine.step()
    with pytest.raises(RuntimeError, match="were updated by step"):
        loss.backward()


def test_hooks_hand_each_tensor_back_as_it_was() -> None:
    saved = SavedViews(lambda unit: None)
    tensors = [rows(), rows().requires_grad_(), rows().to_sparse(), rows().requires_grad_() * 2]
    for tensor in tensors:
        back = saved._unpack(saved._pack(tensor))
        assert torch.equal(back.to_dense(), tensor.to_dense())
        assert back.grad_fn is None
