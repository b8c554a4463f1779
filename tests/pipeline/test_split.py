"""Models are divided evenly, at the layers that the user names, and what cannot be divided is refused."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwell.compat.deepspeed_api.topology import ProcessTopology
from shardwell.engine.pipeline_setup import move_loss
from shardwell.errors import ConfigError, ShardwellError
from shardwell.pipeline import LayerSpec, PipelineModule, split
from shardwell.pipeline.messages import HiddenForm
from shardwell.pipeline.partition import LayerCost, divide
from shardwell.pipeline.passage import PassThrough
from shardwell.pipeline.stage_modules import StageModules
from tests.support.pipelines import LENGTH, VOCABULARY, WIDTH, Block, Decoder, chain


def largest(costs: list[int], borders: list[int]) -> int:
    return max(sum(costs[a:b]) for a, b in pairwise(borders))


def test_the_slowest_stage_is_as_fast_as_possible() -> None:
    # An embedding of many parameters and no FLOPs, eight blocks, and an output layer that costs as much as four.
    costs = [LayerCost(4000, 0), *[LayerCost(1000, 2000)] * 8, LayerCost(4000, 8000)]
    borders = divide("best", costs, ["L"] * 10, 4)
    assert largest([cost.flops for cost in costs], borders) == 8000
    assert borders == [0, 1, 5, 9, 10] or largest([cost.parameters for cost in costs], borders) == 5000
    assert divide("uniform", costs, ["L"] * 10, 4)[0::4] == [0, 10]
    even = divide("parameters", costs, ["L"] * 10, 4)
    assert largest([cost.parameters for cost in costs], even) == 4000


def test_types_are_counted_as_deepspeed_counts_them() -> None:
    classes = ["Embedding", *["Block"] * 6, "LayerNorm", "Linear"]
    borders = divide("type:block", [LayerCost(1, 1)] * 9, classes, 3)
    assert [classes[a:b].count("Block") for a, b in pairwise(borders)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("method", "stages", "words"),
    [
        ("best", 12, "12 stages .* need at least as many layers, and the model has 9"),
        ("fair", 2, "expected best, parameters, uniform or type:REGEX, found 'fair'"),
        ("type:head", 2, "matches 0 of the layers, and there are 2 stages"),
    ],
)
def test_divisions_that_cannot_be_are_refused(method: str, stages: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        divide(method, [LayerCost(1, 1)] * 9, ["Block"] * 9, stages)


def ends_first() -> nn.Module:
    """A decoder whose norm and head are registered before its blocks."""
    model = Decoder()
    model._modules = {name: model._modules[name] for name in ("norm", "head", "tokens", "places", "blocks")}
    return model


class InSteps(Decoder):
    """A decoder whose forward does not name its modules."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.run(ids)

    def run(self, ids: Tensor) -> Tensor:
        return super().forward(ids)


