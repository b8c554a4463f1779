"""Checkpoints that are damaged, do not fit, or cannot be written: a clear error, and training goes on as it was."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell.checkpoint import Folder, files
from shardwell.errors import CheckpointError
from tests.support.checkpoint_legs import Leg, everything, run_leg
from tests.support.models import batches, share
from tests.support.ranks import Ranks
from tests.support.training import Case

CASE = Case(dtype=torch.float32)
FILE = "rank-00001.safetensors"


def one_step(engine: shardwell.Engine) -> None:
    engine.backward(engine(share(batches(1, 48)[0], dist.get_rank(), dist.get_world_size())))
    engine.step()


def try_to_load(engine: shardwell.Engine, root: str, options: dict[str, Any]) -> tuple[str, bool]:
    """The error, and whether everything is as before and training goes on."""
    before, num_steps, message = everything(engine), engine.global_steps, ""
    try:
        engine.load_checkpoint(root, **options)
    except CheckpointError as error:
        message = str(error)
    after = everything(engine)
    intact = before.keys() == after.keys() and all(
        torch.equal(torch.as_tensor(before[name]), torch.as_tensor(after[name])) for name in before
    )
    one_step(engine)
    return message, intact and engine.global_steps == num_steps + 1


def load_each(case: Case, stage: int, roots: list[str], options: dict[str, Any]) -> list[tuple[str, bool]]:
    """One engine tries them all."""
    engine = Leg(stage, 0, 1, case, loads=False).engine()
    one_step(engine)
    return [try_to_load(engine, root, options) for root in roots]


def rewrite(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Damage a manifest and make its own checksum right again."""

    def damage(path: Path) -> None:
        content = json.loads((path / "manifest.json").read_text())
        del content["checksum"]
        change(content)
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        content["checksum"] = f"{zlib.crc32(text.encode()):08x}"
        (path / "manifest.json").write_text(json.dumps(content))

    return damage


def point_outside(content: dict[str, Any]) -> None:
    content["files"]["../" + FILE] = content["files"].pop(FILE)
    for tensor in content["tensors"].values():
        tensor["pieces"] = [[f.replace(FILE, "../" + FILE), *rest] for f, *rest in tensor["pieces"]]


def make_huge(content: dict[str, Any]) -> None:
    content["tensors"]["model/head.weight"]["shape"] = [2**31, 2**31]


def flip_a_byte(path: Path) -> None:
    content = bytearray((path / FILE).read_bytes())
    content[-1] ^= 16
    (path / FILE).write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing file": (lambda path: (path / FILE).unlink(), f"{FILE}: missing"),
    "truncated file": (lambda path: os.truncate(path / FILE, 1000), f"{FILE}: 1000 bytes, expected"),
    "flipped byte": (flip_a_byte, rf'{FILE}: tensor ".*": damaged'),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "not a committed checkpoint"),
    "half a manifest": (lambda path: os.truncate(path / "manifest.json", 500), "manifest.json: not valid JSON"),
    "path outside": (rewrite(point_outside), "expected the plain name of a data file"),
    "absurd size": (rewrite(make_huge), r'tensors\["model/head.weight"\]'),
}


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    ranks.run(2, run_leg, Leg(3, 0, 2, CASE, loads=False), str(root))
    return root


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_damage_is_named_and_changes_nothing(ranks: Ranks, saved: Path, tmp_path: Path, stage: int) -> None:
    damages = DAMAGES if stage == 3 else dict(list(DAMAGES.items())[::2])
    for name, (damage, _) in damages.items():
        shutil.copytree(saved, tmp_path / name)
        damage(tmp_path / name / "global_step2")
    roots = [str(tmp_path / name) for name in damages]
    for answers in ranks.run(2, load_each, CASE, stage, roots, {"tag": "global_step2"}):
        for (name, (_, sentence)), (message, intact) in zip(damages.items(), answers, strict=True):
            assert re.search(sentence, message), f"{name}: {message}"
            assert intact, name


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"width": 18}, r"'model/.*' has shape .*, but '.*' of the model has .*Is it a checkpoint of another model"),
        ({"blocks": 3}, "it lacks 'blocks.2.norm1.weight'.* and 7 more, and holds nothing"),
        ({"blocks": 1}, "it lacks nothing, and holds 'blocks.1.down.bias'"),
    ],
)
def test_another_model_is_refused(ranks: Ranks, saved: Path, model: dict[str, int], sentence: str) -> None:
    case = Case(dtype=torch.float32, model=model)
    for ((message, intact),) in ranks.run(2, load_each, case, 3, [str(saved)], {}):
        assert re.search(sentence, message), message
        assert intact


def test_what_fits_can_be_loaded_alone(ranks: Ranks, saved: Path) -> None:
    wider = Case(dtype=torch.float32, model={"blocks": 3})
    ((message, intact),) = ranks.run(2, load_each, wider, 3, [str(saved)], {"load_module_strict": False})[0]
    assert message == ""
    assert not intact


# ------------------------------------------------------------------------------------------------------- writing


def try_to_save(root: str, bad_rank: int, stage: int) -> tuple[str, list[str], bool]:
    engine = Leg(stage, 0, 1, CASE, loads=False).engine()
    engine.save_checkpoint(root, "good")
    one_step(engine)
    before, write, written = everything(engine), os.write, 0

    def full(descriptor: int, view: Any) -> int:
        nonlocal written
        written += len(view)
        if dist.get_rank() == bad_rank and written > 50_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, view)

    files.os.write, message = full, ""  # type: ignore[assignment]
    try:
        engine.save_checkpoint(root, "bad")
    except CheckpointError as error:
        message = str(error)
    finally:
        files.os.write = write
    after = everything(engine)
    intact = all(torch.equal(torch.as_tensor(before[name]), torch.as_tensor(after[name])) for name in before)
    names = sorted(os.listdir(root))
    one_step(engine)
    engine.save_checkpoint(root, "later")
    return message, names, intact and Folder(root).latest() == "later"


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_full_disk_is_an_error_on_every_rank_and_leaves_what_was_there(
    ranks: Ranks, tmp_path: Path, bad_rank: int, stage: int
) -> None:
    for message, names, intact in ranks.run(2, try_to_save, str(tmp_path), bad_rank, stage):
        assert f"rank-{bad_rank:05d}.safetensors" in message
        assert 'tensor "' in message
        assert "No space left on device" in message
        assert names == ["good", "latest"]
        assert intact


def save_where_nothing_can_be(root: str) -> list[str]:
    engine = Leg(3, 0, 1, CASE, loads=False).engine()
    messages = []
    for place in (f"{root}/file", f"{root}/file/below", "/proc/nothing"):
        try:
            engine.save_checkpoint(place)
        except CheckpointError as error:
            messages.append(str(error))
    one_step(engine)
    return messages


def test_a_folder_that_cannot_be_written_to_is_named(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for messages in ranks.run(2, save_where_nothing_can_be, str(tmp_path)):
        assert len(messages) == 3
        assert all(place in message for place, message in zip(["file", "below", "/proc"], messages, strict=True))
    assert (tmp_path / "file").read_text() == "mine"


def save_in_the_way(root: str) -> str:
    engine = Leg(3, 0, 1, CASE, loads=False).engine()
    try:
        engine.save_checkpoint(root, "mine")
    except CheckpointError as error:
        return str(error)
    return ""


def test_what_is_no_checkpoint_is_not_overwritten(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for message in ranks.run(2, save_in_the_way, str(tmp_path)):
        assert "in the way, and not a checkpoint" in message
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
