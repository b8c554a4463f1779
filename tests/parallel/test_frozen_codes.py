"""Frozen weights that rest in codes: bytes are those of the codes, and what is computed is what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.config import load
from shardwell.kernels.quantize import Codec
from shardwell.kernels.quantize_stably import quantize_stably
from shardwell.memory import StateKind, Tier
from shardwell.parallel import TrafficKind
from shardwell.sharding import GroupPrecision
from shardwell.sharding.layout import even_part
from shardwell.sharding.model_states import GroupKey as Sort
from shardwell.sharding.model_states import StateFormula, TierPlacement
from tests.support.codec_cases import KINDS
from tests.support.frozen_codes import ON, all_codes, below, build, groups, run, same_tensors, start, step
from tests.support.internals import groups_of
from tests.support.live_bytes import live_bytes
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks

# ---------------------------------------------------------------------------------------------------------- the codes


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_decoded_gives_the_same_codes_and_is_off_by_no_more_than_the_codec_says(kind: str) -> None:
    """In blocks of all scales; a codec alone would give some blocks of int8 another one."""
    codec, num_blocks = Codec(kind), 1 << 12
    greatest = 1 + torch.arange(num_blocks) / num_blocks
    noise = torch.rand(num_blocks, 256, generator=torch.Generator().manual_seed(0)) * 2 - 1
    noise[:, 7] = 1
    values = torch.cat([(noise * greatest[:, None]).flatten(), noise[0, :77] * 2.0**-120, noise[1, :3]])
    once, again = (torch.empty(codec.num_bytes(values.numel()), dtype=torch.uint8) for _ in range(2))
    decoded = torch.empty_like(values)
    quantize_stably(codec, values, once)
    codec.decode(once, decoded)
    assert ((decoded - values).abs() <= codec.error_bound(values)).all()
    for encodes in (codec.encode, lambda source, out: quantize_stably(codec, source, out)):
        encodes(decoded, again)
        assert torch.equal(once, again)
    codec.encode(values, once)
    if kind == "int8":
        assert not torch.equal(once, again)  # so `quantize_stably` is not in vain


# ---------------------------------------------------------------------------------------------------- bytes and bits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "kind", "bf16", "quantized"),
    [
        (1, "int8", False, False),
        (1, "int4", True, True),
        (2, "int8", True, False),
        (2, "fp8", False, False),
        (2, "int4", False, True),
        (4, "int8", False, False),
        (4, "int4", True, True),
    ],
)
def test_bytes_follow_the_formula_and_numbers_a_plain_model_of_the_codes(
    ranks: Ranks, num_ranks: int, kind: str, bf16: bool, quantized: bool
) -> None:
    size, width = Codec(kind).num_bytes, 2 if bf16 else 4
    for answer in ranks.run(num_ranks, run, kind, bf16, quantized):
        frozen, trained = answer["frozen"], answer["trained"]
        assert len(frozen) == len(trained) == 3
        assert answer["same"]
        assert answer["rest"] == sum(size(n) for n in frozen) + 4 * sum(trained)  # and nothing else
        travels = [Codec("int8").num_bytes(n) if quantized else width * n for n in trained]
        assert answer["gathered"] == 2 * (num_ranks - 1) * (sum(size(n) for n in frozen) + sum(travels))
        assert answer["counted"] == 0
        if not bf16 and not quantized:
            assert answer["off"] < 1e-6


def alive() -> tuple[int, int]:
    """By our own counting, with a frozen matrix that all else is small against."""
    before = live_bytes()
    model = nn.Sequential(nn.Linear(512, 512, bias=False).requires_grad_(False), nn.Linear(512, 4, bias=False))
    engine = start(model, bf16={"enabled": True}, block={"stage3_param_persistence_threshold": 4096})
    engine.backward(engine(torch.ones(2, 512)).square().mean())
    engine.step()
    return live_bytes() - before, Codec("int8").num_bytes(512 * 512 // dist.get_world_size())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nothing_but_the_codes_is_left_in_memory(ranks: Ranks, num_ranks: int) -> None:
    small = 4 * 512 * 12  # 12 bytes a parameter that trains, at most
    for live, codes in ranks.run(num_ranks, alive):
        assert codes < live < codes + small + 4096


# --------------------------------------------------------------------------------------------------------- tiers, hpZ


@pytest.mark.parametrize(("num_ranks", "tier"), [(1, "cpu"), (2, "nvme"), (1, "nvme")])
def test_codes_rest_on_the_host_and_on_disk(ranks: Ranks, tmp_path: Path, num_ranks: int, tier: str) -> None:
    for answer in ranks.run(num_ranks, below, tier, str(tmp_path), "int8"):
        assert answer["same"]
        assert answer["tier"] >= {Tier.HOST if tier == "cpu" else Tier.DISK}
        assert answer["rest"] - 2 * answer["trained"] == sum(answer["codes"])
        for name, value in answer["expected"].items():
            assert (answer["masters"][name] == value).all(), name


def second_copies() -> dict[str, Any]:
    plain, engine = start(bf16={"enabled": True}), start(bf16={"enabled": True}, block={"zero_hpz_partition_size": 2})
    same, gathered = [], []
    for number in range(3):
        same.append(torch.equal(step(plain, number), step(engine, number)))
        gathered.append(engine.traffic().received[TrafficKind.ALL_GATHER, "between"])
    codes = [len(codes) for codes in all_codes(engine)]
    trained = [group.layout.shard_numel for group in groups(engine, frozen=False)]
    kept = engine.memory().total(StateKind.PARAMETERS) - sum(codes) - 4 * sum(trained)
    step(engine, 3)
    inside = engine.traffic().received[TrafficKind.ALL_GATHER, "inside"]
    return {"same": all(same), "codes": codes, "trained": trained, "kept": kept, "between": gathered, "inside": inside}


def test_a_second_copy_is_one_of_codes(ranks: Ranks) -> None:
    for answer in ranks.run(4, second_copies):
        trained = 2 * 2 * sum(answer["trained"])
        codes = [4 * size for size in answer["codes"]]
        slices = [even_part(size, 2) // 2 for size in codes]
        assert answer["same"]
        assert answer["between"] == [trained + sum(codes) // 2, trained, trained]  # codes leave the node once for all
        assert answer["kept"] == sum(size - part for size, part in zip(codes, slices, strict=True))
        assert answer["inside"] == 2 * sum(slices) + 2 * (1 + 2) * sum(answer["trained"])


# ------------------------------------------------------------------------------------------------- what is not encoded


class Odd(nn.Module):
    """Numbers that no codec takes, none at all, and few."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.empty = nn.Linear(16, 16), nn.Parameter(torch.empty(0, 4), requires_grad=False)
        self.table = nn.Parameter(torch.arange(-64, 64, dtype=torch.int8), requires_grad=False)
        self.small = nn.Parameter(torch.full((3,), 1 / 3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.table.float().mean() + self.empty.sum() + self.small.sum()


def odd(threshold: int) -> dict[str, Any]:
    model = nn.Sequential(*[Odd() for _ in range(2)])
    engine = start(model, block={"stage3_param_persistence_threshold": threshold})
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 16)).square().mean())
        engine.step()
    rows = {slot.name: g.spec.storage_codec for g in groups_of(engine) for slot in g.layout.slots}
    whole = whole_parameters(model)
    return {
        "table": rows["0.table"] is None and whole["0.table"].tolist() == list(range(-64, 64)),
        "layer": rows["1.layer.weight"] is None,
        "small": (rows["0.small"] is None) == bool(threshold),
        "empty": whole["1.empty"].shape == (0, 4),
    }


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_small_whole_empty_and_integer_parameters_are_as_they_are(ranks: Ranks, num_ranks: int) -> None:
    for answer in (*ranks.run(num_ranks, odd, 0), *ranks.run(num_ranks, odd, 8)):
        assert all(answer.values()), answer


