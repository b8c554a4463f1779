"""A tiled linear computes what the plain one does, and a sharded one never becomes whole."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwell
from shardwell.engine import TraceAction
from shardwell.memory import StateKind
from shardwell.sharding.tiled import TiledLinear, tile_linears
from shardwell.sharding.wrap import LeafRules, wrap_model
from tests.support.internals import units_of
from tests.support.models import Block, Gpt, batches, share, whole_parameters, zero
from tests.support.ranks import Ranks

# ------------------------------------------------------------------------------------------------------- the function


def whole_gradients(tiled: TiledLinear) -> tuple[Tensor, Tensor | None]:
    """The gradients of all tiles, put together."""
    rows = [list(row) for row in tiled.linears]
    weight = torch.cat([torch.cat([tile.weight.grad for tile in row], dim=1) for row in rows])
    biases = [tile.bias.grad for row in rows for tile in row if tile.bias is not None]
    return weight, torch.cat(biases) if biases else None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_splits", "out_splits"), list(product([1, 2, 3, 7], [1, 2, 4, 5])))
def test_function_and_gradients_are_those_of_a_linear(in_splits: int, out_splits: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(7, 5, bias=bias, dtype=torch.float64)
    tiled = TiledLinear.from_linear(linear, in_splits, out_splits)
    assert len(tiled.tiles()) == in_splits * out_splits
    assert sum(parameter.numel() for parameter in tiled.parameters()) == sum(p.numel() for p in linear.parameters())
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, found = linear(one), tiled(other)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    expected.sin().sum().backward()
    found.sin().sum().backward()
    torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=1e-12)
    weight, tiled_bias = whole_gradients(tiled)
    torch.testing.assert_close(weight, linear.weight.grad, rtol=0, atol=1e-12)
    if bias:
        torch.testing.assert_close(tiled_bias, linear.bias.grad, rtol=0, atol=1e-12)


def test_parts_may_come_split_and_stay_split() -> None:
    linear = nn.Linear(7, 5, dtype=torch.float64)
    tiled = TiledLinear.from_linear(linear, 2, 3, input_is_already_split=True, combine_out_splits=False)
    x = torch.randn(4, 7, dtype=torch.float64)
    outputs = tiled(x.split(tiled.in_sizes, dim=-1))
    assert [output.shape[-1] for output in outputs] == tiled.out_sizes == [2, 2, 1]
    torch.testing.assert_close(torch.cat(outputs, dim=-1), linear(x), rtol=0, atol=1e-12)
    with pytest.raises(shardwell.ShardwellError, match="found one tensor"):
        tiled(x)
    with pytest.raises(shardwell.ShardwellError, match=r"width \[4, 3\], found \[3, 4\]"):
        tiled(x.split([3, 4], dim=-1))


def test_other_classes_and_start_values() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    linear = nn.Linear(6, 4, dtype=torch.float64)
    tiled = TiledLinear(6, 4, True, 2, 2, linear_cls=Doubled, init_linear=linear, dtype=torch.float64)
    x = torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(tiled(x), 2 * linear(x), rtol=0, atol=1e-12)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(shardwell.ShardwellError, match="in_splits=5"):
        TiledLinear(4, 4, in_splits=5)
    with pytest.raises(shardwell.ShardwellError, match="cannot copy"):
        TiledLinear(4, 4).copy_params_from(nn.Linear(4, 5))
    with pytest.raises(shardwell.ShardwellError, match="cannot copy"):
        TiledLinear(4, 4).copy_params_from(nn.Linear(4, 4, bias=False))


# --------------------------------------------------------------------------------------------------- whole models


def test_every_large_linear_of_a_model_is_replaced() -> None:
    torch.manual_seed(0)
    model = Gpt().double()
    batch = batches(1, 4)[0]
    expected = model(batch)
    assert tile_linears(model, 300) is model
    tiles = [tile for module in model.modules() if isinstance(module, TiledLinear) for tile in module.tiles()]
    assert {type(tile) for tile in tiles} == {nn.Linear}
    assert all(module.weight.numel() <= 300 for module in model.modules() if isinstance(module, nn.Linear))
    assert isinstance(model.blocks[0].out, nn.Linear)  # 256 elements are not too many
    torch.testing.assert_close(model(batch), expected, rtol=0, atol=1e-12)


def test_a_row_that_is_too_long_is_split_too() -> None:
    tiled = tile_linears(nn.Linear(10, 3), 4)
    assert isinstance(tiled, TiledLinear)
    assert (tiled.in_sizes, tiled.out_sizes) == ([4, 3, 3], [1, 1, 1])


def test_frozen_shared_and_tied_layers() -> None:
    frozen = nn.Linear(8, 8).requires_grad_(False).eval()
    shared = nn.Linear(8, 8)
    model = nn.Sequential(frozen, shared, nn.ReLU(), shared)
    tile_linears(model, 16)
    assert not any(parameter.requires_grad for parameter in model[0].parameters())
    assert not model[0].linears[0][0].training
    assert isinstance(model[1], TiledLinear)
    assert model[1] is model[3]
    tied = Gpt(tied=True)
    with pytest.warns(UserWarning, match="head is not tiled"):
        tile_linears(tied, 300)
    assert tied.head.weight is tied.embed.weight


def test_tiles_are_units_unless_an_enclosing_module_is_named() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([Block(8), Block(8)])})
    model["blocks"][0].up = TiledLinear.from_linear(model["blocks"][0].up, 1, 2)
    tiles = ["blocks.0.up.linears.0.0", "blocks.0.up.linears.1.0"]
    owners = {name: one.name for one in wrap_model(model) for name, _ in one.parameters}
    assert [one.name for one in wrap_model(model)] == ["blocks.0", *tiles, "blocks.1"]
    assert owners["blocks.0.up.linears.1.0.weight"] == tiles[1]
    assert owners["blocks.0.down.weight"] == "blocks.0"
    assert [one.name for one in wrap_model(model, LeafRules(classes=("Block",)))] == ["blocks.0", "blocks.1"]
    assert "blocks.0.up" in [one.name for one in wrap_model(model, LeafRules(names=("blocks.0.up",)))]


# ----------------------------------------------------------------------------------------------------- sharded training


def train(stage: int, tiled: bool, recompute: bool = False, born_sharded: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        with shardwell.zero.Init(config_dict_or_path=zero(stage), enabled=born_sharded):
            model = Gpt(recompute="non-reentrant" if recompute else "")
            if tiled:
                tile_linears(model, 300)
    finally:
        torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage)).engine
    for batch in batches(4, 8):
        engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
        engine.step()
    return put_together(model)


def put_together(model: nn.Module) -> dict[str, Tensor]:
    """All parameters under the names that they have in a model without tiles."""
    found = whole_parameters(model)
    for name, module in model.named_modules():
        if isinstance(module, TiledLinear):
            rows = [
                torch.cat([found.pop(f"{name}.linears.{o}.{i}.weight") for i in range(module.in_splits)], dim=1)
                for o in range(module.out_splits)
            ]
            found[f"{name}.weight"] = torch.cat(rows)
            last = module.in_splits - 1
            biases = [found.pop(f"{name}.linears.{o}.{last}.bias", None) for o in range(module.out_splits)]
            if biases[0] is not None:
                found[f"{name}.bias"] = torch.cat(biases)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "recompute"), [(1, False), (2, True), (3, False), (3, True)])
def test_sharded_training_follows_the_plain_layers(ranks: Ranks, stage: int, recompute: bool) -> None:
    expected = ranks.run(2, train, stage, False, recompute)[0]
    for found in ranks.run(2, train, stage, True, recompute):
        assert found.keys() == expected.keys()
        for name in expected:
            assert abs(found[name] - expected[name]).max() < 1e-10, name


@pytest.mark.slow
def test_a_model_that_is_born_sharded_can_be_tiled(ranks: Ranks) -> None:
    expected = ranks.run(2, train, 3, False)[0]
    found = ranks.run(2, train, 3, True, born_sharded=True)[0]
    for name in expected:
        assert abs(found[name] - expected[name]).max() < 1e-10, name


class Wide(nn.Module):
    """One pair of layers that is far larger than all others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 32)
        self.up, self.down = nn.Linear(32, 4000), nn.Linear(4000, 32)
        self.head = nn.Linear(32, 29)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def most_whole(tiled: bool) -> dict[str, int]:
    """The most bytes of parameters that were whole at once in a training step, by the books and by the trace."""
    torch.manual_seed(0)
    model: Any = Wide()
    if tiled:
        tile_linears(model, 16_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(3)).engine
    for batch in batches(2, 4):
        with engine.record() as trace:
            engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
        engine.step()
    units = units_of(engine)
    now, peak = 0, 0
    for event in trace.events:
        if event.action in (TraceAction.ALL_GATHER, TraceAction.RESHARD):
            now += units[event.unit].numel * (4 if event.action is TraceAction.ALL_GATHER else -4)
            peak = max(peak, now)
    report = engine.memory()
    return {
        "trace": peak,
        "books": report.total(StateKind.PARAMETERS, at_peak=True) - report.total(StateKind.PARAMETERS),
        "layer": 4 * 32 * 4000,
        "tile": 4 * max(unit.numel for unit in units),
        "rest": 4 * sum(unit.numel for unit in units if ".linears." not in unit.name),
    }


def test_a_layer_larger_than_the_others_never_becomes_whole(ranks: Ranks) -> None:
    for answer in ranks.run(2, most_whole, False):
        assert answer["trace"] >= answer["layer"]
    for answer in ranks.run(2, most_whole, True):
        assert answer["tile"] < 0.15 * answer["layer"]
        assert answer["trace"] <= 2 * answer["tile"] + answer["rest"] < 0.3 * answer["layer"]
        assert answer["books"] <= 2 * answer["tile"] + answer["rest"]
