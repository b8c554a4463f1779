"""Every listing of README and the pages is run, or says in `tests/support/listing_scenes.py` why it is not."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shardwell.cli import app
from shardwell.cli.launch import LaunchTopology
from shardwell.config import load
from shardwell.train.rank import train
from shardwell.train.recipe import read_recipe
from tests.support.command import ROOT
from tests.support.command import shardwell as command
from tests.support.listing_scenes import COMMANDS, ELSEWHERE, NOT_RUN, PAGES, SCENES, Page, Scene
from tests.support.listings import Listing, changed, executed, inside, listing, listings, new_side
from tests.support.ranks import Ranks

ALL = listings()
TABLES = {
    "SCENES": [piece.name for scene in SCENES.values() for piece in scene.pieces],
    "COMMANDS": list(COMMANDS),
    "PAGES": [f"{page.name}: " for page in PAGES],
    "ELSEWHERE": list(ELSEWHERE),
    "NOT_RUN": list(NOT_RUN),
}


def is_run_here(one: Listing) -> bool:
    """JSON is loaded below; a listing without a language is what a program prints."""
    return one.language in ("json", "")


def test_every_listing_is_in_one_table() -> None:
    places = {
        one.name: [table for table, names in TABLES.items() if any(one.name.startswith(name) for name in names)][:1]
        for one in ALL
        if not is_run_here(one)
    }
    assert {name: found for name, found in places.items() if len(found) != 1} == {}
    unused = [name for names in TABLES.values() for name in names if not any(one.startswith(name) for one in places)]
    assert unused == []
    assert all(NOT_RUN.values())


def test_what_programs_print_is_no_command() -> None:
    commands = re.compile(r"^(\$ |shardwell [a-z]+ |python3? |pip |import |from \w+ import)", re.MULTILINE)
    assert [one.name for one in ALL if one.language == "" and commands.search(one.text)] == []


@pytest.mark.parametrize("name", sorted(set(ELSEWHERE.values())))
def test_the_tests_that_run_other_listings_exist(name: str) -> None:
    path, _, function = name.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("one", [one for one in ALL if one.language == "json"], ids=lambda one: one.name)
def test_configurations_of_the_pages_load(one: Listing) -> None:
    """What a block leaves out is what it is about: stage 3, with optimizer state on the host."""
    around = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    load({**around, **json.loads(one.text)}, world_size=16)


def play(ranks: Ranks, scene: Scene, folder: Path) -> None:
    """Run the listings of a scene in a folder."""
    pieces = [("prelude", scene.prelude)]
    for piece in scene.pieces:
        found = listing(piece.name)
        text = new_side(found.text) if found.language == "diff" else found.text
        pieces.append((piece.name, changed(text, piece.changes)))
    ranks.run(scene.num_ranks, executed, [*pieces, ("checks", scene.checks)], str(folder))


@pytest.fixture(scope="module")
def run_folder(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the scene that leaves checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    play(ranks, SCENES["a run and its checkpoints"], folder)
    make_files(folder, ("llama", "chats.jsonl"))
    for method in ("full", "lora"):
        recipe = {"model": "llama", "data": ["chats.jsonl"], "sequence_length": 64, "steps": 1, "export": False}
        ranks.run(1, trained, str(folder), {**recipe, "method": method, "output": method})
        (folder / method / "checkpoints").rename(folder / "checkpoints-of-a-model")
        shutil.rmtree(folder / method)
        (folder / "checkpoints-of-a-model").rename(folder / method)
    return folder


@pytest.fixture
def folder(run_folder: Path, tmp_path: Path) -> Path:
    """A copy of that folder, with small files that commands name."""
    shutil.copytree(run_folder, tmp_path / "here")
    here = tmp_path / "here"
    (here / "ds_config.json").write_text('{"zero_optimization": {"overlap_comm": true}}')
    shutil.copytree(here / "run", here / "other")
    (here / "train.py").write_text(FAILS_ONCE)
    return here


FAILS_ONCE = """
import os, pathlib
started = pathlib.Path(f"started-{os.environ['RANK']}")
again = started.exists()
started.touch()
raise SystemExit(0 if again or os.environ["RANK"] != "0" else 3)
"""


@pytest.mark.parametrize("name", [name for name in SCENES if name != "a run and its checkpoints"])
def test_listings_run(ranks: Ranks, name: str, folder: Path) -> None:
    play(ranks, SCENES[name], folder)


def test_the_units_of_the_page_are_those_of_its_model(ranks: Ranks, tmp_path: Path) -> None:
    scene = SCENES["units"]
    pieces = [("units", listing(scene.pieces[0].name).text), ("checks", scene.checks)]
    (found, _) = ranks.run(2, executed, pieces, str(tmp_path))
    assert found["names"] == listing("docs/units.md: (root)").text.strip()


def test_listings_of_a_run_run(run_folder: Path) -> None:
    assert (run_folder / "run" / "latest").exists()


def run_line(line: str) -> str:
    """Run one command line in this process, and return what it prints."""
    line, _, target = line.partition(" > ")
    words = shlex.split(line)
    if words[:2] == ["python", "-m"]:
        before, sys.argv = sys.argv, words[2:]
        code: object = None
        try:
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        except SystemExit as error:
            code = error.code
        finally:
            sys.argv = before
        assert not code, line
        return ""
    assert words[0] == "shardwell", line
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, f"{line}: {done.output} {done.exception!r}"
    if target:
        Path(target).write_text(done.stdout)
    return str(done.output)


def launched(line: str) -> str:
    """Run a command line in a process of its own: a launcher ends all children of its process, the pool's too."""
    done = command(*shlex.split(line)[1:], cwd=Path.cwd())
    assert done.returncode == 0, f"{line}: {done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_run(name: str, folder: Path, ranks: Ranks) -> None:
    tag = (folder / "run" / "latest").read_text().strip()
    changes = {old: new.format(tag=tag) for old, new in COMMANDS[name].items()}
    if "last.ckpt" in name:
        play(ranks, SCENES["Lightning"], folder)
    lines = changed("\n".join(listing(name).commands), changes).splitlines()
    assert lines
    with inside(folder):
        texts = [launched(line) if line.startswith("shardwell run") else run_line(line) for line in lines]
    printed = " ".join(" ".join(texts).split())
    assert "--max-restarts" not in name or "restart 1 of 10 with 8 ranks" in printed


