"""Parameters that are away: their shape stays, their values are caught or served."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwell
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.ranks import Ranks


def released_engine(**config: Any) -> shardwell.Engine:
    torch.manual_seed(0)
    model = Gpt()
    config.setdefault("shardwell", {})["shard_at_world_one"] = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardwell.initialize(model=model, optimizer=optimizer, config=zero(3, **config), device="cpu").engine


def test_metadata_of_a_released_parameter_is_true() -> None:
    engine, plain = released_engine(), Gpt()
    for (name, away), reference in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
        assert away.shape == reference.shape, name
        assert away.dtype == reference.dtype
        assert away.device == reference.device
        assert away.numel() == reference.numel()
        assert away.ndim == reference.ndim
        assert away.stride() == reference.stride()
        assert away.requires_grad
        assert away.is_leaf
        assert away.grad is None
        assert isinstance(away, nn.Parameter)
        assert "away" in repr(away)


READS = {
    "add": lambda p: p + 1,
    "index": lambda p: p[0],
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(),
    "item": lambda p: p.sum().item(),
    "matmul": lambda p: torch.matmul(p, p.t()),
    "linear": lambda p: torch.nn.functional.linear(torch.ones(p.shape[1]), p),
    "in-place": lambda p: p.zero_(),
    "initialiser": lambda p: nn.init.normal_(p),
    "copy from": lambda p: torch.zeros(p.shape).copy_(p),
    "to": lambda p: p.to(torch.float64),
    "clone": lambda p: p.clone(),
    "storage": lambda p: p.untyped_storage(),
    "data_ptr": lambda p: p.data_ptr(),
    "deepcopy": copy.deepcopy,
    "stack": lambda p: torch.stack([p, p]),
    "assign data": lambda p: setattr(p, "data", torch.zeros(p.shape)),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_reading_a_released_parameter_is_a_clear_error(read: Any) -> None:
    engine = released_engine()
    with pytest.raises(shardwell.ReleasedParameterError, match=r"blocks\.0\.qkv\.weight.*GatheredParameters"):
        read(engine.module.blocks[0].qkv.weight)
    engine.backward(engine(batches(1, 4)[0]))  # and nothing was harmed
    engine.step()


def test_the_error_names_the_attribute_that_was_read() -> None:
    with pytest.raises(shardwell.ReleasedParameterError, match=r"'data' needs the values of"):
        _ = released_engine().module.blocks[0].qkv.weight.data


def test_a_parameter_keeps_its_identity_through_training() -> None:
    engine = released_engine()
    before = [id(p) for p in engine.module.parameters()]
    engine.backward(engine(batches(1, 4)[0]))
    engine.step()
    assert [id(p) for p in engine.module.parameters()] == before


def change_on_one_rank(stage: int, bf16: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Gpt()
    config = zero(stage, bf16={"enabled": bf16})
    shardwell.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    weight = model.blocks[1].out.weight
    untouched = whole_parameters(model)["blocks.1.qkv.weight"]
    with shardwell.zero.GatheredParameters(weight, modifier_rank=1):
        if dist.get_rank() == 1:
            with torch.no_grad():
                weight.fill_(0.25)
    with shardwell.zero.GatheredParameters([weight, model.head.weight]), torch.no_grad():
        seen = weight.clone()
        if stage == 3:
            weight.fill_(7.0)  # lost: nobody was named as the modifier
    after = whole_parameters(model)
    return {
        "seen": seen,
        "after": after["blocks.1.out.weight"],
        "untouched": bool(torch.equal(untouched, after["blocks.1.qkv.weight"])),
    }


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_gathered_parameters_can_be_changed_by_one_rank(ranks: Ranks, stage: int, bf16: bool) -> None:
    for answer in ranks.run(2, change_on_one_rank, stage, bf16):
        assert (answer["seen"] == 0.25).all()
        assert (answer["after"] == 0.25).all()
        assert answer["untouched"]


def train_after_writing_the_same_values(write: bool) -> dict[str, Any]:
    """Opening a bf16 parameter for writing without changing it must not lose its master's lower half."""
    torch.manual_seed(0)
    model = Gpt()
    config = zero(3, bf16={"enabled": True})
    engine, *_ = shardwell.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), config=config
    )
    for batch in batches(4, 4):
        engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
        engine.step()
        if write:
            with shardwell.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
                pass
    return whole_parameters(model)


