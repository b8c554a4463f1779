"""The commands and the first script of the pages: options exist, and README's loop prints a falling loss."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from shardwell.cli import app
from tests.support.command import ROOT
from tests.support.command import shardwell as command

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
FENCED = re.compile(r"^```(?:bash|text|console|sh)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """The lines of listings that call the command, and what is in backticks or in a docstring's first line."""
    text = page.read_text()
    lines = [line.strip() for block in FENCED.findall(text) for line in block.splitlines()]
    lines += re.findall(r"`(shardwell [a-z][^`\n]*)`", text)
    lines += re.findall(r":  (shardwell run [^\"\n]+)", text) if page.suffix == ".py" else []
    return [re.sub(r"\s+#.*| > .*| && .*", "", line) for line in lines if line.startswith("shardwell ")]


def found_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that some words call, and its arguments."""
    group: Any = get_command(app)
    while words and hasattr(group, "commands"):
        if words[0] not in group.commands:
            return None, words
        group, words = group.commands[words[0]], words[1:]
    return group, words


def unknown(line: str) -> list[str]:
    """The options of a line that its command does not have."""
    words = shlex.split(line)[1:]
    called, rest = found_command(words)
    if called is None:
        return rest[:1]
    if getattr(called, "name", "") == "run":  # what follows the script is the script's
        scripts = [number for number, word in enumerate(rest) if word.endswith(".py") or word in ("SCRIPT", "-m")]
        rest = rest[: scripts[0]] if scripts else rest
    known = {option for parameter in called.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return [word for word in rest if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in {*known, "--help"}]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_exists_with_its_options(page: Path) -> None:
    assert {line: wrong for line in commands(page) if (wrong := unknown(line))} == {}


def test_commands_that_do_not_exist_are_found() -> None:
    assert unknown("shardwell run -n 2 --fast train.py --epochs 3") == ["--fast"]
    assert unknown("shardwell checkpoint exprot a b") == ["exprot"]
    assert unknown("shardwell train --data x --memory 24GB") == []
    assert sum(len(commands(page)) for page in PAGES) > 40


@pytest.mark.slow
def test_the_script_of_the_readme_prints_a_falling_loss(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    script = text.split("```python\n")[1].split("```")[0]
    (tmp_path / "train.py").write_text(script)
    done = command("run", "-n", "2", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def listings(page: str) -> list[str]:
    """The Python listings of a page."""
    return [block.split("```")[0] for block in (ROOT / page).read_text().split("```python\n")[1:]]


@pytest.mark.slow
def test_the_listings_of_the_first_pages_run(tmp_path: Path) -> None:
    """The script of getting-started.md, and after it what observability.md does with its engine."""
    script = listings("docs/getting-started.md")[0].replace("range(20)", "range(3)")
    (tmp_path / "train.py").write_text("\n".join([script, *listings("docs/observability.md")]))
    done = command("run", "-n", "2", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "memory on this rank" in done.stdout
    assert "0=(root)" in done.stdout
    assert "largest parts of a step:" in done.stdout
    assert (tmp_path / "profile" / "timeline.html").exists()