@pytest.mark.parametrize(
    "build",
    [chain, Decoder, lambda: Decoder(tied=True), ends_first],
    ids=["chain", "decoder", "tied", "registered in another order"],
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_stages_one_after_another_are_the_model(build: Any, ranks: int) -> None:
    torch.manual_seed(0)
    model = build()
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    expected = model(ids)
    hidden, names = None, set()
    num_stages = 4
    for stage in range(num_stages):
        divided = split(copy.deepcopy(model))
        borders = divided.borders(num_stages if ranks != 3 else 3, "best")
        if stage >= len(borders) - 1:
            break
        modules = StageModules(divided.layers, borders, stage % ranks, ranks)
        with modules.running(stage, hidden):
            hidden = divided.model(ids if hidden is None or not divided.layers.is_chain else hidden)
        names |= {name for name, _ in divided.model.named_parameters()}
        if ranks > 1:
            assert sum(1 for _ in divided.model.parameters()) < sum(1 for _ in model.parameters())
    assert torch.equal(hidden, expected)
    assert names == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("order", [("norm", "tokens", "places", "blocks", "head"), ("places", "blocks", "tokens")])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_module_that_runs_on_the_other_side_of_the_blocks_is_refused(order: tuple[str, ...], stage: int) -> None:
    model = InSteps()
    rest = [name for name in model._modules if name not in order]
    model._modules = {name: model._modules[name] for name in (*order, *rest)}
    divided = split(model)
    modules = StageModules(divided.layers, divided.borders(2, "best"), stage, 2)
    hidden = torch.zeros(2, LENGTH, WIDTH) if stage else None
    with (
        pytest.raises(ShardwellError, match=r"'(norm|tokens)' runs (before|after) the blocks and is registered"),
        modules.running(stage, hidden),
    ):
        divided.model(torch.zeros(2, LENGTH, dtype=torch.long))


def test_a_tied_parameter_keeps_its_first_name_where_its_layer_is_not() -> None:
    divided = split(Decoder(tied=True))
    modules = StageModules(divided.layers, divided.borders(2, "best"), 1, 2)
    assert modules.tied == {"tokens.weight": (0, 1)}
    names = [name for name, _ in divided.model.named_parameters()]
    assert "tokens.weight" in names
    assert "head.weight" not in names
    assert divided.model.head.weight is divided.model.tokens.weight


def test_a_container_of_another_stage_is_not_looked_into() -> None:
    elsewhere: Any = PassThrough().stand_for(nn.ModuleDict({"default": nn.Linear(2, 2)}), "prompts", nn.Module())
    for use in (lambda: elsewhere["default"], lambda: list(elsewhere), lambda: len(elsewhere)):
        with pytest.raises(ShardwellError, match="the model uses 'prompts' of a module that another stage has"):
            use()
    assert elsewhere  # a module that is there


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(ShardwellError, match="stage 1 of the pipeline returned a tuple of Tensor, NoneType"):
        HiddenForm.of((torch.zeros(2), None), 1)


class TwoLists(nn.Module):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (nn.ModuleList(Block() for _ in range(2)) for _ in range(2))


class Beside(nn.Module):
    """A parameter beside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))


def laid_out(axes: list[str], sizes: list[int]) -> PipelineModule:
    return PipelineModule([LayerSpec(nn.Linear, 2, 2)], topology=ProcessTopology(axes, sizes))


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (lambda: split(nn.Linear(2, 2)), "a Linear has no list of blocks"),
        (lambda: split(TwoLists()), "has several lists of blocks"),
        (lambda: split(Beside()), "holds a parameter beside its blocks"),
        (lambda: split(chain(), at=["9"]), "names '9', which is no layer"),
        (lambda: split(chain(), at="middle"), 'takes "auto" or a list of names, found "middle"'),
        (lambda: split(chain(), at=["2", "4"]).borders(2, "best"), "makes 3 stages, and the configuration has 2"),
        (lambda: split(chain(), at=["4", "2"]).borders(3, "best"), "is not in the order of the layers"),
        (lambda: PipelineModule([LayerSpec(nn.Linear, 2, 2)]), "needs num_stages"),
        (lambda: PipelineModule([LayerSpec(nn.Linear, 2, 2)] * 2, num_stages=2), "1 rank.* cannot be 2 stages"),
        (lambda: laid_out(["pipe", "data", "model"], [1, 1, 2]), "the axis 'model' of 1 .pipe. x 1 .data. x 2 .model."),
        (lambda: laid_out(["pipe", "data"], [1, 2]), "is not the layout of 1 rank.s. in 1 stages"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(refused: Any, words: str) -> None:
    with pytest.raises(ShardwellError, match=words):
        refused()


def test_weights_of_classes_go_to_the_device_and_what_a_stage_has_does_not() -> None:
    model, loss = nn.BatchNorm1d(3), nn.CrossEntropyLoss(weight=torch.ones(3))
    loss.add_module("shared", model)
    move_loss(loss, model, torch.device("meta"))
    assert loss.weight.is_meta
    assert not any(one.is_meta for one in (*model.parameters(), *model.buffers()))
