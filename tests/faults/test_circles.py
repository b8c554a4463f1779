"""Ranks that wait for each other in a circle are found by what their heartbeats say; ranks that may go on are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardwell.errors import DivergenceError
from shardwell.parallel import circles
from shardwell.parallel.heartbeat import Heartbeat
from shardwell.parallel.waits import Need, Wait

FIRST, SECOND = "1 first", "1 second"  # the agreements of ranks 0 and 1, and of ranks 2 and 3
MESSAGES = {1: "1 3 sends 1 B", 2: "1 0 sends 2 F"}


def mixed() -> dict[int, Heartbeat]:
    """Rank 0 waits at a deviation for rank 1, that for a message of rank 3, that in a collective for 2, that for 0."""
    needs = {
        0: Need([1], f"{FIRST} at turn", 1, "in 'GATHER a' for"),
        1: Need([3], MESSAGES[1], 2, "in 0B0 for a message of"),
        2: Need([0], MESSAGES[2], 3, "in 1F2 for a message of"),
        3: Need([2], SECOND, 7, "in 'GATHER b' for"),
    }
    positions: dict[int, dict[str, float]] = {
        0: {FIRST: 5, f"{FIRST} at turn": 1, MESSAGES[2]: 2},
        1: {FIRST: 5},
        2: {SECOND: 6},
        3: {SECOND: 7, MESSAGES[1]: 1},
    }
    return {
        rank: Heartbeat(0, "", 0.0, None, beat=10, wait=Wait([need], "GATHER c" if rank == 0 else "", 100 + rank),
                        positions=positions[rank])
        for rank, need in needs.items()
    }  # fmt: skip


class Quiet:
    """The parts of an agreement that a look asks."""

    def __init__(self, signs: dict[int, Heartbeat], rank: int) -> None:
        self.signs, self.rank, self.size, self.time_limit = signs, rank, len(signs), 0.0
        self.whole = self.failures = self.tokens = self.waits = self
        self.current, self.last = signs[rank].wait, ""
        self.num_asked, self.looker = 0, rank

    def sign_of(self, rank: int) -> Heartbeat:
        self.num_asked += 1
        return self.signs[rank]

    def is_first(self, what: str) -> bool:
        return self.looker == self.rank

    def check(self) -> None:
        pass

    def fail(self, error: Exception) -> Exception:
        return error

    def way_out(self, ours: str, theirs: str) -> str:
        return ""


def look_twice(first: dict[int, Heartbeat], second: dict[int, Heartbeat], rank: int) -> str:
    """Return what a rank raises that looks at these heartbeats and then at those; an empty string if nothing."""
    agreement: Any = Quiet(first, rank)
    watch = circles.CircleWatch(agreement)
    watch.look()
    agreement.signs, watch._next = second, 0.0
    try:
        watch.look()
    except DivergenceError as error:
        return str(error)
    return ""


def changed(signs: dict[int, Heartbeat], rank: int = 0, beats: int = 0, **changes: Any) -> dict[int, Heartbeat]:
    """Return the heartbeats so many beats later, with changes of one rank."""
    later = {one: Heartbeat(**{**vars(sign), "beat": sign.beat + beats}) for one, sign in signs.items()}
    later[rank] = Heartbeat(**{**vars(later[rank]), **changes})
    return later


@pytest.mark.parametrize("rank", range(4))
def test_a_circle_over_collectives_and_messages_is_told_alike_by_whichever_rank_looks(rank: int) -> None:
    assert look_twice(mixed(), changed(mixed(), beats=2), rank).strip() == (
        "ranks diverge: they wait for each other. Rank 0 waits in 'GATHER a' for rank 1, which waits in 0B0 for a "
        "message of rank 3, which waits in 'GATHER b' for rank 2, which waits in 1F2 for a message of rank 0. Rank 0 "
        "leaves the order of the steps so far, which leads to 'GATHER c'."
    )


@pytest.mark.parametrize(
    ("what", "later"),
    [
        ("a rank is in user code", lambda: changed(mixed(), 2, 2, wait=None)),
        ("a rank waits anew", lambda: changed(mixed(), 2, 2, wait=Wait(mixed()[2].wait.needs, "", 999))),  # type: ignore[union-attr]
        ("a rank sent no heartbeat since then", lambda: changed(changed(mixed(), beats=2), 2, beat=10)),
        ("the next heartbeat may be older than the look", lambda: changed(mixed(), beats=1)),
        ("data is on the way", lambda: changed(mixed(), 0, 2, positions={**mixed()[0].positions, MESSAGES[2]: 3})),
    ],
)
def test_ranks_that_may_go_on_are_waited_for(what: str, later: Callable[[], dict[int, Heartbeat]]) -> None:
    for rank in range(4):
        assert look_twice(mixed(), later(), rank) == "", what


def test_a_rank_that_waits_for_a_circle_and_for_a_slow_rank_waits() -> None:
    signs = mixed()
    signs[4] = Heartbeat(0, "", 0.0, beat=10)
    signs[5] = Heartbeat(0, "", 0.0, beat=10, wait=Wait([Need([0, 4], "1 ", 3, "for")], "", 105))
    assert look_twice(signs, changed(signs, beats=2), 5) == ""
    assert "they wait for each other" in look_twice(signs, changed(signs, beats=2), 0)


def many() -> dict[int, Heartbeat]:
    """1,024 ranks in two groups: rank 0 waits for a message of 512, that for one of 1, all others for these two."""
    messages = {0: ("1 512 sends", 512), 512: ("1 1 sends", 1)}
    signs = {}
    for rank in range(1024):
        first = rank // 512 * 512
        key, other = messages.get(rank, (f"1 group {first}", first))
        need = Need([other], key, 2, "in 'GATHER a' for" if key.startswith("1 g") else "in 0F0 for a message of")
        signs[rank] = Heartbeat(0, "", 0.0, None, beat=10, wait=Wait([need], "", 5000 + rank), positions={})
    return signs


def test_among_many_ranks_one_of_those_that_wait_for_the_same_looks() -> None:
    """The others ask nothing, whatever the number of ranks is."""
    words = look_twice(many(), changed(many(), beats=2), 700)
    assert words.startswith(
        "ranks diverge: they wait for each other. Rank 0 waits in 0F0 for a message of rank 512, which"
    )
    assert "waits in 0F0 for a message of rank 1, which waits in 'GATHER a' for rank 0." in words
    other: Any = Quiet(many(), 701)
    other.looker = 700
    circles.CircleWatch(other).look()
    assert other.num_asked == 0


def test_what_a_rank_waits_for_is_read_as_it_was_written() -> None:
    wait = Wait([Need(list(range(0, 4096, 8)), "stage", 3, "for"), Need([5, 7], "", 1.5, "at")], "next")
    said = wait.written(2)
    assert len(str(said)) < 100
    read = Wait.read(said)
    assert (read.number, read.expected) == (wait.number, "next")
    assert [(list(one.ranks), one.key, one.at, one.what) for one in read.needs] == [
        (list(range(0, 4096, 8)), "2 stage", 3, "for"),
        ([5, 7], "2 ", 1.5, "at"),
    ]
