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


def shift(folder: Path, draw: random.Random) -> str:
    """Bytes are missing or there twice, and the size is right: what two writers of one file leave, or a bad resume."""
    path = draw.choice(data_of(folder))
    content = path.read_bytes()
    at, by = draw.randrange(len(content)), draw.choice([1, 2, 4, 8, 256, PAGE])
    moved = content[:at] + (content[at + by :] + bytes(by) if draw.random() < 0.5 else bytes(by) + content[at:])
    path.write_bytes(moved[: len(content)].ljust(len(content), b"\0"))
    return f"bytes from {at} of {path.name} shifted by {by}"


def empty_end(folder: Path, draw: random.Random) -> str:
    """A file whose size was written and whose bytes were not, as after a loss of power."""
    path = draw.choice(files_of(folder))
    size = path.stat().st_size
    os.truncate(path, keep := draw.randrange(size))
    os.truncate(path, size)
    return f"{path.name} is a hole from byte {keep}"


def copy_in_part(folder: Path, draw: random.Random) -> str:
    """A copy that still goes on: some files are whole, some have rsync's names, some are of a later checkpoint."""
    done, paths = [], files_of(folder)
    for path in draw.sample(paths, draw.randrange(1, len(paths) + 1)):
        other = folder.parent.parent / "other" / folder.name / path.name
        kind = draw.choice(["hidden", "cut", "other", "away"])
        if kind == "hidden":
            path.rename(path.with_name(f".{path.name}.Ab3xYz"))
        elif kind == "cut":
            os.truncate(path, draw.randrange(path.stat().st_size))
        elif kind == "other" and other.exists() and path.name != "manifest.json":
            shutil.copyfile(other, path)
        else:
            path.unlink()
        done.append(f"{path.name} {kind}")
    return "copied in part: " + ", ".join(done)


def manifest_of_another(folder: Path, draw: random.Random) -> str:
    """The manifest of the checkpoint beside this one, alone or with some of its files; never with all of them."""
    other = folder.parent.parent / "other" / folder.name
    if not other.exists():
        return flip_in_manifest(folder, draw)
    names = [path.name for path in data_of(folder)]
    taken = draw.sample(names, draw.randrange(len(names)))
    for name in ["manifest.json", *taken]:
        shutil.copyfile(other / name, folder / name)
    return f"manifest.json, {', '.join(taken)} are those of another checkpoint"


def link_together(folder: Path, draw: random.Random) -> str:
    """Two names for one file, as tools that look for equal files make them."""
    paths = data_of(folder)
    if len(paths) < 2:
        return flip_in_data(folder, draw)
    one, other = draw.sample(paths, 2)
    one.unlink()
    os.link(other, one)
    return f"{one.name} is a hard link to {other.name}"


def write_twice(folder: Path, draw: random.Random) -> str:
    """A key of the manifest is there twice; a reader that takes the last one takes the wrong one."""
    path = folder / "manifest.json"
    text = path.read_text()
    key = draw.choice(["tensors", "files", "values", "version", "checksum"])
    path.write_text(f'{text.rstrip()[:-1]},"{key}":{json.dumps(draw.choice(WRONG))}}}')
    return f"{key} is written twice"


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
    "shifted bytes": (shift, 2),
    "a hole at the end": (empty_end, 1),
    "half a copy": (copy_in_part, 2),
    "the manifest of another checkpoint": (manifest_of_another, 2),
    "one file by two names": (link_together, 1),
    "a key that is there twice": (write_twice, 1),
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
