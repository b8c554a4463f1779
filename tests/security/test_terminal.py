"""Names in files of others reach a terminal as text: no escape sequence, no second line, no turned direction."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from shardwell.cli import app
from shardwell.errors import ShardwellError, printable
from tests.support.checkpoint_samples import VALUES, save_own, tensors
from tests.support.command import shardwell as command

HARM = "\x1b]0;title\x07\x1b[31m\x9b2J\r\x08\u202e[bold]\nerror: all is well"
FORBIDDEN = set(HARM) - set("]0;title[31m2Jbold\nerror: all is well")


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    save_file({f"w{HARM}": torch.zeros(3), "v": torch.ones(2)}, tmp_path / "model.safetensors")
    own = {**tensors(0), f"model/{HARM}": torch.zeros(2)}
    save_own(tmp_path / "own", "step-1", own, {**VALUES, "versions": {"torch": HARM}})
    return [tmp_path, tmp_path / "own"]


@pytest.mark.parametrize(
    "words", [["inspect", "--tensors"], ["verify"], ["inspect", "--tag", HARM], ["inspect", "--json"]]
)
def test_commands_show_names_of_files_as_text(folders: list[Path], words: list[str]) -> None:
    for folder in folders:
        said = CliRunner().invoke(app, ["checkpoint", *words, str(folder)])
        assert not FORBIDDEN & set(said.output + str(said.exception))
        assert not [line for line in said.output.splitlines() if line.startswith("error: all is well")]


def test_a_comparison_shows_names_of_files_as_text(folders: list[Path]) -> None:
    said = CliRunner().invoke(app, ["checkpoint", "diff", *map(str, folders)])
    assert r"\x1b]0;title\x07" in said.output
    assert not FORBIDDEN & set(said.output)


def test_an_error_of_a_command_is_text(tmp_path: Path) -> None:
    found = command("checkpoint", "inspect", str(tmp_path / f"no{HARM}"))
    assert found.returncode == 2
    assert "\x1b" not in found.stderr


def test_messages_of_errors_keep_lines_and_escape_the_rest() -> None:
    assert printable("a\tb\nc") == "a\tb\nc"
    assert printable("a\tb\nc", one_line=True) == r"a\tb\nc"
    assert str(ShardwellError(HARM)).startswith(r"\x1b]0;title\x07\x1b[31m\x9b2J\r\x08\u202e[bold]")
    assert printable("żółw 模型 \U0001f600") == "żółw 模型 \U0001f600"
