"""The agreement of some ranks of a job: those of a pipeline stage, or of one line of the tensor axis.

They agree on the order of their own collectives, which other ranks do not issue. A failure is one of the whole job: it
is told under the keys of the agreement of all ranks, and heartbeats are those of all ranks.
"""

from __future__ import annotations

import weakref
from typing import Any

from shardwell.errors import ShardwellError
from shardwell.parallel.agreement import Agreement
from shardwell.parallel.heartbeat import Heartbeat
from shardwell.parallel.mesh import RankGroup
from shardwell.parallel.rank_store import RankStore

_OF_ALL = ("failure", "end/", "after/", "pulse/")  # keys of the agreement of all ranks


class GroupStore:
    """A view of the store of the whole job: keys get a prefix, except those about the ranks themselves."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def _key(self, key: str) -> str:
        return key if key.startswith(_OF_ALL) else f"{self._prefix}/{key}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> Any:
        return self._store.get(self._key(key))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check([self._key(key) for key in keys]))

    def add(self, key: str, number: int) -> int:
        return int(self._store.add(self._key(key), number))

    def compare_set(self, key: str, expected: str, value: str) -> Any:
        return self._store.compare_set(self._key(key), expected, value)


class GroupAgreement(Agreement):
    """The table of expected tokens of some ranks of a job. Failures are those of the whole job."""

    def __init__(self, mesh: RankGroup, whole: Agreement, name: str) -> None:
        """Open the table. `name` is the same on the ranks of the group, and on no other rank: axis, grid, line."""
        self._whole, self._name = whole, name
        super().__init__(mesh, whole.time_limit)
        self.failures, self.waits = whole.failures, whole.waits
        self.waits.groups.append(weakref.ref(self))
        self.probe = lambda: whole.probe()
        self.advise = lambda ours, theirs: whole.way_out(ours, theirs)

    @property
    def name(self) -> str:
        return self._name

    @property
    def whole(self) -> Agreement:
        """Return the agreement of all ranks of the job."""
        return self._whole

    def _open_store(self) -> None:
        self.store = GroupStore(self._whole.store, self._name)
        self._board = RankStore(self.store, self._whole.failures.without_store)
        self._pulse = self._whole._pulse

    def diagnose(self, error: Exception) -> ShardwellError:
        """Return the cause of a broken collective, by the collectives of all ranks."""
        return self._whole.diagnose(error)

    def check_exits(self, needed: int | None = None) -> None:
        """Raise if a rank of the job has ended before what all ranks do."""
        self._whole.check_exits()

    def is_left_by(self, sign: Heartbeat) -> bool:
        """Return whether a rank went on: heartbeats count the collectives of all ranks."""
        return self._whole.is_left_by(sign)

    def behind(self) -> dict[int, Heartbeat]:
        """Return the ranks of this group that are behind with what all ranks do, with their heartbeats."""
        if not self.is_first(f"behind/{self.tokens.num_announced}"):
            return {}
        return {rank: sign for rank, sign in self._whole.signs_behind().items() if rank in self.ranks}