def test_opening_for_writing_keeps_the_lower_halves(ranks: Ranks) -> None:
    plain, opened = (ranks.run(2, train_after_writing_the_same_values, write)[0] for write in (False, True))
    for name in plain:
        assert (plain[name] == opened[name]).all(), name


def read_during_publish() -> bool:
    torch.manual_seed(0)
    model = Gpt()
    engine, *_ = shardwell.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=zero(1)
    )
    engine.backward(engine(share(batches(1, 6)[0], dist.get_rank(), dist.get_world_size())))
    engine.step()
    early = {name: p.detach().clone() for name, p in model.named_parameters()}  # no wait, no context
    late = whole_parameters(model)
    return all(torch.equal(early[name], late[name]) for name in late)


def test_parameters_read_while_they_are_published_have_the_right_values(ranks: Ranks) -> None:
    assert ranks.run(3, read_during_publish) == [True, True, True]


class Leaky(nn.Module):
    """A block that returns a view of its own parameter, and remembers one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.inner(x), "row": self.inner.weight[0]}


class LeakyPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Leaky(), Leaky()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first["out"])
        return (second["out"] * first["row"]).square().mean() + second["row"].sum()


def train_leaky(sharded: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = LeakyPair()
    config = zero(3 if sharded else 0, shardwell={"shard_at_world_one": True})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()
    return torch.cat([p.flatten() for p in whole_parameters(model).values()])


def test_a_module_may_return_a_view_of_its_parameter() -> None:
    assert torch.allclose(train_leaky(True), train_leaky(False), atol=1e-6)


def test_a_view_kept_from_gathered_parameters_keeps_its_values() -> None:
    engine = released_engine()
    weight = engine.module.blocks[0].qkv.weight
    with shardwell.zero.GatheredParameters(weight):
        view, copy_ = weight.data, weight.detach().clone()
    assert torch.equal(view, copy_)
    engine.backward(engine(batches(1, 4)[0]))
    engine.step()
    assert torch.equal(view, copy_)
    with shardwell.zero.GatheredParameters(weight):
        assert not torch.equal(weight, copy_)


def edited_at_stage_3(how: str, caplog: pytest.LogCaptureFixture) -> str:
    engine = released_engine()
    weight = engine.module.blocks[1].out.weight
    if how == "read only":
        with shardwell.zero.GatheredParameters(weight), torch.no_grad():
            weight.mul_(2.0)
    elif how == "read only, data":
        with shardwell.zero.GatheredParameters(weight):
            weight.data.mul_(2.0)
    elif how == "a module's own":
        out = engine.module.blocks[1].out
        out.register_forward_pre_hook(lambda *args: [None, weight.detach().mul_(2.0)][0])
        engine(batches(1, 4)[0])
    elif how == "modifier":
        with shardwell.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight.mul_(2.0)
        engine(batches(1, 4)[0])
    elif how == "nothing":
        engine.backward(engine(batches(1, 4)[0]))
        engine.step()
        with shardwell.zero.GatheredParameters(weight):
            weight.sum()
        engine.state_dict()
    return caplog.text


@pytest.mark.parametrize("how", ["read only", "read only, data", "a module's own"])
def test_a_change_that_is_lost_is_told(how: str, caplog: pytest.LogCaptureFixture) -> None:
    assert "modifier_rank=0" in edited_at_stage_3(how, caplog)


@pytest.mark.parametrize("how", ["modifier", "nothing"])
def test_what_is_not_lost_is_not_warned_of(how: str, caplog: pytest.LogCaptureFixture) -> None:
    assert not edited_at_stage_3(how, caplog)


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: nn.init.zeros_(m.head.weight),
        lambda m: m.load_state_dict(Gpt().state_dict()),
        lambda m: m.blocks[0].out.reset_parameters(),
        lambda m: m.double(),
        lambda m: setattr(m.head.weight, "data", torch.zeros(29, 16)),
        lambda m: m.head.weight.data.copy_(torch.zeros(29, 16)),
        lambda m: nn.utils.vector_to_parameters(torch.zeros(10**5), m.parameters()),
    ],
)
def test_a_released_parameter_is_not_changed_in_silence(edit: Any) -> None:
    engine = released_engine()
    with pytest.raises((shardwell.errors.ReleasedParameterError, RuntimeError), match=r"engine.load_state_dict\(\)"):
        edit(engine.module)
