"""SECURITY.md names a test for each way in, and the tests are there."""

from __future__ import annotations

import re

from tests.support.command import ROOT

PAGE = (ROOT / "SECURITY.md").read_text()


def test_every_way_in_has_a_test_that_exists() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    table = PAGE.partition("## Ways in")[2].partition("What is outside")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| way in")]
    assert len(rows) > 12
    for row in rows:
        named = re.findall(r"`(tests/[\w/.]+|test_\w+(?:\.py)?|the same)`", row.rsplit("|", 2)[1])
        assert named or "the same" in row or "poisoned" in row, row
        for name in named:
            folders = [ROOT / name, *(ROOT / "tests").glob(f"*/{name}")]
            assert any(path.exists() for path in folders) or f"def {name}(" in tests, f"no {name}"


def test_the_page_speaks_of_every_launcher() -> None:
    for launcher in ("torchrun", "Slurm", "Kubernetes", "Ray"):
        assert re.search(rf"^\| .?{launcher}", PAGE, re.MULTILINE), launcher


def test_no_path_names_a_collective_of_objects() -> None:
    """torch sends objects as pickles, and unpickles what it gets. DeepSpeed's names of them send JSON, or refuse."""
    for path in (ROOT / "src").rglob("*.py"):
        of_torch = r"\bdist(?:ributed)?\.(?:\w+\.)*" if path.match("compat/deepspeed_api/comm.py") else r"\b"
        found = re.findall(of_torch + r"\w*(?:gather|scatter|broadcast|send|recv)_object\w*", path.read_text())
        assert not found, f"{path}: {found}"
