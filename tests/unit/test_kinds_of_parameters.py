"""Parameters of the user's own classes keep them; kinds that cannot be cut into shards are refused with their names."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import SGD

import shardwell
from shardwell.zero import GatheredParameters
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks


class Marked(nn.Parameter):
    """With a name of its own, and a method."""

    role: str = "none"

    def doubled(self) -> Tensor:
        return self * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.first.weight = Marked(self.first.weight.detach().clone())
        self.first.weight.role = "query"
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        assert isinstance(weight, Marked)
        return self.second(torch.tanh(nn.functional.linear(x, weight.doubled()))).square().mean()


def start(model: nn.Module, stage: int, **config: Any) -> shardwell.Engine:
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.5)
    return shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage, **config)).engine


def classes(stage: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    engine = start(model, stage)
    inputs = torch.arange(8.0).view(2, 4) / 8
    seen = []
    for _ in range(2):
        engine.backward(engine(inputs))
        engine.step()
        seen.append((isinstance(model.first.weight, Marked), model.first.weight.role))
    with GatheredParameters(model.parameters()):
        seen.append((type(model.first.weight) is Marked, copy.deepcopy(model).first.weight.__class__ is Marked))
    return {"seen": seen, "values": whole_parameters(model)}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_parameter_keeps_its_class_and_attributes(ranks: Ranks, stage: int) -> None:
    torch.manual_seed(0)
    plain = Model()
    optimizer = SGD(plain.parameters(), lr=0.1, momentum=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        plain(torch.arange(8.0).view(2, 4) / 8).backward()
        optimizer.step()
    for answer in ranks.run(2, classes, stage):
        assert answer["seen"] == [(True, "query"), (True, "query"), (True, True)]
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(torch.as_tensor(answer["values"][name]), parameter.detach())


class Wrapped(Tensor):
    """Keeps its values elsewhere, as quantised tensors do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapped(args[0].inner)
        raise NotImplementedError(str(func))


def refused(model: nn.Module, words: str) -> None:
    with pytest.raises(shardwell.ShardwellError, match=words):
        shardwell.initialize(model=model, config=zero(3), device="cpu")


def test_a_parameter_that_keeps_its_values_elsewhere_is_refused() -> None:
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(Wrapped(torch.ones(3, 3)), requires_grad=False)
    refused(model, "parameter 'weight' is a .*Wrapped, which keeps its values in other tensors")


def test_a_lazy_parameter_is_refused() -> None:
    refused(nn.Sequential(nn.LazyLinear(3)), "parameter '0.weight' has no shape yet")


def split_parameters() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    over_two_axes = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    over_two_axes.weight = nn.Parameter(distribute_tensor(over_two_axes.weight.detach(), mesh, [Replicate(), Shard(0)]))
    taken = nn.Linear(4, 4)
    fully_shard(taken, mesh=mesh["tp"])
    words = []
    for model in (over_two_axes, taken):
        with pytest.raises(shardwell.ShardwellError) as caught:
            shardwell.initialize(model=model, config=zero(2))
        words.append(str(caught.value))
    return words


def test_dtensors_over_several_axes_and_those_of_fully_shard_are_refused(ranks: Ranks) -> None:
    for over_two_axes, taken in ranks.run(2, split_parameters):
        assert "'weight' is a DTensor over a mesh of shape (1, 2), and one dimension is expected" in over_two_axes
        assert "torch's fully_shard or replicate has taken the model" in taken


def wrapped_model() -> str:
    with pytest.raises(shardwell.ShardwellError) as caught:
        shardwell.initialize(model=DistributedDataParallel(nn.Linear(3, 3)), config=zero(2))
    return str(caught.value)


def test_a_model_that_averages_its_gradients_itself_is_refused(ranks: Ranks) -> None:
    assert all("wrapped in DistributedDataParallel" in words for words in ranks.run(2, wrapped_model))
    refused(nn.Sequential(DataParallel(nn.Linear(3, 3))), "its part '0' is wrapped in DataParallel")


def test_parameters_that_share_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    refused(model, "'0.weight' and '1.weight' share memory")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias = nn.Parameter(model[0].weight.data[2])
    refused(model, "'0.weight' and '1.bias' share memory")


class TwoNames(nn.Module):
    def __init__(self, *, halves: bool) -> None:
        super().__init__()
        both = torch.randn(4, 8, generator=torch.Generator().manual_seed(3)) / 4
        self.one = nn.Parameter(both[:, :4] if halves else both)
        self.two = nn.Parameter(both[:, 4:]) if halves else self.one  # of the same memory, but no element is in both

    def forward(self, x: Tensor) -> Tensor:
        other = self.two.t() if self.one is self.two else self.two
        return (x @ self.one @ other).square().mean()


def two_names(stage: int, halves: bool) -> dict[str, Tensor]:
    model = TwoNames(halves=halves)
    engine = start(model, stage)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()
    return {name: value.clone() for name, value in engine.state_dict().items()}


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_with_two_names_and_two_views_of_one_tensor_train_as_in_plain_pytorch(
    ranks: Ranks, stage: int, halves: bool
) -> None:
    plain = TwoNames(halves=halves)
    optimizer = SGD(plain.parameters(), lr=0.1, momentum=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        plain(torch.ones(2, 4)).backward()
        optimizer.step()
    for found in ranks.run(2, two_names, stage, halves):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(torch.as_tensor(found[name]), value)


def test_copies_and_files_of_a_model_are_ordinary_and_engines_are_not_copied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    engine = start(model, 2)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        twin(torch.ones(1, 3)).sum().backward()
        assert all(type(p) is nn.Parameter and p.grad is not None for p in twin.parameters())
        shardwell.initialize(model=twin, config=zero(2), device="cpu")
    for act in (copy.deepcopy, copy.copy, lambda engine: torch.save(engine, io.BytesIO())):
        with pytest.raises(shardwell.ShardwellError, match="an engine cannot be pickled or copied"):
            act(engine)


def test_a_file_of_a_model_whose_parameters_are_away_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    start(model, 3, shardwell={"shard_at_world_one": True})
    with pytest.raises(shardwell.errors.ReleasedParameterError, match=r"engine.state_dict\(\)"):
        torch.save(model, io.BytesIO())
