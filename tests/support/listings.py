"""The fenced listings of README and the pages, each with a name: its page and its first line."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.command import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Listing:
    """One fenced block."""

    page: str
    language: str  # "" is what a program prints
    text: str

    @property
    def name(self) -> str:
        """The page and the first line that is not empty."""
        return f"{self.page}: {next((line for line in self.text.splitlines() if line.strip()), '').strip()}"

    @property
    def commands(self) -> list[str]:
        """The command lines of a shell listing; lines that end with a backslash are joined."""
        joined = self.text.replace("\\\n", " ")
        lines = (re.sub(r"\s+#(?!SBATCH).*", "", line).strip() for line in joined.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def listings() -> list[Listing]:
    """Return all listings, in the order of the pages."""
    found = []
    for page in PAGES:
        for indent, language, text in FENCED.findall(page.read_text()):
            lines = [line.removeprefix(indent) for line in text.splitlines()]
            found.append(Listing(str(page.relative_to(ROOT)), language, "\n".join(lines) + "\n"))
    return found


def listing(name: str) -> Listing:
    """Return the listing whose name begins so; there must be one."""
    (found,) = [one for one in listings() if one.name.startswith(name)]
    return found


def changed(text: str, changes: Mapping[str, str]) -> str:
    """Return a listing with some of its words replaced; every one of them must occur."""
    for old, new in changes.items():
        assert old in text, f"the listing has no {old!r}"
        text = text.replace(old, new)
    return text


def new_side(text: str) -> str:
    """Return what a listing of differences leads to."""
    return "\n".join(line[1:] for line in text.splitlines() if not line.startswith("-")) + "\n"


@contextlib.contextmanager
def inside(folder: str | Path) -> Iterator[None]:
    """Work in a folder."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def executed(pieces: Sequence[tuple[str, str]], folder: str) -> dict[str, Any]:
    """Run pieces of Python as one script in a folder; return its numbers and texts, and what it `printed`."""
    space: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    if (accelerate := sys.modules.get("accelerate.state")) is not None:  # an earlier scene may have run on fewer ranks
        accelerate.AcceleratorState._reset_state(True)
    with inside(folder), contextlib.redirect_stdout(printed):
        for name, text in pieces:
            try:
                exec(compile(text, name, "exec"), space)
            except Exception as error:
                raise AssertionError(f"{name}: {type(error).__name__}: {error}\n{text}") from error
    for value in space.values():  # engines of a scene hold threads and files
        if type(value).__name__ in ("Engine", "PipelineEngine"):
            value.destroy(whole=False)
    found = {name: value for name, value in space.items() if isinstance(value, int | float | str)}
    return {**found, "printed": printed.getvalue()}
