"""The page "Which stage, which offload" says what plans say."""

from __future__ import annotations

import json

import pytest

from tests.plan import which_stage


def test_the_page_is_what_its_figures_say() -> None:
    found = json.loads(which_stage.FIGURES.read_text())
    assert which_stage.PAGE.read_text() == which_stage.written(found)
    assert which_stage.PICTURE.read_text() == which_stage.picture()


@pytest.mark.slow
def test_the_figures_are_what_is_planned() -> None:
    found = json.loads(which_stage.FIGURES.read_text())
    for stage, ranks, steps in ((1, 1024, 2), (3, 64, 1)):
        assert which_stage.states(stage, ranks, steps) == found[f"states {steps} stage {stage} {ranks}"]
    assert which_stage.per_block(which_stage.STRUCTURES["stage 3"], 8) == found["size 8 stage 3"]


@pytest.mark.slow
def test_the_largest_model_fits_and_one_more_block_does_not() -> None:
    found = json.loads(which_stage.FIGURES.read_text())["size 8 stage 3"]
    _, layers, *_ = which_stage.largest(found, "rtx-4090")
    assert which_stage.fits(which_stage.STRUCTURES["stage 3"], 8, "rtx-4090", layers)
    assert not which_stage.fits(which_stage.STRUCTURES["stage 3"], 8, "rtx-4090", layers + 1)
