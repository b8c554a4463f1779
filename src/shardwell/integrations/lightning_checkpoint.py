"""Checkpoints of Lightning strategies: what is saved beside the shards, and one Lightning file from a folder.

A strategy saves a folder of shardwell's own format. What Lightning adds (loops, callbacks, hyperparameters) is its
client state. `python -m shardwell.integrations.lightning_checkpoint FOLDER FILE` writes the single file that
`LightningModule.load_from_checkpoint` reads. No part of this imports Lightning.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from shardwell.checkpoint.sources import MODEL, Source, open_source
from shardwell.checkpoint.sources.reading import weights
from shardwell.errors import CheckpointError, ShardwellError
from shardwell.json_values import decode, encode

TAG = "checkpoint"  # of the one checkpoint in each folder that a strategy saves
_STATES = ("state_dict", "optimizer_states")  # the engine saves these as shards
_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


class StateOnRead(dict[str, Any]):
    """The full state of a model, which is all-gathered when it is first read.

    Lightning makes the state of the model a part of every checkpoint dictionary, and strategies that save shards drop
    it. Code that does read it, such as a callback, pays for it, on all ranks.
    """

    def __init__(self, gather: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__()
        self._gather: Callable[[], Mapping[str, Any]] | None = gather
        self.is_changed = False

    def _fill(self) -> None:
        if self._gather is not None:
            gather, self._gather = self._gather, None
            super().update(gather())

    def __getitem__(self, key: str) -> Any:
        self._fill()
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        self._fill()
        return super().__iter__()

    def __len__(self) -> int:
        self._fill()
        return super().__len__()

    def __contains__(self, key: object) -> bool:
        self._fill()
        return super().__contains__(key)

    def keys(self) -> Any:
        self._fill()
        return super().keys()

    def values(self) -> Any:
        self._fill()
        return super().values()

    def items(self) -> Any:
        self._fill()
        return super().items()

    def get(self, key: str, default: Any = None) -> Any:
        self._fill()
        return super().get(key, default)

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __eq__(self, other: object) -> bool:
        self._fill()
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __repr__(self) -> str:
        return "StateOnRead(not read yet)" if self._gather is not None else super().__repr__()

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in self.items()}

    def _change(self) -> None:
        self._fill()
        self.is_changed = True

    def __setitem__(self, key: str, value: Any) -> None:
        self._change()
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._change()
        super().__delitem__(key)

    def pop(self, *args: Any) -> Any:
        self._change()
        return super().pop(*args)

    def popitem(self) -> tuple[str, Any]:
        self._change()
        return super().popitem()

    def clear(self) -> None:
        self._change()
        super().clear()

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._change()
        super().update(*args, **kwargs)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._change()
        return super().setdefault(key, default)

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self


def client_state_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Lightning saves besides the states of the model and its optimizer, as values that JSON can hold.

    Hyperparameters that it cannot hold are left out with a warning; `load_from_checkpoint` takes them as arguments.
    """
    state = checkpoint.get("state_dict")
    if not isinstance(state, StateOnRead) or state.is_changed:
        raise ShardwellError(
            "checkpoint['state_dict'] was changed by an on_save_checkpoint hook, and the engine saves its own shards. "
            "Leave frozen weights out with ShardwellStrategy(exclude_frozen_parameters=True), save other tensors under "
            "keys of their own, or rename them in the exported file."
        )
    found = {key: value for key, value in checkpoint.items() if key not in _STATES}
    for key in _HYPERPARAMETERS:
        if isinstance(found.get(key), Mapping):
            found[key] = _that_can_be_saved(found[key], key)
    return found


def _that_can_be_saved(values: Mapping[Any, Any], where: str) -> dict[Any, Any]:
    kept = {}
    for key, value in values.items():
        try:
            encode(value, f"{where}[{key!r}]", lambda tensor: "a tensor")
        except CheckpointError as error:
            warnings.warn(f"left out of the checkpoint: {error}", stacklevel=2)
        else:
            kept[key] = value
    return kept


def read_checkpoint(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a folder that a strategy saved as Lightning's checkpoint dictionary, with full tensors in host memory.

    It has the weights (the fp32 masters, where there are some) and everything that Lightning saved, but no optimizer
    state. Nothing is unpickled.
    """
    source = open_source(folder)
    try:
        values = source.values.get("client", {})
        client = decode(values, f"{source.where}: values.client", lambda name: _whole(source, name))
        found = {} if not isinstance(client, dict) else client
        if "pytorch-lightning_version" not in found:
            raise CheckpointError(
                f"{source.where}: was not saved by a Lightning Trainer; `shardwell checkpoint export` writes its "
                "weights as safetensors"
            )
        state = {name.removeprefix(MODEL): _whole(source, name) for name in weights(source)}
        for alias, name in (source.values.get("aliases") or {}).items():
            if name in state:
                state.setdefault(alias, state[name])
        return {**found, "state_dict": state}
    finally:
        source.close()


def _whole(source: Source, name: str) -> torch.Tensor:
    if name not in source.tensors:
        raise CheckpointError(f"{source.where}: tensor {name!r}: named by a value, but not there")
    stored = source.tensors[name]
    return source.read(name, 0, stored.numel).as_strided(stored.shape, stored.order).contiguous()


def convert_checkpoint(folder: str | os.PathLike[str], file: str | os.PathLike[str]) -> Path:
    """Write the single file that `LightningModule.load_from_checkpoint` and `Trainer.test(ckpt_path=...)` read.

    It is Lightning's own format, a file of `torch.save`, with tensors and plain values only (`weights_only=True`).
    """
    target = Path(file)
    if target.exists():
        raise CheckpointError(f"{file}: exists; move it, or write to another place")
    checkpoint = read_checkpoint(folder)
    partial = target.with_name(f".{target.name}.partial")
    try:
        torch.save(checkpoint, partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def main() -> None:
    """Convert a folder to a file, as the command line asks."""
    parser = argparse.ArgumentParser(description="Write one Lightning file from a folder that a strategy saved.")
    parser.add_argument("folder", help="what ModelCheckpoint or trainer.save_checkpoint wrote")
    parser.add_argument("file", help="the .ckpt file to write; it must not exist")
    given = parser.parse_args()
    print(f"written: {convert_checkpoint(given.folder, given.file)}")


if __name__ == "__main__":
    main()