def trained(folder: str, recipe: dict[str, Any]) -> dict[str, Any]:
    with inside(folder):
        return train(read_recipe(None, recipe))


def make_files(folder: Path, names: Sequence[str]) -> None:
    """Write what pages take for granted: a small model, its configuration, chats and texts."""
    import transformers

    from shardwell.train.models import byte_tokenizer

    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    if "llama" in names:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=128)
        transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")
        tokenizer.save_pretrained(folder / "llama")
    chats = [{"prompt": f"say {number}", "response": "word " * (1 + number % 5)} for number in range(24)]
    texts = {
        "config.json": json.dumps({"model_type": "llama", **sizes}),
        "chats.jsonl": "\n".join(map(json.dumps, chats)),
        "text.txt": "the same words again and again. " * 200,
        "texts": "the same words again and again. " * 50,
    }
    for name in (name for name in names if name != "llama"):
        path = folder / name / "one.txt" if name == "texts" else folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(texts[name])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_run_from_top_to_bottom(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: Page
) -> None:
    """Command lines are read as they stand, and pool ranks run what they would start."""

    def launch(command: list[str], place: LaunchTopology, restarts: object) -> None:
        num_ranks = min(2, place.local_world_size)
        if command[:2] == ["-m", "shardwell.train.rank"]:
            recipe = {**json.loads(command[2]), **page.overrides}
            ranks.run(num_ranks, trained, str(tmp_path), recipe)
        else:
            script(num_ranks, command[0], Path(command[0]).read_text())

    def script(num_ranks: int, name: str, text: str) -> None:
        printed.append(ranks.run(num_ranks, executed, [(name, text)], str(tmp_path))[0]["printed"])

    printed: list[str] = []
    for module in ("train_command", "run_command"):
        monkeypatch.setattr(f"shardwell.cli.{module}.launch", launch)
    make_files(tmp_path, page.needs)
    elsewhere = [*ELSEWHERE, *NOT_RUN]
    saved = {name: file for file, name in page.saved.items()}
    with inside(tmp_path):
        for one in (one for one in ALL if one.page == page.name and not is_run_here(one)):
            file = next((file for name, file in saved.items() if one.name.startswith(name)), None)
            if file is not None:
                Path(file).write_text(one.text)
            elif one.language == "python":
                script(1, one.name, one.text)
            elif not any(one.name.startswith(name) for name in elsewhere) and one.name not in COMMANDS:
                for line in one.commands:
                    run_line(line)
    assert [name for name in page.leaves if not (tmp_path / name).exists()] == []
    assert [words for words in page.prints if words not in "".join(printed)] == []
