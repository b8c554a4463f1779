"""Files of `torch.save` that want to do harm run nothing, and get no more memory than they fill."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import sys
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell.checkpoint.sources import torch_files
from shardwell.checkpoint.sources.deepspeed import DeepSpeedSource
from shardwell.checkpoint.sources.torch_files import Stub, json_entries, load
from shardwell.errors import CheckpointError
from tests.support.checkpoint_samples import same_bits
from tests.support.deepspeed_checkpoints import FOLDER, MAIN, SECOND, TAG, rewrite, truth, whole

pytestmark = pytest.mark.usefixtures("no_deepspeed")


class Evil:
    """Something that a pickle would run."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class FakeStorage:
    """A storage of so many elements, as a pickle of torch.save names it."""

    def __init__(self, numel: int) -> None:
        self.numel = numel


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, FakeStorage):
            return "storage", torch.FloatStorage, "0", "cpu", value.numel
        return None


def forge(path: Path, content: Any, compression: int = zipfile.ZIP_STORED, protocol: int = 2) -> None:
    """A file as torch.save writes it, with any pickle and one small storage in it."""
    buffer = io.BytesIO()
    Pickler(buffer, protocol).dump(content)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in (("data.pkl", buffer.getvalue()), ("byteorder", b"little"), ("version", b"3\n")):
            archive.writestr(f"archive/{name}", data)
        archive.writestr("archive/data/0", bytes(16))


def tensor_of(numel: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Evil:
    return Evil(torch._utils._rebuild_tensor_v2, FakeStorage(numel), 0, shape, stride, False, OrderedDict())


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that must not come to be."""
    yield tmp_path / "marker"
    assert not (tmp_path / "marker").exists()


def test_a_forged_file_with_honest_content_is_read(tmp_path: Path) -> None:
    forge(tmp_path / "file", {"w": tensor_of(4, (2, 2), (2, 1))})
    assert same_bits(load(tmp_path / "file")["w"], torch.zeros(2, 2))


@pytest.mark.parametrize("case", ["stage1-bf16", "stage3-bf16"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_no_file_can_run_a_command(copy: Callable[[str], Path], marker: Path, case: str, protocol: int) -> None:
    directory = copy(case)
    content = {
        "module": Evil(os.system, f"touch {marker}"),
        "optimizer_state_dict": Evil(eval, f"open('{marker}', 'w')"),
    }
    for path in sorted(directory.iterdir()):
        honest = path.read_bytes()
        forge(path, content, protocol=protocol)
        with pytest.raises(CheckpointError, match=str(path)) as caught:
            DeepSpeedSource(directory)
        found = (
            "refers to __builtin__.eval, posix.system"
            if protocol == 2
            else "a pickle of protocol 4; torch.save writes protocol 2"
        )
        assert found in str(caught.value)
        with pytest.raises(CheckpointError, match=str(path)):
            DeepSpeedSource(directory, ignore=["posix.system", "__builtin__.eval", "builtins.eval"])
        path.write_bytes(honest)


def test_objects_of_unknown_classes_are_refused_by_name_or_ignored(copy: Callable[[str], Path]) -> None:
    directory = copy("stage1-bf16")

    class Settings:
        pass

    settings = Settings()
    settings.rate = 0.1  # type: ignore[attr-defined]
    Settings.__module__, Settings.__qualname__ = "mine.training", "Settings"
    module = type(sys)("mine.training")
    module.Settings = Settings  # type: ignore[attr-defined]
    sys.modules["mine"], sys.modules["mine.training"] = module, module
    try:
        rewrite(directory / MAIN, lambda content: content.update(settings=settings))
    finally:
        del sys.modules["mine"], sys.modules["mine.training"]
    with pytest.raises(CheckpointError, match=f"{MAIN}: refers to mine.training.Settings"):
        DeepSpeedSource(directory)
    source = DeepSpeedSource(directory, ignore=["mine.training.Settings"])
    assert source.values["client"] == {"epoch": 2, "best": [0.5, None], "note": "mine"}
    for name, tensor in truth("stage1-bf16")[0].items():
        assert same_bits(whole(source, name), tensor)


def test_a_stub_holds_and_does_nothing(tmp_path: Path) -> None:
    forge(tmp_path / "file", [Evil(threading.Timer, 0.0, None)])
    (stub,) = load(tmp_path / "file", ["threading.Timer"])
    assert type(stub) is Stub
    assert (stub.arguments, stub.state) == ((0.0, None), None)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"w": Evil(bytearray, 10**13)}, "refers to __builtin__.bytearray"),
        ({"w": Evil(torch.FloatTensor, 10**13)}, "refers to torch.FloatTensor"),
        ({"w": tensor_of(10**12, (10**12,), (1,))}, "damaged, or no file of torch.save"),
        ({"w": tensor_of(4, (10**12,), (1,))}, "damaged, or no file of torch.save"),
        ({"w": tensor_of(4, (4,), (-1,))}, "damaged, or no file of torch.save"),
    ],
)
def test_a_small_file_cannot_ask_for_much_memory(tmp_path: Path, content: Any, sentence: str) -> None:
    forge(tmp_path / "file", content)
    with pytest.raises(CheckpointError, match=f"file: {sentence}"):
        load(tmp_path / "file")


def test_a_tensor_that_repeats_itself_is_refused(copy: Callable[[str], Path]) -> None:
    directory = copy("stage1-bf16")
    huge = torch.zeros(1).expand(2**40)
    rewrite(directory / MAIN, lambda content: content["module"].update(scale=huge))
    with pytest.raises(CheckpointError, match=f"{MAIN}: tensor .model/scale.: has more bytes than the file"):
        DeepSpeedSource(directory)
    shutil.copy(FOLDER / "stage1-bf16" / TAG / MAIN, directory / MAIN)

    def repeat(content: dict[str, Any]) -> None:
        masters = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        masters[0] = torch.zeros(1).expand(masters[0].numel())

    rewrite(directory / SECOND, repeat)
    with pytest.raises(CheckpointError, match=r"model/embedding.weight and the rest"):
        DeepSpeedSource(directory)


def test_files_that_torch_save_does_not_write_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    forge(path, {"a": 1}, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="expected one pickle and no compression"):
        load(path)
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"no file of torch.save"):
        load(path)
    torch.save({"a": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"no file of torch.save"):
        load(path)
    with pytest.raises(CheckpointError, match="missing, or not a regular file"):
        load(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="missing, or not a regular file"):
        load(tmp_path / "pipe")


def test_only_what_json_can_hold_becomes_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_files, "MAX_NODES", 1000)
    kept = {"a": 1, "b": [1.5, None, "x", True], "c": {"d": {}}}
    circle: list[Any] = []
    circle.append(circle)
    bomb: list[Any] = []
    for _ in range(40):
        bomb = [bomb, bomb]
    dropped = {"e": {1: 2}, "f": float("nan"), "g": 10**5000, "h": Stub(1), "i": torch.ones(1), "j": circle, "k": b""}
    assert json_entries({**kept, **dropped, 3: 4}) == kept
    assert json_entries({"t": (1, 2), "z": torch.tensor(2.5), "bomb": bomb}) == {"t": [1, 2], "z": 2.5}
    assert json_entries({"long": [0] * 1000}) == {}
    assert json_entries({"long": [0] * 998}) == {"long": [0] * 998}
