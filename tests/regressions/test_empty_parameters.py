"""Pain: sharded parameters look empty: their shape is (0,), and code that counts or compares them breaks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import shardwell
from shardwell.sharding.released import ReleasedParameter
from tests.support.models import Gpt, batches, share, zero
from tests.support.ranks import Ranks


def away(born_sharded: bool, bf16: bool) -> shardwell.Engine:
    """An engine whose parameters are all released, after a step."""
    config = zero(3, bf16={"enabled": bf16}, optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
    with shardwell.zero.Init(config_dict_or_path=config, enabled=born_sharded):
        torch.manual_seed(0)
        model = Gpt(tied=True)
    engine, *_ = shardwell.initialize(model=model, config=config)
    engine.backward(engine(share(batches(1, 4)[0], engine.global_rank, engine.world_size)))
    engine.step()
    assert all(type(parameter) is ReleasedParameter for parameter in model.parameters())
    return engine


def look_at_metadata(born_sharded: bool, bf16: bool) -> None:
    model, plain = away(born_sharded, bf16).module, Gpt(tied=True).to(torch.bfloat16 if bf16 else torch.float32)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
    assert sum(p.nbytes for p in model.parameters()) == sum(p.nbytes for p in plain.parameters())
    assert repr(model) == repr(plain)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(found, nn.Parameter)
        assert torch.is_tensor(found)
        assert found.shape == expected.shape
        assert found.size(0) == len(found) == expected.size(0)
        assert found.stride() == expected.stride()
        assert (found.ndim, found.dim()) == (expected.ndim, expected.dim())
        assert (found.dtype, found.device, found.layout) == (expected.dtype, expected.device, expected.layout)
        assert found.is_floating_point()
        assert found.is_leaf
        assert found.requires_grad
        assert found.grad is None
        assert str(tuple(expected.shape)) in repr(found) == str(found) == f"{found}"
        with pytest.raises(shardwell.ReleasedParameterError, match="GatheredParameters"):
            found.sum()
    decayed = [name for name, p in model.named_parameters() if p.ndim >= 2 and p.shape[0] > 1]
    assert decayed == [name for name, p in plain.named_parameters() if p.ndim >= 2 and p.shape[0] > 1]


def use_identity(born_sharded: bool, bf16: bool) -> None:
    engine = away(born_sharded, bf16)
    model = engine.module
    rates = {parameter: index for index, parameter in enumerate(model.parameters())}
    assert len(rates) == len(set(model.parameters())) == len(list(model.parameters()))
    assert model.head.weight is model.embed.weight
    before = {name: (id(p), hash(p)) for name, p in model.named_parameters()}
    engine.backward(engine(share(batches(1, 4)[0], engine.global_rank, engine.world_size)))
    engine.step()
    assert before == {name: (id(p), hash(p)) for name, p in model.named_parameters()}
    assert [rates[parameter] for parameter in model.parameters()] == list(range(len(rates)))
    assert model.get_parameter("blocks.1.qkv.weight") is model.blocks[1].qkv.weight


def hand_to_torch(born_sharded: bool, bf16: bool) -> None:
    """Into an optimizer, a scheduler, a vector and a state dictionary."""
    engine = away(born_sharded, bf16)
    model = engine.module
    plain = Gpt(tied=True)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim <= 1]},
        ],
        lr=1e-3,
    )
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(plain.parameters()))
    optimizer.zero_grad()
    with shardwell.zero.GatheredParameters(list(model.parameters())):
        vector = parameters_to_vector(model.parameters())
    state = engine.state_dict()
    assert {key: value.shape for key, value in state.items()} == {k: v.shape for k, v in plain.state_dict().items()}
    plain.load_state_dict(state)
    assert vector.shape == (sum(p.numel() for p in plain.parameters()),)
    assert torch.equal(vector.float(), parameters_to_vector(plain.parameters()))


def check_all(born_sharded: bool, bf16: bool) -> None:
    for check in (look_at_metadata, use_identity, hand_to_torch):
        check(born_sharded, bf16)


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("born_sharded", [False, True], ids=["given", "born sharded"])
def test_released_parameters_look_like_parameters(ranks: Ranks, born_sharded: bool, bf16: bool) -> None:
    """Counting, grouping, comparing or printing parameters gives zeros; here only their values are away."""
    ranks.run(2, check_all, born_sharded, bf16)
