"""How a model is cut into units."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwell
from shardwell.sharding.wrap import LeafRules, wrap_model
from tests.support.models import Block, Gpt


def names(model: nn.Module, wanted: LeafRules | None = None) -> list[str]:
    return [one.name for one in wrap_model(model, wanted)]


def owner(model: nn.Module, parameter: str, wanted: LeafRules | None = None) -> str:
    return next(one.name for one in wrap_model(model, wanted) for name, _ in one.parameters if name == parameter)


def test_blocks_embeddings_and_heads_are_units_and_the_rest_is_the_root() -> None:
    model = Gpt(width=16, vocab=64)
    assert names(model) == ["", "embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert owner(model, "norm.weight") == owner(model, "position") == ""


def test_every_parameter_belongs_to_one_unit() -> None:
    model = Gpt(tied=True)
    owned = [id(p) for one in wrap_model(model) for _, p in one.parameters]
    assert sorted(owned) == sorted(id(p) for p in model.parameters())


def test_a_shared_parameter_belongs_to_the_nearest_common_ancestor() -> None:
    assert owner(Gpt(tied=True), "embed.weight") == ""
    model = nn.ModuleDict({"towers": nn.ModuleList([nn.ModuleDict({"a": Block(8), "b": Block(8)}) for _ in range(2)])})
    model["towers"][0]["a"].up.weight = model["towers"][0]["b"].up.weight
    wanted = LeafRules(names=("towers.0", "towers.0.a", "towers.0.b"))
    assert owner(model, "towers.0.a.up.weight", wanted) == "towers.0"


def test_a_sequential_of_equal_blocks_is_cut() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Block(8), Block(8))
    assert names(model) == ["", "1", "2"]


def test_a_list_of_sequentials_is_cut_and_stages_of_blocks_are_cut_inside() -> None:
    plain = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])})
    assert names(plain) == ["layers.0", "layers.1"]
    staged = nn.Sequential(nn.Sequential(Block(8), Block(8)), nn.Sequential(Block(8), Block(8)))
    assert names(staged) == ["0.0", "0.1", "1.0", "1.1"]


def test_classes_names_and_suffixes_override() -> None:
    model = Gpt()
    assert "blocks.0.qkv" in names(model, LeafRules(suffixes=("qkv",)))
    assert "blocks" in names(model, LeafRules(names=("blocks",)))
    assert "blocks.0" not in names(model, LeafRules(names=("blocks",)))
    assert "blocks.1.norm1" in names(model, LeafRules(classes=("LayerNorm",)))
    assert "norm" in names(model, LeafRules(classes=("torch.nn.modules.normalization.LayerNorm",)))


def test_a_named_unit_is_not_cut_further() -> None:
    model = Gpt()
    assert names(model, LeafRules(classes=("Block", "Linear")))[1:] == [
        "embed",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "head",
    ]


def test_a_model_without_blocks_is_one_unit_or_its_large_leaves() -> None:
    assert names(nn.Linear(3, 3)) == [""]
    assert names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == ["0", "2"]


def test_a_model_without_parameters_has_no_units() -> None:
    assert wrap_model(nn.ReLU()) == []
    assert torch.is_tensor(nn.ReLU()(torch.zeros(1)))


def test_modules_can_be_named_as_units_from_the_code() -> None:
    model = Gpt(blocks=2)
    found = shardwell.utils.set_z3_leaf_modules(model, [nn.LayerNorm])
    assert len(found) == 5 == len(shardwell.utils.get_z3_leaf_modules(model))
    assert {"blocks.0.norm1", "blocks.1.norm2", "norm"} <= {one.name for one in wrap_model(model)}
    shardwell.utils.unset_z3_leaf_modules(model, ["LayerNorm"])
    assert {"blocks.0", "blocks.1"} <= {one.name for one in wrap_model(model)}
    with pytest.raises(shardwell.ShardwellError, match="Nothing"):
        shardwell.utils.set_z3_leaf_modules(model, ["Nothing"])
