"""Uses of a sequence axis: other axes, meshes, random numbers, bytes, bits, checkpoints, refusals, failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwell
from shardwell import sequence_parallel
from shardwell.errors import ConfigError, ShardwellError
from tests.support.models import zero
from tests.support.ranks import Ranks
from tests.support.sequence_models import (
    HEADS,
    ROWS,
    TOKENS,
    WIDTH,
    Decoder,
    SequenceCase,
    loss_of,
    micro_batches,
    on_axis,
    plain_logits,
    plainly,
    started,
    train,
)
from tests.support.training import distance
from tests.support.wire_counter import WireCounter


def assert_same(values: dict[str, Tensor], expected: dict[str, Tensor], limit: float = 1e-10) -> None:
    difference, name = distance(values, expected)
    assert difference < limit, f"{name} differs by {difference}"


# -------------------------------------------------------------------------------------------------- other axes

WITH_TENSOR = {
    1: SequenceCase(tensor=2, data="packed", steps=4),
    3: SequenceCase(tensor=2, family="Llama", model={"num_key_value_heads": 4}, data="padded", steps=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", WITH_TENSOR)
def test_tensor_and_sequence_axes_follow_one_process(ranks: Ranks, stage: int) -> None:
    (values,) = ranks.run(4, on_axis, [WITH_TENSOR[stage]], stage)[1]
    assert_same(values, plainly(WITH_TENSOR[stage]))


class Mpu:
    """Megatron's getters for neighbouring ranks that share sequences."""

    def get_sequence_parallel_world_size(self) -> int:
        return 2

    def get_sequence_parallel_rank(self) -> int:
        return dist.get_rank() % 2

    def get_data_parallel_world_size(self) -> int:
        return 2

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() // 2


