"""Questions about the machine have one door: the current `Machine`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardwell
from shardwell.memory.machine import SimulatedMachine, SimulatedRanks, ThisMachine, current_machine, simulated

SOURCE = Path(shardwell.__file__).parent
ASKED = {"psutil", "statvfs", "disk_usage", "is_cuda", "mem_get_info", "virtual_memory"}
# What may ask: the machine itself, kernels (which exist for one kind of tensor), and commands that describe this host.
DOORS = ("memory/machine.py", "memory/limits.py", "memory/device.py", "kernels/", "cli/", "compat/")


def questions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in ASKED:
            yield f"{path.relative_to(SOURCE)}:{node.lineno} asks {node.attr}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (f"{path.relative_to(SOURCE)}:{node.lineno} imports {n}" for n in names if n in ASKED)


@pytest.mark.slow
def test_only_the_machine_is_asked_what_there_is() -> None:
    files = [path for path in SOURCE.rglob("*.py") if not str(path.relative_to(SOURCE)).startswith(DOORS)]
    assert len(files) > 200
    assert [line for path in files for line in questions(path)] == []


def test_the_scan_sees_a_question(tmp_path: Path) -> None:
    bad = SOURCE / "memory" / "machine.py"
    assert list(questions(SOURCE / "memory" / "limits.py"))
    assert any("mem_get_info" in line for line in questions(bad))


def test_a_simulation_ends_with_its_block() -> None:
    assert isinstance(current_machine(), ThisMachine)
    machine = SimulatedMachine(ranks=SimulatedRanks(3, 8))
    with simulated(machine):
        assert current_machine() is machine
    assert isinstance(current_machine(), ThisMachine)


def test_a_model_with_bytes_is_refused_on_a_simulated_machine() -> None:
    config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {}}}
    with simulated(SimulatedMachine()), pytest.raises(shardwell.ShardwellError, match="expected meta"):
        shardwell.initialize(model=torch.nn.Linear(4, 4), config=config, device="cpu")


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_impossible_ranks_are_refused(rank: int, size: int) -> None:
    with pytest.raises(shardwell.ShardwellError, match="simulated rank"):
        SimulatedRanks(rank, size)
