"""Recipes, data files and kept tokens that cannot be used: one sentence each, and never a wait or another run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwell.errors import ConfigError, ShardwellError
from shardwell.train import models
from shardwell.train.documents import Document, files_of, records_of
from shardwell.train.recipe import Recipe, check_same_run, read_recipe
from shardwell.train.rows import opened, pack

RECIPE = {"new_model": {"model_type": "llama"}, "data": ["."]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.yaml", b"data: [.]\nlearning_rate: 1\nlearning_rate: 2\n", "learning_rate is written 2 times"),
        ("a.yaml", b"lora: {rank: 1, rank: 2}\n", "rank is written 2 times"),
        ("a.json", b'{"steps": 3, "steps": 4}', "steps is written 2 times"),
        ("a.json", b'{"config": {"bf16": {"enabled": true, "enabled": false}}}', "enabled is written 2 times"),
        ("a.yaml", b"model: \xff\n", "not a text file in UTF-8"),
        ("a.yaml", b"when: 2026-99-99\n", "not YAML"),
        ("a.yaml", b"a: !!python/object/apply:os.getcwd []\n", "not YAML"),
        ("a.yaml", b"a: " + b"[" * 5000, "nested too deeply"),
        ("a.json", b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        ("a.json", b'{"steps": ' + b"9" * 5000 + b"}", "a number of 5,000 digits"),
        ("a.yaml", b"steps: " + b"9" * 5000 + b"\n", "not YAML"),
        ("a.yaml", b"1: 2\n", "Keys should be strings"),
        ("a.yaml", b"- 1\n", "expected options by name, found a list"),
        ("a.yaml", b"config: &a\n  again: *a\n", "too many to be a recipe"),
        (
            "a.yaml",
            b"config:\n  a0: &a0 [x]\n"
            + b"".join(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n".encode() for n in range(1, 12)),
            "too many to be a recipe",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    pytest.importorskip("yaml")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_recipe(str(tmp_path / name), {})


@pytest.mark.parametrize("path", ["/dev/zero", "a\0b", "\ud800.yaml", "/nowhere/recipe.yaml"])
def test_what_is_no_file_is_no_recipe(path: str) -> None:
    with pytest.raises(ConfigError):
        read_recipe(path, {})


@pytest.mark.parametrize(
    "given",
    [
        {"seed": 10**30},
        {"micro_batch": 10**400},
        {"epochs": 1e300},
        {"sequence_length": 2**40},
        {"steps": True},
        {"data": ["a\0b"]},
        {"data": ["\ud800"]},
        {"data": ["/dev/null"]},
        {"new_model": None, "model": ""},
    ],
    ids=str,
)
def test_options_that_nothing_can_be_computed_with_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        read_recipe(None, {**RECIPE, **given})


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "b.jsonl")
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        read_recipe(None, {**RECIPE, "data": [str(tmp_path / "b.jsonl")]})
    with pytest.raises(ShardwellError, match=r"b\.jsonl: is no file"):
        files_of([str(tmp_path)])


def test_a_link_to_nothing_is_not_left_out_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.txt").symlink_to(tmp_path / "none")
    with pytest.raises(ShardwellError, match=r"b\.txt: is no file, but a link to nothing"):
        files_of([str(tmp_path)])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"\xff\xfe", "not text in UTF-8"),
        ("a.jsonl", b'{"text": "\xff"}', "not text in UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1: has half of a surrogate pair"),
        ("a.jsonl", b"[" * 100_000, "line 1: nested too deeply"),
        ("a.json", b'{"text": ' + b"9" * 5000 + b"}", "not JSON"),
        ("a.parquet", b"PAR1 and more PAR1", "cannot be read as parquet"),
        ("a.parquet", b"", "cannot be read as parquet"),
    ],
)
def test_a_data_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ShardwellError, match=rf"a\..*{words}"):
        list(records_of(tmp_path / name))


def test_a_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}')
    assert [one["text"] for _, one in records_of(tmp_path / "a.jsonl")] == ["\U0001f600"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_folder_whose_recipe_is_damaged_is_refused_with_the_way_out(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "recipe.json").write_bytes(content)
    with pytest.raises(ConfigError, match="choose another --output"):
        check_same_run(Recipe.model_validate(RECIPE), tmp_path)


def _shorter(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 8)


def _other(**change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        name = file.stem
        if name in change:
            np.save(file, change[name](np.load(file)))

    return damage


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "nothing in it": ("tokens", lambda file: file.write_bytes(b"") and None),
    "cut off": ("trained", _shorter),
    "gone": ("starts", Path.unlink),
    "a pickle": ("tokens", lambda file: np.save(file, np.array([{}], dtype=object))),
    "rows outside": ("rows", _other(rows=lambda rows: rows + 100)),
    "rows before the first": ("rows", _other(rows=lambda rows: rows - 1)),
    "rows that are too long": ("rows", _other(rows=lambda rows: rows * [[0, 3]])),
    "rows turned around": ("rows", _other(rows=lambda rows: rows[:, ::-1])),
    "no rows": ("rows", _other(rows=lambda rows: rows[:0])),
    "numbers of another kind": ("tokens", _other(tokens=lambda tokens: tokens.astype(np.float32))),
    "fewer marks than tokens": ("trained", _other(trained=lambda trained: trained[:-1])),
    "starts in disorder": ("starts", _other(starts=lambda starts: starts[::-1])),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_tokens_of_an_earlier_run_that_are_damaged_are_refused(tmp_path: Path, what: str) -> None:
    documents = [Document([1, 2, 3], [False, True, True]), Document([4, 5], [False, True])]
    for name, content in pack(documents, 3, packing=False).items():
        np.save(tmp_path / f"{name}.npy", content, allow_pickle=False)
    assert len(opened(tmp_path, 3, 0)) == 2
    array, damage = DAMAGE[what]
    damage(tmp_path / f"{array}.npy")
    with pytest.raises(ShardwellError, match="damaged; delete this folder"):
        opened(tmp_path, 3, 0)
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("name", ["tokens", "trained", "starts", "rows"])
def test_tokens_that_are_cut_off_while_they_are_read_are_an_error(tmp_path: Path, name: str) -> None:
    """Without the check a row far behind the end would kill the process by SIGBUS."""
    for array, content in pack([Document([7] * 3, [True] * 3, True)] * 9000, 3, packing=False).items():
        np.save(tmp_path / f"{array}.npy", content)
    rows = opened(tmp_path, 3, 0)
    assert rows[8999]["input_ids"].tolist() == [7, 7, 7]
    os.truncate(tmp_path / f"{name}.npy", 256)
    with pytest.raises(ShardwellError, match=f"{name}.npy became shorter while it was read"):
        rows[8999]


def test_a_recipe_in_json_may_have_what_configurations_may(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"new_model": {"model_type": "llama"}, /* here */ "data": ["."], "steps": 3,}')
    assert read_recipe(str(tmp_path / "a.json"), {}).steps == 3
    (tmp_path / "b.json").write_text(json.dumps(RECIPE))
    assert read_recipe(str(tmp_path / "b.json"), {"steps": 4}).steps == 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be used"),
        ("{", "cannot be used"),
        ("[]", "cannot be used"),
        ('{"model_type": "alien"}', "cannot be used"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "cannot be used"),
        ('{"model_type": "x", "auto_map": {"AutoConfig": "evil.Config"}}', "cannot be used"),
    ],
    ids=str,
)
def test_a_folder_that_is_no_model_is_one_sentence(tmp_path: Path, content: str | None, words: str) -> None:
    pytest.importorskip("transformers")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    recipe = read_recipe(None, {"model": str(tmp_path), "data": ["."]})
    with pytest.raises(ConfigError, match=words):
        models.model_config(recipe, None)
    with pytest.raises(ConfigError, match=r"tokenizer.*cannot be used"):
        models.make_tokenizer(recipe)
    assert not (tmp_path / "ran").exists()


def test_a_new_model_of_odd_sizes_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizer = models.byte_tokenizer()
    for given in ({"model_type": "llama", "hidden_size": "wide"}, {"model_type": "alien"}, {"model_type": ["llama"]}):
        with pytest.raises(ConfigError, match=r"new_model: .*cannot be used"):
            models.model_config(read_recipe(None, {**RECIPE, "new_model": given}), tokenizer)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds a list"):
        models.model_config(read_recipe(None, {**RECIPE, "new_model": str(tmp_path / "config.json")}), tokenizer)