def by_mesh_and_mpu(case: SequenceCase) -> list[dict[str, Tensor]]:
    meshes = [((2, 2), ("dp", "cp")), ((2, 1, 2), ("dp_replicate", "dp_shard", "sp"))]
    found = []
    for given in [
        {"mpu": Mpu()},
        *({"mesh": init_device_mesh("cpu", *one[:1], mesh_dim_names=one[1])} for one in meshes),
    ]:
        engine = started(case, 2, **given)
        assert (engine.data_size, engine.data_rank) == (2, dist.get_rank() // 2)
        train(engine, case)
        found.append(engine.state_dict())
        engine.destroy(whole=False)
    return found


@pytest.mark.slow
def test_a_mesh_and_an_mpu_name_the_axis(ranks: Ranks) -> None:
    case = SequenceCase(steps=3)
    for values in ranks.run(4, by_mesh_and_mpu, case)[0]:
        assert_same(values, plainly(case))


# ---------------------------------------------------------------------------------- families, layouts, checkpoints

FAMILIES = [
    SequenceCase(family="Qwen3", model={"head_dim": 4}, data="padded", steps=3),
    SequenceCase(family="Mistral", model={"sliding_window": 3}, steps=3),
    SequenceCase(family="Llama", rows=2, steps=3, model={"use_cache": True}),
    SequenceCase(family="Llama", data="packed", rows=2, steps=3),
]


@pytest.mark.slow
def test_families_of_transformers_follow_one_process(ranks: Ranks) -> None:
    for case, values in zip(FAMILIES, ranks.run(2, on_axis, FAMILIES, 3)[1], strict=True):
        difference, name = distance(values, plainly(case))
        assert difference < 1e-10, f"{case}: {name} differs by {difference}"


def checkpointed(case: SequenceCase, folder: str) -> dict[str, Tensor]:
    """Train a step on sp2 x dp2, one on sp4, one without the axis."""
    sizes, ends = (2, 4, 1), (0, 1, 2, 3)
    found: dict[str, Tensor] = {}
    for number, size in enumerate(sizes):
        config = {"sequence_parallel_size": size}
        engine = started(SequenceCase(**{**vars(case), "size": size, "config": config}), 3 - number, mesh=None)
        if number:
            engine.load_checkpoint(folder, strict=True)
        if size > 1:
            train(engine, case, ends[number], ends[number + 1])
        else:
            for (batch,) in micro_batches(case)[ends[number] :]:
                rows = {key: value.chunk(4)[dist.get_rank()] for key, value in batch.items()}
                logits = engine(rows["input_ids"], torch.arange(TOKENS)[None])
                engine.backward(F.cross_entropy(logits[:, :-1].flatten(0, 1), rows["labels"][:, 1:].flatten()))
                engine.step()
        engine.save_checkpoint(folder)
        found = engine.state_dict()
        engine.destroy(whole=False)
    return found


@pytest.mark.slow
def test_a_checkpoint_loads_at_any_size_of_the_axis(ranks: Ranks, tmp_path: Path) -> None:
    case = SequenceCase(steps=3)
    assert_same(ranks.run(4, checkpointed, case, str(tmp_path))[0], plainly(case))


# -------------------------------------------------------------------------------------------------- bits and bytes


def rounded(stages: list[int]) -> list[dict[str, Tensor]]:
    case = SequenceCase(config={"bf16": {"enabled": True}}, dtype=torch.float32, steps=4, data="packed")
    return [on_axis([case], stage)[0] for stage in stages]


def test_bf16_has_the_same_bits_at_stages_1_to_3(ranks: Ranks) -> None:
    first, *others = ranks.run(2, rounded, [1, 2, 3])[0]
    for other in others:
        assert all((first[name] == other[name]).all() for name in first)


def bytes_of_a_step() -> tuple[int, int, dict[str, int]]:
    """The bytes received in a forward by an independent count, and in a step by the engine's statistics."""
    case = SequenceCase(model={"kv_heads": 1})
    engine = started(case, 0)
    train(engine, case, 0, 2)  # what is compared in the first forwards is not counted
    (batch,) = micro_batches(case)[2]
    part = sequence_parallel.shard_batch(batch, engine)
    with WireCounter(dist.get_rank(), 2) as wire, torch.no_grad():
        engine(part["input_ids"], part["position_ids"])
    in_forward = wire.received["recv_"]
    train(engine, case, 2, 4)
    calls = engine.traffic().calls
    engine.destroy(whole=False)
    return (
        in_forward,
        next(number for kind, number in calls.items() if kind.value == "sequence"),
        engine.traffic().by_axis(),
    )


def test_bytes_on_the_sequence_axis_equal_the_formula(ranks: Ranks) -> None:
    layers, num_ranks, kv_heads = 2, 2, 2  # the one head of keys and values is repeated, once for each rank
    tokens = ROWS * TOKENS // num_ranks
    forward = layers * (num_ranks - 1) * tokens * (2 * HEADS + 2 * kv_heads) * (WIDTH // HEADS) * 8 // num_ranks
    for in_forward, calls, by_axis in ranks.run(2, bytes_of_a_step):
        assert in_forward == forward
        assert by_axis["sequence"] == 2 * forward
        assert calls == 4 * layers


# -------------------------------------------------------------------------------------------------- random numbers


class Draws(nn.Module):
    """What a model draws: a dropout of its own, and that of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.weight = nn.Dropout(0.5), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = x[:, None, :, None].expand(-1, 4, -1, 4)
        mixed = sequence_parallel.scaled_dot_product_attention(heads, heads, torch.ones_like(heads), dropout_p=0.5)
        return self.dropout(torch.ones(64)), mixed * self.weight


def draw() -> list[Any]:
    torch.manual_seed(7)
    engine = shardwell.initialize(model=Draws(), config=zero(1, sequence_parallel_size=2)).engine
    drawn = [engine(torch.full((2, 4), float(dist.get_rank()))) for _ in range(2)]
    after = torch.rand(3)
    engine.destroy()
    found = []
    for recompute in (False, True):
        case = SequenceCase(model={"drop": 0.3, "recompute": recompute}, steps=3)
        engine = started(case, 2)
        torch.manual_seed(11)
        train(engine, case)
        found.append(engine.state_dict())
        engine.destroy(whole=False)
    return [[one.detach() for pair in drawn for one in pair], after, *found]


def test_ranks_drop_other_values_in_a_forward_and_draw_alike_outside(ranks: Ranks) -> None:
    (first, after, plain, recomputed), (second, other_after, *_) = ranks.run(2, draw)
    mine, attended, later, _ = first
    others, others_attended, *_ = second
    assert (mine != others).any()
    assert (attended != others_attended).any()
    assert (mine != later).any()
    assert (attended[:, :2] != attended[:, 2:]).any()  # heads of the two ranks
    assert (after == other_after).all()
    assert_same(plain, {name: torch.as_tensor(value) for name, value in recomputed.items()}, 1e-12)


# ------------------------------------------------------------------------------------------------- means over a step


def over_a_step(case: SequenceCase) -> tuple[dict[str, Tensor], float]:
    engine = started(case, 2)
    loss = torch.zeros(())
    for step in micro_batches(case):
        own = [{key: value.chunk(engine.data_size)[engine.data_rank] for key, value in one.items()} for one in step]
        total = sequence_parallel.count_tokens(own, engine)
        loss = torch.zeros((), dtype=case.dtype)
        for batch in own:
            part = sequence_parallel.shard_batch(batch, engine, num_items_in_batch=total)
            logits = engine(part["input_ids"], part["position_ids"])
            share = sequence_parallel.cross_entropy(logits, part["shift_labels"], part["num_items_in_batch"])
            loss += sequence_parallel.average_loss(share, engine) / case.accumulation
            engine.backward(share)
            engine.step()
    return engine.state_dict(), float(loss)


def test_a_mean_over_the_tokens_of_a_step_counts_each_once(ranks: Ranks) -> None:
    case = SequenceCase(data="sparse", accumulation=2, steps=3)
    torch.manual_seed(0)
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in micro_batches(case):
        logits = torch.cat([plain_logits(model, batch, case)[:, :-1].flatten(0, 1) for batch in step])
        loss = F.cross_entropy(logits, torch.cat([batch["labels"][:, 1:].flatten() for batch in step]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    found, shown = ranks.run(4, over_a_step, case)[3]
    assert_same(found, model.state_dict())
    assert abs(shown - loss.item()) < 1e-10


def losses_of_transformers() -> list[float]:
    """The loss that a model of Transformers computes itself, from a padded batch."""
    engine = started(SequenceCase(family="Llama", dtype=torch.float32), 1)
    (batch,) = micro_batches(SequenceCase(data="sparse", steps=1))[0]
    batch = {key: value[:, :11] for key, value in batch.items()}
    part = sequence_parallel.shard_batch(batch, engine, pad_token_id=0)
    loss = engine(**part).loss
    engine.backward(loss)
    whole = float(sequence_parallel.average_loss(loss, engine))
    engine.eval()
    prompt = torch.tensor([[3, 4, 5]])
    tokens = engine.module.generate(prompt, max_new_tokens=3, do_sample=False, use_cache=True)
    engine.destroy()
    again = engine.module(**batch).loss  # the model is as it was
    assert engine.module.config._attn_implementation == "sdpa"
    expected = engine.module.generate(prompt, max_new_tokens=3, do_sample=False, use_cache=True)
    assert (tokens == expected).all()
    return [whole, float(again)]


def test_transformers_own_loss_is_the_mean_over_all_tokens(ranks: Ranks) -> None:
    for whole, again in ranks.run(2, losses_of_transformers):
        assert abs(whole - again) < 1e-6


# -------------------------------------------------------------------------------------------------------- refusals


class Alone(nn.Module):
    """Attention of torch's own, which sees the tokens of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (F.scaled_dot_product_attention(x, x, x) * self.weight).sum()


def words_of(what: str) -> str:
    try:
        if what == "pipeline":
            shardwell.initialize(model=Decoder(), config=zero(1, sequence_parallel_size=2, pipeline={"stages": 2}))
        if what == "hpz":
            block = {"stage": 3, "zero_hpz_partition_size": 2}
            shardwell.initialize(model=Decoder(), config={"sequence_parallel_size": 2, "zero_optimization": block})
        if what == "ranks":
            shardwell.initialize(model=Decoder(), config=zero(1, sequence_parallel_size=3))
        if what == "alone":
            engine = shardwell.initialize(model=Alone(), config=zero(1, sequence_parallel_size=4)).engine
            engine(torch.randn(1, 4, 2, 4))
        if what in ("same", "heads", "odd", "shapes", "mask"):
            case = SequenceCase(dtype=torch.float32, size=4 if what != "heads" else 2)
            engine = started(case, 1)
            (batch,) = micro_batches(SequenceCase(steps=1))[0]
            part = sequence_parallel.shard_batch(batch, engine) if what != "odd" else {}
            if what == "same":
                engine(batch["input_ids"], batch["input_ids"] * 0)
            if what == "heads":
                states = torch.randn(1, 3, 2, 4)
                sequence_parallel.scaled_dot_product_attention(states, states, states)
            if what == "odd":
                sequence_parallel.shard_batch({"input_ids": batch["input_ids"][:, :7]}, engine)
            if what == "shapes":
                cut = slice(None, None if dist.get_rank() else 2)
                engine(part["input_ids"][:, cut], part["position_ids"][:, cut])
            if what == "mask":
                engine(part["input_ids"], part["position_ids"], torch.ones(3, 3, dtype=torch.bool))
    except (ShardwellError, ConfigError) as error:
        return str(error)
    return "nothing was refused"


REFUSALS = {
    "pipeline": "sequence_parallel_size: 2 does not work with 2 pipeline stages",
    "hpz": "zero_hpz_partition_size: 2 does not work with the axes 2 (shard) x 2 (sequence)",
    "ranks": "4 rank(s) cannot be divided by",
    "alone": "the forward of Alone called no attention that is exchanged",
    "same": "all 4 ranks of the sequence axis got the same inputs",
    "heads": "2 ranks cannot share 3 heads of queries and 3 of keys",
    "odd": "4 ranks cannot share sequences of 7 tokens",
    "shapes": "the ranks of the sequence axis take parts of the same length",
    "mask": "attention got a mask of shape (3, 3), and sequences have 12 tokens on 4 ranks",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_work_is_one_sentence(ranks: Ranks, what: str) -> None:
    for words in ranks.run(4, words_of, what):
        assert REFUSALS[what] in words


def falls_over() -> str:
    """Rank 1 raises between two exchanges of the second step."""
    case = SequenceCase(steps=2, dtype=torch.float32)
    engine = started(case, 3)
    train(engine, case, 0, 1)
    if dist.get_rank() == 1:

        def fail(*_: Any) -> None:
            raise ValueError("out of paper")

        engine.module.blocks[1].register_forward_pre_hook(fail)
    try:
        engine.backward(loss_of(engine, micro_batches(case)[1][0], case))
        engine.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_rank_that_fails_between_exchanges_ends_the_others(ranks: Ranks) -> None:
    found = ranks.run(4, falls_over)
    assert found[1] == "ValueError: out of paper"
    for words in (found[0], found[2], found[3]):
        assert "rank 1" in words
        assert "out of paper" in words
