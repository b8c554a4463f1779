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
    for stage, ranks, steps in ((1, 1024, 2), (3, 64, 1), (2, 1024, 1)):
        assert which_stage.states(stage, ranks, steps) == found[f"states {steps} stage {stage} {ranks}"]
    structure = which_stage.STRUCTURES["stage 3"]
    layers, *sizes = found["size 8 stage 3"]["rtx-4090"]
    assert which_stage.most_layers(structure, 8, "rtx-4090") == layers
    assert [*which_stage.planned(structure, 8, layers)[1:]] == sizes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "device"), [("stage 3", 8, "rtx-4090"), ("stage 2", 64, "h200")])
def test_the_largest_model_fits_and_one_more_block_does_not(name: str, ranks: int, device: str) -> None:
    layers = json.loads(which_stage.FIGURES.read_text())[f"size {ranks} {name}"][device][0]
    assert which_stage.fits(which_stage.STRUCTURES[name], ranks, device, layers)
    assert not which_stage.fits(which_stage.STRUCTURES[name], ranks, device, layers + 1)
