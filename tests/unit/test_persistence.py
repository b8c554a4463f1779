"""Which parameters stay whole at stage 3 because they are small: what that costs a model is bounded by default."""

from __future__ import annotations

import torch
from torch import nn

from shardwell.config import ZeroConfig
from shardwell.engine.persistence import persistent_in
from shardwell.sharding import wrap_model
from shardwell.sharding.wrap import LeafRules


def blocks(width: int, num_blocks: int) -> nn.Module:
    with torch.device("meta"):
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width) for _ in range(num_blocks)]
        return nn.Sequential(*layers, nn.Linear(width, 256))


def whole(model: nn.Module, zero: ZeroConfig | None = None) -> list[str]:
    chosen = persistent_in(wrap_model(model, LeafRules((), (), ())), zero or ZeroConfig(stage=3))
    return [name for name, parameter in model.named_parameters() if id(parameter) in chosen]


def test_a_model_of_small_parameters_is_split_by_default() -> None:
    model = blocks(128, 4)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert max(sizes.values()) < 100_000
    kept = whole(model)
    assert 0 < sum(sizes[name] for name in kept) <= 0.01 * sum(sizes.values())
    assert all("weight" not in name or "norm" in name for name in kept)


def test_norms_and_biases_of_a_large_model_stay_whole_by_default() -> None:
    model = blocks(1024, 2)
    small = {name for name, parameter in model.named_parameters() if parameter.dim() == 1}
    assert set(whole(model)) == small


def test_a_threshold_that_is_written_down_holds_whatever_it_costs() -> None:
    model = blocks(128, 4)
    assert len(whole(model, ZeroConfig(stage=3, stage3_param_persistence_threshold=100_000))) == len(
        list(model.parameters())
    )
    assert whole(model, ZeroConfig(stage=3, stage3_param_persistence_threshold=0)) == []


def test_the_bound_of_the_user_holds_beside_the_default() -> None:
    model = blocks(1024, 2)
    assert whole(model, ZeroConfig(stage=3, stage3_model_persistence_threshold=1000)) == ["2.bias"]
