"""Frozen weights in codes that are looked at, changed, thawed, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell.parallel import TrafficKind
from shardwell.utils import safe_get_full_fp32_param
from shardwell.zero import GatheredParameters
from tests.support.frozen_codes import (
    HALF_A_STEP,
    all_codes,
    groups,
    looked_at,
    same_tensors,
    saved,
    start,
    step,
)
from tests.support.models import whole_parameters
from tests.support.ranks import Ranks

# ------------------------------------------------------------------------------------------------------- whoever looks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_whoever_looks_sees_decoded_numbers_and_whoever_writes_has_them_encoded(ranks: Ranks, num_ranks: int) -> None:
    for answer in ranks.run(num_ranks, looked_at):
        assert all(answer.values()), answer


def kept_whole() -> dict[str, Any]:
    released, engine = start(bf16={"enabled": True}), start(bf16={"enabled": True}, shardwell={"keep_frozen": 10**9})
    same = [torch.equal(step(released, number), step(engine, number)) for number in range(3)]
    kept = [group.stays_unsharded for group in groups(engine, frozen=True)]
    gathered = engine.traffic().total(TrafficKind.ALL_GATHER)
    codes = all_codes(engine)
    with GatheredParameters(engine.module.parameters(), modifier_rank=0):
        pass
    before = engine.module[0].base.weight.detach().clone()
    with GatheredParameters(engine.module[0].parameters(), modifier_rank=0), torch.no_grad():
        engine.module[0].base.weight.mul_(0.3)
        engine.module[0].out.weight.mul_(0.3)
    error = (engine.module[0].base.weight.float() - 0.3 * before.float()).abs().max()
    return {
        "same": all(same),
        "kept": kept,
        "gathered": gathered,
        "trained": sum(group.layout.shard_numel for group in groups(engine, frozen=False)),
        "codes": same_tensors(all_codes(engine)[1:], codes[1:]) and not same_tensors(all_codes(engine), codes),
        "error": float(error / before.abs().max()),
    }


def test_what_stays_whole_is_decoded_and_its_codes_stay(ranks: Ranks) -> None:
    for answer in ranks.run(2, kept_whole):
        assert answer["same"]
        assert answer["kept"] == [True] * 3
        assert answer["gathered"] == 2 * 2 * answer["trained"]  # adapters only
        assert answer["codes"]
        assert 0 < answer["error"] <= HALF_A_STEP + 2**-9  # and what bf16 rounds


def thawed(bf16: bool) -> dict[str, Any]:
    engine = start(bf16={"enabled": bf16})
    step(engine, 0)
    model = engine.module
    before = whole_parameters(model)
    model[1].base.weight.requires_grad_(True)
    engine.optimizer.add_param_group({"params": [model[1].base.weight], "lr": 0.0})
    engine.fit_to_model()
    master = safe_get_full_fp32_param(model[1].base.weight).clone()
    step(engine, 1)
    after = whole_parameters(model)
    return {
        "dtype": str(master.dtype),
        "master": torch.equal(master, before["1.base.weight"].float()),
        "others": max(
            float((after[n].float() - before[n].float()).abs().max() / before[n].float().abs().max())
            for n in ("1.base.bias", "1.out.weight")
        ),
        "untouched": torch.equal(after["0.base.weight"], before["0.base.weight"]),
    }


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_thawed_parameter_has_a_master_of_the_decoded_numbers(ranks: Ranks, bf16: bool) -> None:
    for answer in ranks.run(2, thawed, bf16):
        assert answer["dtype"] == "torch.float32"
        assert answer["master"]
        assert (
            answer["others"] <= 2 * HALF_A_STEP + 2**-8
        )  # the others of the unit lie in other blocks now, and were encoded again
        assert answer["untouched"]


# --------------------------------------------------------------------------------------------------------- checkpoints


def moved(folder: str, kind: str) -> float:
    """To another number of ranks: other blocks."""
    engine = start(kind=kind)
    engine.load_checkpoint(folder)
    plain = start(block={"zero_quantized_nontrainable_weights": False})
    plain.load_checkpoint(folder)
    exact, found = whole_parameters(plain.module), whole_parameters(engine.module)
    frozen = [name for name in exact if "base" in name or "out" in name]
    most = max(float(exact[name].abs().max()) for name in frozen)
    return max(float((found[name] - exact[name]).abs().max()) / most for name in frozen)


@pytest.mark.parametrize(("kind", "bf16"), [("int8", True), ("int8", False), ("int4", True), ("fp8", True)])
def test_a_checkpoint_gives_the_same_codes_back(ranks: Ranks, tmp_path: Path, kind: str, bf16: bool) -> None:
    for answer in ranks.run(2, saved, str(tmp_path), kind, bf16):
        assert all(answer.values()), answer
    if not bf16:
        assert 0 < ranks.run(1, moved, str(tmp_path), kind)[0] <= HALF_A_STEP
