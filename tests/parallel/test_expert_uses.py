"""Uses of an expert axis: checkpoints, meshes, other axes, norms, bits and bytes, the end of an engine, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwell
from shardwell.errors import ConfigError, ShardwellError
from tests.support import sequence_models
from tests.support.expert_models import (
    NUM_EXPERTS,
    ROWS,
    WIDTH,
    Block,
    ExpertCase,
    ListedExperts,
    PackedExperts,
    Router,
    on_axis,
    plainly,
    started,
    train,
)
from tests.support.models import batches, zero
from tests.support.ranks import Ranks
from tests.support.training import distance
from tests.support.wire_counter import WireCounter


def assert_same(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    difference, name = distance(values, expected)
    assert difference < 1e-10, f"{name} differs by {difference}"


# ---------------------------------------------------------------------------------------------------- checkpoints

KINDS = [ExpertCase(steps=3), ExpertCase(model={"listed": True}, steps=3)]


def checkpointed(folder: str) -> list[dict[str, Tensor]]:
    """Train on 2 (expert) x 2, then on 4 (expert), then without the axis; each loads what the one before saved."""
    found = []
    for number, case in enumerate(KINDS):
        values: dict[str, Tensor] = {}
        for stage, size, first, last in ((3, 2, 0, 1), (1, 4, 1, 2), (2, 1, 2, 3)):
            engine = started(replace(case, size=size), stage)
            if first:
                engine.load_checkpoint(f"{folder}/{number}", strict=True)
            train(engine, case, first, last)
            engine.save_checkpoint(f"{folder}/{number}")
            values = engine.state_dict()
            engine.destroy(whole=False)
        found.append(values)
    return found


@pytest.mark.slow
def test_a_checkpoint_loads_at_any_size_of_the_axis(ranks: Ranks, tmp_path: Path) -> None:
    for case, values in zip(KINDS, ranks.run(4, checkpointed, str(tmp_path))[0], strict=True):
        assert_same(values, plainly(case))


# ------------------------------------------------------------------------------------- meshes, births, norms, bits


def other_ways() -> tuple[list[dict[str, Tensor]], list[float]]:
    """By a mesh, and born sharded; and the norms of the last."""
    found = []
    case = ExpertCase(steps=3)
    norms: list[float] = []
    for given in [{"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))}, {}]:
        engine = started(replace(case, born_sharded=not given), 3, **given)
        assert (engine.data_size, engine.data_rank) == (4, dist.get_rank())
        norms = train(engine, case)
        found.append(engine.state_dict())
        engine.destroy(whole=False)
    return found, norms


@pytest.mark.slow
def test_meshes_and_models_born_sharded_follow_one_process_with_its_norms(ranks: Ranks) -> None:
    case = ExpertCase(steps=3)
    torch.manual_seed(0)
    model = case.build()
    optimizer, expected = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for batch in batches(case.steps, ROWS):
        optimizer.zero_grad()
        model(batch).backward()
        expected.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip)))
        optimizer.step()
    for found, norms in ranks.run(4, other_ways)[::3]:
        for values in found:
            assert_same(values, plainly(case))
        assert norms == pytest.approx(expected, rel=1e-12)


def rounded() -> list[dict[str, Tensor]]:
    case = ExpertCase(config={"bf16": {"enabled": True}}, dtype=torch.float32, steps=4)
    return [on_axis([case], stage)[0] for stage in (1, 2, 3)]


@pytest.mark.slow
def test_bf16_has_the_same_bits_at_stages_1_to_3(ranks: Ranks) -> None:
    first, *others = ranks.run(2, rounded)[0]
    for other in others:
        assert all((first[name] == other[name]).all() for name in first)


# ------------------------------------------------------------------------------------------ families, sequences

QWEN = ExpertCase(
    family="Qwen3Moe",
    model={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 4},
    dtype=torch.float32,
    steps=3,
)
BOTH = sequence_models.SequenceCase(
    family="Mixtral",
    model={"num_local_experts": 4, "experts_implementation": "eager"},
    config={"shardwell": {"expert_parallel_size": 2}},
    data="sparse",
    steps=3,
)


def families() -> list[dict[str, Tensor]]:
    return [on_axis([QWEN], 3)[0], sequence_models.on_axis([BOTH], 3)[0]]


@pytest.mark.slow
def test_grouped_products_and_a_sequence_axis_follow_one_process(ranks: Ranks) -> None:
    grouped, both = ranks.run(4, families)[3]
    difference, name = distance(grouped, plainly(QWEN))
    assert difference < 1e-4, f"{name} differs by {difference}"  # in fp32, by torch's grouped products
    assert_same(both, sequence_models.plainly(BOTH))


# ----------------------------------------------------------------------------------------------------------- bytes


def bytes_of_a_step() -> tuple[int, int, int]:
    """Rows that came from the other rank; bytes of a forward by an independent count, of a step by the engine's."""
    case = ExpertCase()
    engine = started(case, 0)
    train(engine, case, 0, 1)
    rows = 0

    def count(module: Any, args: Any) -> None:
        nonlocal rows
        mine = NUM_EXPERTS // 2 * dist.get_rank()
        index = args[1]
        rows += int(((index < mine) | (index >= mine + NUM_EXPERTS // 2)).sum())  # to the other rank, and back

    hooks = [block.experts.register_forward_pre_hook(count) for block in engine.module.blocks]
    batch = batches(case.steps, ROWS)[1].chunk(2)[dist.get_rank()]
    with WireCounter(dist.get_rank(), 2) as wire:
        loss = engine(batch)
    in_forward = wire.received["recv_"]
    for hook in hooks:
        hook.remove()
    engine.backward(loss)
    engine.step()
    total = torch.tensor(rows)
    dist.all_reduce(total)  # what one rank sends, the other one receives
    in_step = engine.traffic().by_axis()["expert"]
    engine.destroy(whole=False)
    return int(total), in_forward, in_step


def test_bytes_on_the_expert_axis_equal_the_formula(ranks: Ranks) -> None:
    width, counts = WIDTH * 8, 2 * (NUM_EXPERTS // 2) * 8  # bytes of a row; of the counts of two layers
    for rows, in_forward, in_step in ranks.run(2, bytes_of_a_step):
        assert rows > 0
        assert in_forward == rows * width + counts
        assert in_step == 2 * rows * width


# --------------------------------------------------------------------------------------------------- the end, others


def handed_on() -> list[Any]:
    """A model that is trained by an engine, made whole, and trained by another one over other ranks."""
    found = []
    for case in KINDS:
        case = replace(case, steps=4)
        engine = started(case, 3)
        train(engine, case, 0, 2)
        model = engine.module
        whole = engine.state_dict()
        engine.destroy()
        plain = {name: value.detach().clone() for name, value in model.state_dict().items()}
        found.append(all((plain[name] == whole[name]).all() for name in whole))
        found.append(type(model.blocks[0].experts).__name__)
        found.append(float(model(batches(1, 2)[0]).detach()) > 0)
    return found


def trained_alone(listed: bool, size: int) -> dict[str, Tensor]:
    """Train the experts of one layer only, behind frozen layers; all tokens go to the first rank's."""
    torch.manual_seed(0)
    model = Block(listed, 100.0).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" in name)
    config = zero(1, train_micro_batch_size_per_gpu=1, shardwell={"expert_parallel_size": size})
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine = shardwell.initialize(model=model, config=config).engine
    for step in range(2):
        x = torch.randn(4, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x.chunk(engine.data_size)[engine.data_rank]).square().mean())
        engine.step()
    found = engine.state_dict()
    engine.destroy(whole=False)
    return found


@pytest.mark.parametrize("listed", [False, True])
def test_experts_without_tokens_behind_frozen_layers_follow_one_process(ranks: Ranks, listed: bool) -> None:
    expected = {name: torch.as_tensor(value) for name, value in ranks.run(1, trained_alone, listed, 1)[0].items()}
    for found in ranks.run(2, trained_alone, listed, 2):
        assert distance(found, expected)[0] < 1e-10


class CallsAll(ListedExperts):
    """Calls also the experts that no token has chosen, which have gradients of zero then."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        found = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            token, place = (top_k_index == number).nonzero(as_tuple=True)
            found = found.index_add(0, token, expert(hidden_states[token]) * top_k_weights[token, place, None])
        return found


EXPERTS = {"packed": PackedExperts, "listed": ListedExperts, "all called": CallsAll}


def trained_without_tokens(kind: str, size: int) -> dict[str, Tensor]:
    """Train with weight decay; all tokens go to the first two experts in the first step and to the others then."""
    torch.manual_seed(0)
    model: Any = Block(kind != "packed", 100.0).double()
    model.experts.__class__ = EXPERTS[kind]
    config = zero(2, train_micro_batch_size_per_gpu=1, shardwell={"expert_parallel_size": size})
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}}
    engine = shardwell.initialize(model=model, config=config).engine
    for step in range(3):
        x = torch.randn(4, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x.chunk(engine.data_size)[engine.data_rank]).square().mean())
        engine.step()
        model.skew.copy_(model.skew.flip(0))
    found = engine.state_dict()
    engine.destroy(whole=False)
    return found


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_without_tokens_decay_as_in_one_process(ranks: Ranks, kind: str) -> None:
    expected = ranks.run(1, trained_without_tokens, kind, 1)[0]
    for found in ranks.run(2, trained_without_tokens, kind, 2):
        for name, value in expected.items():
            assert abs(torch.as_tensor(found[name]) - torch.as_tensor(value)).max() < 1e-10, name


def test_destroy_gives_each_rank_all_experts(ranks: Ranks) -> None:
    for found in ranks.run(2, handed_on):
        assert found == [True, "PackedExperts", True, True, "ListedExperts", True]


class Wrapped(nn.Module):
    """Experts whose parameters have adapters, as PEFT wraps them for `target_parameters`."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, *args: Tensor) -> Any:
        return self.base_layer(*args)


def words_of(what: str) -> str:
    try:
        config: dict[str, Any] = zero(1, shardwell={"expert_parallel_size": 2})
        if what == "none":
            shardwell.initialize(model=nn.Linear(4, 4), config=config)
        if what == "tensor":
            shardwell.initialize(model=Router(), config={**config, "tensor_parallel": {"autotp_size": 2}})
        if what == "ranks":
            shardwell.initialize(model=Router(), config=zero(1, shardwell={"expert_parallel_size": 3}))
        if what == "wrapped":
            model = Router()
            for block in model.blocks:
                block.experts = Wrapped(block.experts)
            shardwell.initialize(model=model, config=config)
        if what == "number":
            model = Router(listed=True)
            for block in model.blocks:
                del block.experts[3]
            shardwell.initialize(model=model, config=config)
    except (ConfigError, ShardwellError) as error:
        return str(error)
    return "nothing was refused"


REFUSALS = {
    "none": "expert_parallel_size: 2, and the model has no experts that ranks can share",
    "tensor": "expert_parallel_size: 2 does not work with 1 pipeline stages, 2 tensor ranks and 1 replicas",
    "ranks": "cannot be divided by",
    "wrapped": "adapters wrap the parameters of 'blocks.0.experts'",
    "number": "2 ranks cannot share the 3 experts of 'blocks.0.experts' evenly",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_work_is_one_sentence(ranks: Ranks, what: str) -> None:
    for words in ranks.run(4, words_of, what):
        assert REFUSALS[what] in words
