"""Before a boundary: who looks at gradients changes nothing, who changes them is heard; and what an error says."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwell
from shardwell.errors import NonFiniteError
from shardwell.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_grad
from tests.support.internals import units_of
from tests.support.models import Gpt, whole_parameters, zero
from tests.support.offload_cases import AIO, HOST, OPTIMIZERS, check_equal, on_disk, quickly
from tests.support.ranks import Ranks
from tests.support.updates_in_flight import Forks, backward, copied


def looked_at(stage: int, block: dict[str, Any], commit: str, looks: bool) -> tuple[dict[str, Tensor], list[Any]]:
    """Parameters and norms of steps, of which somebody looks at all gradients before the boundary; and what he saw."""
    quickly()
    torch.manual_seed(0)
    model = Forks()
    own = {"commit": commit, "gradients": "disk" if "nvme" in str(block) else "auto"}
    config = zero(stage, zero_optimization=block, gradient_accumulation_steps=3, shardwell=own, aio=AIO)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    found: list[Any] = []
    for step in range(2):
        for micro in range(3):
            rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(6 * step + 2 * micro + dist.get_rank()))
            with engine.no_sync() if micro == step else contextlib.nullcontext():
                engine.backward(engine(rows, False, 1 if micro == 2 else -1))  # a block has no part in the last one
            if looks and micro < 2:
                found.append({name: safe_get_full_grad(p) for name, p in model.named_parameters()})
            engine.step()
        found.append(engine.get_global_grad_norm())
    return whole_parameters(model), found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_whoever_looks_at_gradients_before_the_boundary_changes_nothing(
    ranks: Ranks, tmp_path: Path, stage: int
) -> None:
    """Stages 0 and 3, and 1 and 2, share the tiers."""
    _, expected = ranks.run(2, looked_at, 0, {}, "auto", True)[0]
    tiers = [({}, "auto"), (HOST, "at_once"), (HOST, "after_norm"), (HOST, "shadow"), (on_disk(tmp_path), "after_norm")]
    for block, commit in {0: tiers[::2], 1: tiers[1::2], 2: tiers[::2], 3: [tiers[1], *tiers[3:]]}[stage]:
        values, norms = ranks.run(2, looked_at, stage, block, commit, False)[0]
        for found, saw in ranks.run(2, looked_at, stage, block, commit, True):
            check_equal(found, values)
            assert [norm for norm in saw if not isinstance(norm, dict)] == norms
            for one, other in zip(saw, expected, strict=True):
                if isinstance(one, dict):
                    torch.testing.assert_close(copied(one), copied(other), rtol=1e-4, atol=1e-6)


def changed_early(stage: int, block: dict[str, Any], commit: str) -> tuple[dict[str, Tensor], float]:
    """Gradients that are changed before the boundary; one block gets more afterwards, the other does not."""
    torch.manual_seed(0)
    model = Forks()
    config = zero(stage, zero_optimization=block, gradient_accumulation_steps=2, shardwell={"commit": commit})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    engine.backward(engine(rows, False))
    for part in model.blocks:
        safe_set_full_grad(part.always.weight, torch.full((32, 32), 0.25))
    engine.step()
    engine.backward(engine(rows, False, 1))
    engine.step()
    return whole_parameters(model), float(engine.get_global_grad_norm() or 0.0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_that_are_changed_before_the_boundary_count_and_are_added_to(ranks: Ranks, stage: int) -> None:
    torch.manual_seed(0)
    before = Forks().blocks[1].always.weight.detach()
    cases = [({}, "auto"), *((HOST, commit) for commit in ("at_once", "after_norm", "shadow")[stage % 2 :: 2])]
    (expected, norm), *others = [ranks.run(2, changed_early, stage, *case)[0] for case in cases]
    moved = torch.as_tensor(expected["blocks.1.always.weight"]) - before
    torch.testing.assert_close(moved, torch.full((32, 32), -0.025), rtol=1e-4, atol=1e-6)
    for found, its_norm in others:
        assert its_norm == pytest.approx(norm, rel=1e-4)
        torch.testing.assert_close(copied(found), copied(expected), rtol=1e-4, atol=1e-6)


def half_finite(block: dict[str, Any], name: str) -> tuple[str, dict[str, tuple[int, int]]]:
    """What is said of gradients that are not finite on one rank; and how many numbers of each unit changed, of all."""
    torch.manual_seed(0)
    model = Gpt()
    config = zero(2, zero_optimization=block, shardwell={"commit": "at_once"})
    optimizer = OPTIMIZERS[name](model.parameters())
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    before = {key: safe_get_full_fp32_param(p) for key, p in model.named_parameters()}
    model.blocks[0].norm1.weight.register_hook(lambda gradient: gradient * float("inf"))
    for parameter in model.blocks[1].parameters():
        parameter.register_hook(lambda gradient: gradient * float("nan"))
    backward(engine)
    with pytest.raises(NonFiniteError) as caught:
        engine.step()
    counts: dict[str, tuple[int, int]] = {}
    for unit in units_of(engine):
        names = [slot.name for group in unit.trainable for slot in group.layout.slots]
        after = {key: safe_get_full_fp32_param(p) for key, p in model.named_parameters() if key in names}
        changed = sum(int((value != before[key]).sum()) for key, value in after.items())
        counts[unit.name or "(root)"] = changed, sum(value.numel() for value in after.values())
    return str(caught.value), counts


@pytest.mark.parametrize("name", ["SGD", "NAdam"])
def test_an_error_says_which_units_were_updated_at_once_in_part_or_not(ranks: Ranks, name: str) -> None:
    for said, counts in ranks.run(2, half_finite, HOST, name):
        assert 0 < counts["blocks.0"][0] < counts["blocks.0"][1]
        assert counts["blocks.1"][0] == 0
        assert all(changed for unit, (changed, _) in counts.items() if unit not in ("blocks.0", "blocks.1"))
        whole = ", ".join(f"'{unit}'" for unit in counts if unit not in ("blocks.0", "blocks.1"))
        assert f"(updated: {whole}; updated in part: 'blocks.0'; as before: 'blocks.1')" in said
