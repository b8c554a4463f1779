"""What ranks tell each other while they save or load a checkpoint, so that all of them succeed or raise alike."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardwell.checkpoint.user_folder import folder_named
from shardwell.errors import CheckpointError, DivergenceError
from shardwell.parallel import Collectives, MeshRoles, TrafficKind

_ERROR, _TEXT, _NONE = "error ", "text ", "none"


class CheckpointRanks:
    """The ranks of one engine, all of which save and load together."""

    def __init__(self, roles: MeshRoles) -> None:
        self._all, self._agreement = roles.all, roles.agreement

    @contextlib.contextmanager
    def together(self, name: str, given: Any) -> Iterator[None]:
        """Return a context that all ranks must enter: a rank that comes alone gets an error instead of a hang.

        Ranks exchange errors of the checkpoint, and the engine can go on. The name contains no tag: names that ranks
        announce are kept in the store, and a name that never repeats would make all that follow it new.
        """
        with self._agreement.failing_together(name, common=(CheckpointError,)):
            try:
                self._all.barrier(name)
            except DivergenceError as error:
                words = f"All ranks must call {name}, with the same tag: this one has called {name}({given!r})."
                raise DivergenceError(f"{error} {words}") from None
            yield

    def check_same(self, given: Any, what: str) -> None:
        """Raise on all ranks if one of them has another value than rank 0."""
        first = _share(self._all, repr(given))
        problem = None
        if first != repr(given):
            problem = CheckpointError(f"{what}: rank 0 has {first}, and rank {self._all.rank_group.rank} has {given!r}")
        self.agree(problem)

    def folder_named_by(self, given: Any, argument: str) -> str:
        """Return the folder that the user named on rank 0. All ranks raise if it is invalid on one of them."""
        root, problem = "", None
        try:
            root = folder_named(given, argument)
        except CheckpointError as error:
            problem = error
        self.agree(problem)
        first = os.fsdecode(bytes.fromhex(_share(self._all, os.fsencode(root).hex())))
        if os.path.abspath(first) != os.path.abspath(root):
            words = f"{argument}={root!r} of rank {self._all.rank_group.rank} is not used: all ranks use that of rank 0"
            logging.getLogger("shardwell").warning("%s, %r", words, first)
        return first

    def from_rank_0(self, ask: Callable[[], str]) -> str:
        text = self.from_rank_0_or_none(ask)
        assert text is not None
        return text

    def from_rank_0_or_none(self, ask: Callable[[], str | None]) -> str | None:
        """Return what `ask` returns on rank 0; if it raises there, all ranks raise the error."""
        words = _NONE
        if self._all.rank_group.rank == 0:
            try:
                text = ask()
                words = _NONE if text is None else _TEXT + text
            except Exception as error:
                words = _ERROR + _words(error)
        words = _share(self._all, words)
        if words.startswith(_ERROR):
            raise CheckpointError(words.removeprefix(_ERROR))
        return None if words == _NONE else words.removeprefix(_TEXT)

    def agree(self, problem: Exception | None) -> None:
        """Raise on every rank if one of them has a problem."""
        everyone = self._all
        first = int(
            everyone.all_reduce_min(everyone.rank_group.size if problem is None else everyone.rank_group.rank, "CHECK")
        )
        if first < everyone.rank_group.size:
            words = _share(everyone, _words(problem) if problem is not None else "", first)
            if isinstance(problem, CheckpointError):
                raise problem
            raise CheckpointError(_words(problem) if problem is not None else f"rank {first}: {words}") from problem


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _share(everyone: Collectives, text: str, source: int = 0) -> str:
    """Broadcast the text of `source` to every rank."""
    device = everyone.device.torch_device
    mine = text.encode(errors="surrogateescape")
    size = torch.tensor([len(mine)], dtype=torch.int64, device=device)
    everyone.broadcast(size, source, TrafficKind.SETUP, "TEXT")
    letters = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if everyone.rank_group.rank == source and mine:
        letters.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    everyone.broadcast(letters, source, TrafficKind.SETUP, "TEXT")
    return bytes(letters.cpu().numpy()).decode(errors="surrogateescape")
