"""One function says in which form parameters and masters are stored, and one how many bytes that takes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.kernels.quantize import Codec
from shardwell.memory import StateKind, Tier
from shardwell.sharding import storage
from shardwell.sharding.spec import CommitPolicy, GroupPrecision, SpecOverrides, spec_for
from shardwell.sharding.storage_form import StorageForm, form_of, state_bytes
from tests.support.internals import units_of
from tests.support.ranks import Ranks

DEVICE, HOST, DISK = Tier
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MIXED = {name: {name: {"enabled": True}} for name in ("bf16", "fp16")}
BLOCKS: dict[str, dict[str, Any]] = {"fp32": {}, **MIXED}
PLACES = {  # of parameters and optimizer state; which stages take them
    (DEVICE, DEVICE): (0, 1, 2, 3),
    (DEVICE, HOST): (1, 2, 3),
    (DEVICE, DISK): (2, 3),
    (HOST, HOST): (3,),
    (HOST, DISK): (3,),
    (DISK, DISK): (3,),
}
CASES = [
    (stage, precision, *places)
    for (places, stages), precision in itertools.product(PLACES.items(), BLOCKS)
    for stage in stages
]


@pytest.mark.parametrize(
    ("stage", "precision", "parameters", "optimizer", "form"),
    [
        (0, "fp32", DEVICE, DEVICE, StorageForm.IN_PLACE),
        (2, "bf16", DEVICE, DEVICE, StorageForm.SPLIT_BF16),
        (2, "fp16", DEVICE, DEVICE, StorageForm.SEPARATE),  # fp16 is no part of an fp32 number
        (2, "bf16", DEVICE, HOST, StorageForm.SEPARATE),
        (3, "fp32", DEVICE, DEVICE, StorageForm.SHARD),
        (3, "bf16", DEVICE, DEVICE, StorageForm.SHARD),  # of masters: the all-gather rounds
        (3, "bf16", DEVICE, HOST, StorageForm.SEPARATE),
        (3, "bf16", HOST, HOST, StorageForm.SPLIT_BF16),
        (3, "fp16", HOST, HOST, StorageForm.SEPARATE),
        (3, "bf16", DISK, DISK, StorageForm.SPLIT_BF16),
        (3, "bf16", HOST, DISK, StorageForm.SEPARATE),
    ],
)
def test_the_form_follows_from_stage_tiers_and_precision(
    stage: int, precision: str, parameters: Tier, optimizer: Tier, form: StorageForm
) -> None:
    spec = spec_for(stage, overrides=SpecOverrides(parameter_tier=parameters, optimizer_tier=optimizer))
    mixed = None if precision == "fp32" else DTYPES[precision]
    assert form_of(spec, GroupPrecision.of(torch.float32, mixed, True), True) is form


def test_speculation_needs_masters_of_their_own() -> None:
    overrides = SpecOverrides(parameter_tier=HOST, optimizer_tier=HOST, commit=CommitPolicy.SPECULATIVE)
    precision = GroupPrecision.of(torch.float32, torch.bfloat16, True)
    assert form_of(spec_for(3, overrides=overrides), precision, True) is StorageForm.SEPARATE


def test_only_frozen_parameters_are_stored_quantised() -> None:
    codec = Codec("int8")
    overrides = SpecOverrides(storage_codec=codec)
    frozen, trained = (GroupPrecision.of(torch.float32, torch.bfloat16, trains) for trains in (False, True))
    spec = spec_for(3, overrides=overrides.of(torch.bfloat16, False))
    assert form_of(spec, frozen, False) is StorageForm.QUANTIZED
    assert state_bytes(StorageForm.QUANTIZED, spec, frozen, 1024, 2) == {DEVICE: codec.num_bytes(512)}
    assert form_of(spec_for(3, overrides=overrides.of(torch.bfloat16, True)), trained, True) is StorageForm.SHARD


def test_sharding_does_not_know_what_stores_state_below_the_device() -> None:
    for path in Path(storage.__file__).parent.glob("*.py"):
        assert "shardwell.offload" not in path.read_text(), path


def engines(cases: list[tuple[int, str, Tier, Tier]], folder: str) -> Iterator[shardwell.Engine]:
    for stage, precision, parameters, optimizer in cases:
        zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
        for key, tier in (("offload_param", parameters), ("offload_optimizer", optimizer)):
            if tier is not DEVICE:
                zero[key] = {"device": {HOST: "cpu", DISK: "nvme"}[tier], "nvme_path": folder, "max_in_cpu": 0}
                if key == "offload_optimizer":
                    del zero[key]["max_in_cpu"]
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.0}},
            "shardwell": {"commit": "after_norm"},
            **BLOCKS[precision],
        }
        yield shardwell.initialize(model=model, config=config).engine


def tried(cases: list[tuple[int, str, Tier, Tier]], folder: str) -> list[tuple[dict[Tier, int], bool]]:
    """The bytes that each engine holds; and whether master weights that are changed while they are open are kept."""
    found = []
    for engine in engines(cases, folder):
        found.append((held(engine), keeps_changes(engine)))
        engine.destroy(whole=False)
    return found


def held(engine: shardwell.Engine) -> dict[Tier, int]:
    now: Counter[Tier] = Counter()
    for (state, _, tier), size in engine.memory().now.items():
        if state in (StateKind.PARAMETERS, StateKind.OPTIMIZER):
            now[tier] += size
    stored: Counter[Tier] = Counter()
    for unit in units_of(engine):
        for group in unit.groups:
            stored.update(group.storage.nbytes())
    assert +stored == +now
    return dict(now)


def keeps_changes(engine: shardwell.Engine) -> bool:
    """Whether what is written, also in a nested context, is what is read later."""
    (group,) = units_of(engine)[1].groups
    with group.storage.open(changes=True) as master:
        expected = torch.arange(len(master), device=master.device) * 1.001
        master.copy_(expected)
        with group.storage.open():
            pass
    with group.storage.open() as master:
        same = torch.equal(master, expected)
    rounded = expected.to(group.precision.compute)
    with group.swapped_in():
        stored = group.storage.parameters.to(torch.float32, copy=True)  # the memory is swapped out again
    return same and torch.allclose(stored, rounded.float(), rtol=2**-7)


@pytest.fixture(scope="module")
def answers(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[dict[Tier, int], bool]]]:
    return ranks.run(2, tried, CASES, str(tmp_path_factory.mktemp("drive")))


@pytest.mark.slow
def test_what_is_written_to_open_masters_stays(answers: list[list[tuple[dict[Tier, int], bool]]]) -> None:
    for found in answers:
        assert all(kept for _, kept in found), [case for case, (_, k) in zip(CASES, found, strict=True) if not k]


@pytest.mark.slow
def test_an_engine_holds_the_bytes_of_the_formula(answers: list[list[tuple[dict[Tier, int], bool]]]) -> None:
    for found in answers:
        for (stage, precision, parameters, optimizer), (now, _) in zip(CASES, found, strict=True):
            spec = spec_for(stage, overrides=SpecOverrides(parameter_tier=parameters, optimizer_tier=optimizer))
            mixed = None if precision == "fp32" else DTYPES[precision]
            kind = GroupPrecision.of(torch.float32, mixed, True)
            expected = state_bytes(form_of(spec, kind, True), spec, kind, 2 * 64 * 64, 2)
            assert +Counter(now) == +expected, (stage, precision, parameters, optimizer)
