"""Every example runs as its first line says, and does what it is about."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command import ROOT
from tests.support.command import shardwell as command

EXAMPLES = ROOT / "examples"


def falls(out: str) -> bool:
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", out)]
    return losses[-1] < losses[0]


def rises(out: str) -> bool:
    rewards = [float(found) for found in re.findall(r"reward ([\d.]+)", out)]
    return rewards[-1] > rewards[0] + 0.1


# example -> its arguments here, and what its output must show
RUNS: dict[str, tuple[list[str], Callable[[str], bool]]] = {
    "vision": (["20"], lambda out: "right 100%" in out or falls(out)),
    "moe": (["20"], falls),
    "gan": (["120"], lambda out: 1.5 < float(re.findall(r"drawn: ([\d.-]+)", out)[0]) < 4.5),
    "rlhf": (["15"], rises),
    "nvme": (["{folder}", "20"], lambda out: "disk" in out and falls(out)),
    "lora": (["-", "20"], falls),
    "train_gpt": (["{text}"], falls),
    "fine_tune": (["-", "20"], falls),
    "offload": (["20"], lambda out: "host 384.0 KiB" in out and falls(out)),
    "three_axes": (["20"], falls),
}
WITH_LIBRARIES = {"lora", "fine_tune"}  # they import Transformers
RANKS = {"three_axes": 4}  # here without a data axis; all others run on 2
ELSEWHERE = {"ray_train"}  # tests/clients/test_ray_train.py runs it


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == RUNS.keys() | ELSEWHERE


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RUNS))
def test_an_example_does_what_it_is_about(tmp_path: Path, name: str) -> None:
    arguments, shows = RUNS[name]
    text = tmp_path / "text.txt"
    text.write_text("the same words again and again. " * 1200)
    given = [one.format(folder=tmp_path, text=text) for one in arguments]
    words = ["run", "-n", str(RANKS.get(name, 2)), EXAMPLES / f"{name}.py", *given]
    done = command(*words, cwd=tmp_path, libraries=name in WITH_LIBRARIES)
    assert done.returncode == 0, done.stderr[-3000:]
    assert shows(done.stdout), done.stdout[-3000:]
    assert f"examples/{name}.py" in (EXAMPLES / f"{name}.py").read_text().splitlines()[0]
