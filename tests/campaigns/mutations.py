"""Ways to change files of checkpoints by chance: what disks, copies and people do, and lies with right checksums.

Each takes a directory of a checkpoint and a source of chance, changes something, and says what. All must be refused, or
change no value that is loaded.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

Mutation = Callable[[Path, random.Random], str]
PAGE = 512  # bytes that are lost or misplaced together
WRONG: list[Any] = ["x", "", [], {}, [1], {"a": 1}, -1, 2**70, 1e300, True]
ODD_LATEST = ["gone\n", "../up\n", "", "\0", "latest", "a/b", "\ufffd", "x" * 5000]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "latest")


def data_of(folder: Path) -> list[Path]:
    return [path for path in files_of(folder) if path.name != "manifest.json"]


def flip(path: Path, draw: random.Random, first: int = 0, last: int | None = None) -> str:
    content = bytearray(path.read_bytes())
    at, bit = draw.randrange(first, min(last or len(content), len(content))), draw.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {at} of {path.name} flipped"


def flip_in_data(folder: Path, draw: random.Random) -> str:
    return flip(draw.choice(data_of(folder)), draw)


def flip_in_manifest(folder: Path, draw: random.Random) -> str:
    return flip(folder / "manifest.json", draw)


def flip_in_header(folder: Path, draw: random.Random) -> str:
    path = draw.choice([path for path in data_of(folder) if path.suffix == ".safetensors"])
    return flip(path, draw, 0, 8 + int.from_bytes(path.read_bytes()[:8], "little"))


def flip_many(folder: Path, draw: random.Random) -> str:
    return "; ".join(flip_in_data(folder, draw) for _ in range(draw.randrange(2, 9)))


def truncate(folder: Path, draw: random.Random) -> str:
    path = draw.choice(files_of(folder))
    size = draw.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{path.name} cut to {size} bytes"


def append(folder: Path, draw: random.Random) -> str:
    path = draw.choice(files_of(folder))
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.randrange(1, 100)))
    return f"bytes appended to {path.name}"


def lose_a_page(folder: Path, draw: random.Random) -> str:
    path = draw.choice(data_of(folder))
    content = bytearray(path.read_bytes())
    at = draw.randrange(max(len(content) - PAGE, 1))
    content[at : at + PAGE] = bytes(len(content[at : at + PAGE]))
    path.write_bytes(content)
    return f"bytes from {at} of {path.name} are zero"


def misplace_a_page(folder: Path, draw: random.Random) -> str:
    path = draw.choice(data_of(folder))
    content = bytearray(path.read_bytes())
    one, other = (draw.randrange(max(len(content) - PAGE, 1)) for _ in range(2))
    content[one : one + PAGE] = content[other : other + PAGE]
    path.write_bytes(content)
    return f"bytes from {other} of {path.name} are also at {one}"


def take_from_another(folder: Path, draw: random.Random) -> str:
    """A file of the checkpoint beside this one, which is of the same form and has other numbers."""
    path = draw.choice(data_of(folder))
    other = folder.parent.parent / "other" / folder.name / path.name
    if not other.exists():
        return lose_a_page(folder, draw)
    shutil.copyfile(other, path)
    return f"{path.name} is that of another checkpoint"


def swap_files(folder: Path, draw: random.Random) -> str:
    paths = data_of(folder)
    if len(paths) < 2:
        return flip_in_data(folder, draw)
    one, other = draw.sample(paths, 2)
    content = one.read_bytes()
    shutil.copyfile(other, one)
    other.write_bytes(content)
    return f"{one.name} and {other.name} changed places"


def remove(folder: Path, draw: random.Random) -> str:
    path = draw.choice(files_of(folder))
    path.unlink()
    return f"{path.name} removed"


def replace(folder: Path, draw: random.Random) -> str:
    """By what is no file."""
    path, kind = draw.choice(files_of(folder)), draw.choice(["directory", "pipe", "link", "dangling link", "empty"])
    kept = path.with_name(f"{path.name}.kept")
    path.rename(kept)
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        path.symlink_to(kept.name if kind == "link" else "nowhere")
    return f"{path.name} is {kind}"


def odd_latest(folder: Path, draw: random.Random) -> str:
    content = draw.choice(ODD_LATEST)
    (folder.parent / "latest").write_text(content)
    return f"latest is {content[:20]!r}"


# --- lies -------------------------------------------------------------------------------------------------------


def nodes(content: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all values inside."""
    items: list[tuple[Any, Any]] = []
    if isinstance(content, dict):
        items = list(content.items())
    elif isinstance(content, list):
        items = list(enumerate(content[:50]))
    found = [way] if way else []
    for key, value in items:
        found += nodes(value, (*way, key))
    return found


def lie(folder: Path, draw: random.Random) -> str:
    """One value of the manifest becomes one of another type, and the checksum is made right."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["checksum"]
    part = draw.choice(["tensors", "files", "values", "values"])
    way = draw.choice(nodes(content[part]))
    inside = content[part]
    for key in way[:-1]:
        inside = inside[key]
    before = inside[way[-1]]
    others = [value for value in WRONG if kind_of(value) != kind_of(before)]
    inside[way[-1]] = after = draw.choice(others)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["checksum"] = f"{zlib.crc32(text.encode()):08x}"
    path.write_text(json.dumps(content))
    return f"{part}.{'.'.join(map(str, way))} is {after!r:.30} and was {before!r:.30}"


def kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "flag"
    return "number" if isinstance(value, (int, float)) else type(value).__name__


OWN: dict[str, tuple[Mutation, int]] = {  # and how often each is chosen
    "a bit of the data": (flip_in_data, 8),
    "a bit of a header": (flip_in_header, 2),
    "a bit of the manifest": (flip_in_manifest, 3),
    "several bits": (flip_many, 2),
    "cut": (truncate, 2),
    "longer": (append, 1),
    "a lost page": (lose_a_page, 3),
    "a misplaced page": (misplace_a_page, 3),
    "a file of another checkpoint": (take_from_another, 2),
    "files that changed places": (swap_files, 1),
    "a file less": (remove, 1),
    "no file": (replace, 1),
    "latest": (odd_latest, 1),
    "a lie with a right checksum": (lie, 6),
}
FOREIGN: dict[str, tuple[Mutation, int]] = {  # without checksums, only what the form itself can show
    "cut": (truncate, 4),
    "a file less": (remove, 1),
    "no file": (replace, 1),
}
