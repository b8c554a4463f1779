"""Checkpoints of models that are cut over a tensor axis load at any number of tensor and data ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shardwell.utils import ExponentialMovingAverage
from tests.support.ranks import Ranks
from tests.support.tensor_models import HEAD, PLAN, WORDS, TensorCase, plainly, started, train
from tests.support.training import distance

CASE = TensorCase(plan={**PLAN, **HEAD, **WORDS}, steps=4)


def leg(folders: list[str], stage: int, size: int, first: int, last: int, sequence: bool) -> dict[str, Tensor]:
    """Load, train some steps on a grid with `size` tensor ranks, save; return the whole model."""
    case = TensorCase(plan=CASE.plan, steps=CASE.steps, size=size, tensor={"sequence_parallel": sequence and size > 1})
    engine, _ = started(case, stage)
    if folders[0]:
        engine.load_checkpoint(folders[0], strict=True)
    train(engine, case, first, last)
    engine.save_checkpoint(folders[1])
    found = engine.state_dict()
    engine.destroy(whole=False)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(3, 1), (0, 2)])
def test_a_chain_over_layouts_follows_one_that_stays(ranks: Ranks, tmp_path: Path, stages: tuple[int, int]) -> None:
    folders = ["", *(str(tmp_path / name) for name in "abcd")]
    layouts = [(4, stages[0], 2, 0, 1, True), (2, stages[1], 1, 1, 2, False), (2, stages[0], 2, 2, 3, False)]
    layouts += [(4, stages[1], 4, 3, 4, False)]
    for (num_ranks, stage, size, first, last, sequence), *pair in zip(layouts, folders, folders[1:], strict=False):
        found = ranks.run(num_ranks, leg, pair, stage, size, first, last, sequence)
    for one in found:
        difference, name = distance(one, plainly(CASE))
        assert difference < 1e-10, f"{name} differs by {difference}"


def handed_on(path: str) -> dict[str, Any]:
    """Save a cut model as one file of whole tensors; load such a file into a cut model."""
    engine, model = started(CASE, 3)
    train(engine, CASE, 0, 1)
    whole = engine.state_dict()
    if engine.global_rank == 0:
        save_file(whole, path)
    engine.finish_saving()
    torch.distributed.barrier()
    train(engine, CASE, 1, 2)
    engine.load_model(path)
    again = engine.state_dict()
    train(engine, CASE, 2, 3)
    engine.load_state_dict(whole)
    third = engine.state_dict()
    engine.destroy()
    return {"whole": whole, "file": again, "state": third, "after": dict(model.state_dict())}


def averaged() -> list[dict[str, Tensor]]:
    """Average two steps on a tensor axis; return the averages, what they should be, and those that rank 0's load to."""
    engine, _ = started(CASE, 2)
    average, expected = ExponentialMovingAverage(engine, 0.5), dict[str, Tensor]()
    for step in range(2):
        train(engine, CASE, step, step + 1)
        average.update()
        whole = engine.parameters_snapshot()
        expected = {name: value if not step else (value + expected[name]) / 2 for name, value in whole.items()}
    found = average.state_dict()
    given = [found]
    torch.distributed.broadcast_object_list(given, 0)
    again = ExponentialMovingAverage(engine, 0.1)
    again.load_state_dict(given[0])
    with again.swapped():
        used = engine.parameters_snapshot()
    engine.destroy(whole=False)
    return [found["parameters"], expected, used]


def test_averages_are_of_whole_tensors_and_load_as_parts(ranks: Ranks) -> None:
    for found, expected, used in ranks.run(2, averaged):
        for name, value in expected.items():
            assert abs(found[name] - value).max() < 1e-14, name
            assert (used[name] == found[name]).all(), name


@pytest.mark.slow
def test_whole_tensors_go_out_and_come_in(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(4, handed_on, str(tmp_path / "model.safetensors")):
        whole = found["whole"]
        assert {name: value.shape for name, value in whole.items()} == {
            name: tuple(value.shape) for name, value in CASE.build().state_dict().items()
        }
        for which in ("file", "state", "after"):
            for name, value in whole.items():
                assert (found[which][name] == value).all(), (which, name)
