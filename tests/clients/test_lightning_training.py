"""Lightning's Trainer on a shardwell strategy follows the same Trainer on DDP: losses, gradient norms, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import lightning_runs as runs
from tests.support.ranks import Ranks

STAGES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "stage 2, offload": {"stage": 2, "offload_optimizer": True},
    "stage 3, offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    "infinity": {
        "stage": 3,
        "offload_optimizer": True,
        "offload_parameters": True,
        "offload_optimizer_device": "nvme",
        "offload_params_device": "nvme",
    },
}
PLAIN: dict[str, Any] = {}
# 44 samples on two ranks are 5.5 batches of 4, so the last step of an epoch has fewer micro-batches.
ACCUMULATING = {"accumulate_grad_batches": 4}
BY_NORM = {"gradient_clip_val": 0.2}
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2}

_references: dict[str, Any] = {}


def reference(ranks: Ranks, model: dict[str, Any], options: dict[str, Any]) -> Any:
    """What DDP gives, once for all cases."""
    key = repr((model, options))
    if key not in _references:
        _references[key] = ranks.run(2, runs.fit, None, model, options)
    return _references[key]


def assert_same(mine: Any, theirs: Any, tolerance: float = 2e-6) -> None:
    for own, ddp in zip(mine, theirs, strict=True):
        assert own["steps"] == ddp["steps"]
        for key in ("losses", "norms", "rates", "val", "test"):
            np.testing.assert_allclose(own[key], ddp[key], rtol=tolerance, atol=tolerance, err_msg=key)
        assert own["weights"].keys() == ddp["weights"].keys()
        for name, value in ddp["weights"].items():
            np.testing.assert_allclose(own["weights"][name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def compare(ranks: Ranks, stage: dict[str, Any], options: dict[str, Any], **model: Any) -> None:
    assert_same(ranks.run(2, runs.fit, stage, model, options), reference(ranks, model, options))


@pytest.mark.parametrize("stage", ["stage 1", "stage 3", "stage 2, offload", "infinity"])
def test_training_follows_ddp(ranks: Ranks, stage: str, tmp_path: Path) -> None:
    places = {"nvme_path": str(tmp_path)} if stage == "infinity" else {}
    compare(ranks, {**STAGES[stage], **places}, PLAIN, optimizer="adamw", lr=0.01, schedule="step")


@pytest.mark.parametrize("stage", ["stage 0", "stage 2", "stage 3", "stage 3, offload"])
def test_accumulated_gradients_are_those_of_ddp(ranks: Ranks, stage: str) -> None:
    compare(ranks, STAGES[stage], {**ACCUMULATING, **BY_NORM})


@pytest.mark.parametrize("stage", ["stage 0", "stage 3, offload"])
def test_clipping_by_value_clips_elements(ranks: Ranks, stage: str) -> None:
    compare(ranks, STAGES[stage], BY_VALUE)
    by_norm = reference(ranks, {}, {**BY_VALUE, "gradient_clip_algorithm": "norm"})
    by_value = reference(ranks, {}, BY_VALUE)
    assert by_norm[0]["losses"][-1] != pytest.approx(by_value[0]["losses"][-1], rel=1e-4)


@pytest.mark.parametrize("schedule", ["epoch", "plateau"])
def test_schedules_are_stepped_as_lightning_does(ranks: Ranks, schedule: str) -> None:
    compare(ranks, STAGES["stage 3"], {"max_epochs": 3}, schedule=schedule)
    assert len(set(reference(ranks, {"schedule": schedule}, {"max_epochs": 3})[0]["rates"])) > 1