def born() -> bool:
    config = zero(3, zero_optimization=ON, shardwell={"keep_frozen": 0})
    with shardwell.zero.Init(config=config):
        model = build()
    engine, plain = start(model), start()
    return same_tensors(all_codes(engine), all_codes(plain)) and torch.equal(step(engine, 0), step(plain, 0))


def test_shards_that_are_born_are_encoded_like_others(ranks: Ranks) -> None:
    assert all(ranks.run(2, born))


def simulated() -> dict[str, Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=1024)
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2048, 2048).requires_grad_(False), nn.Linear(2048, 8)])
    engine = start(model, bf16={"enabled": True})
    engine.backward(engine(torch.empty(2, 2048, device="meta")).sum())
    engine.step()
    (group,) = groups(engine, frozen=True)
    return {"shard": group.layout.shard_numel, "rest": engine.memory().by_unit()[group.unit]}


def test_one_of_1024_ranks(ranks: Ranks) -> None:
    answer = ranks.run(1, simulated)[0]
    assert answer["rest"] == Codec("int8").num_bytes(answer["shard"])


# ------------------------------------------------------------------------------------------------- plans, configuration


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_plans_know_the_bytes_of_codes(num_ranks: int) -> None:
    codec, numel, bf16 = Codec("int4"), 1 << 20, torch.bfloat16
    frozen, trained = (Sort(GroupPrecision.of(bf16, bf16, trains), trains, False) for trains in (False, True))
    with_codes, without = (StateFormula(3, num_ranks, storage_codec=rest) for rest in (codec, None))
    for tier in Tier:
        place = TierPlacement(parameters=tier)
        assert with_codes.stored_bytes(frozen, numel, place) == {tier: codec.num_bytes(numel // num_ranks)}
        assert without.stored_bytes(frozen, numel, place) == {tier: 2 * numel // num_ranks}
        assert with_codes.stored_bytes(trained, numel, place) == without.stored_bytes(trained, numel, place)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": 2, **ON}}, "nontrainable_weights: true contradicts zero_optimization.stage 2"),
        ({"shardwell": {"codecs": {"frozen": "int2"}}}, 'shardwell.codecs.frozen: expected "int8", "int4"'),
    ],
)
def test_what_cannot_be_had_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(shardwell.ConfigError, match=message):
        load({"train_batch_size": 1, **config})
