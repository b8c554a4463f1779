"""What ranks ask of their store, by the number of ranks: a real store, and simulated ranks.

    python -m benchmarks.store [--ranks 64,1024,16384] [--collectives 300] [--json PATH]

Each simulated rank runs the engine's own agreement (`parallel/agreement.py`) and save protocol (`checkpoint/save.py`)
over one connection to a real TCPStore, one rank after the other. A rank that would wait is left and asks once more when
all have come. What is counted is exact: questions to the store, by event. The seconds are those of the whole store for
all ranks, over this one connection; collectives that carry an answer instead of the store are not in them.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.measure import circumstances, command_line, keep, told
from shardwell.checkpoint.save import Saver
from shardwell.errors import ShardwellError
from shardwell.parallel.agreement import Agreement, TokenTable
from shardwell.parallel.collectives import MANY_RANKS


class ParkedError(Exception):
    """A rank would wait here."""


class CountingStore:
    """A store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self._store, self.asked = store, 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def ask(*args: Any) -> Any:
            self.asked += 1
            return call(*args)

        return ask


@contextlib.contextmanager
def simulated(store: CountingStore) -> Iterator[None]:
    """Give agreements this store; a rank that would wait raises instead, and no thread writes heartbeats."""

    quiet = SimpleNamespace(of=lambda rank: None, lost=list)

    def park(_: Any) -> None:
        raise ParkedError

    with (
        patch("torch.distributed.distributed_c10d._get_default_store", lambda: store),
        patch("torch.distributed.distributed_c10d.PrefixStore", lambda prefix, store: store),
        patch("shardwell.parallel.rank_store.Pause.__call__", park),
        patch("shardwell.parallel.agreement.timeout", lambda: 600.0),
        patch("shardwell.parallel.agreement.Heartbeats", lambda *args: quiet),
    ):
        yield


def agreements(size: int) -> list[Agreement]:
    """Return the agreement of each rank of a job."""
    made = []
    for rank in range(size):
        mesh: Any = SimpleNamespace(rank=rank, size=size, ranks=range(size), backend="gloo", is_simulated=False)
        mesh.global_rank = lambda rank: rank
        made.append(Agreement(mesh))
        if size >= MANY_RANKS:
            made[-1].compare = lambda token: True  # an all-reduce, which asks the store nothing
    return made


def each(ranks: list[Agreement], call: Callable[[Agreement], object]) -> None:
    """Let each rank do something; one that waits looks once more when all have come."""
    for rank in ranks:
        with contextlib.suppress(ParkedError, ShardwellError):
            call(rank)
            continue
        rank.is_waiting = False
        rank.store.check(["all"])


def saved(ranks: list[Agreement]) -> None:
    """Let each rank report to a save, and rank 0 last."""
    savers = [Saver(rank.rank, len(ranks), rank.store, None, None) for rank in ranks]  # type: ignore[arg-type]
    job: Any = SimpleNamespace(number=2, tag="step2", look=lambda: 600.0)
    for saver in reversed(savers):
        saver._clear_previous(job)
        with contextlib.suppress(ParkedError):
            saver.report(job, "")
    with contextlib.suppress(ParkedError):
        savers[0].publish(job, "ok")
    for saver in savers[1:]:
        saver.wait_for_result(job)


def events(size: int, collectives: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield what happens to a job, in order."""
    ranks: list[Agreement] = []
    tokens = [f"GATHER blocks.{number}" for number in range(collectives)]

    def step(ranks: list[Agreement]) -> None:
        for rank in ranks:
            rank.tokens.begin_step()
            for token in tokens:
                if not rank.tokens.follow(token):
                    rank.announce(token)

    def start() -> None:
        ranks.extend(agreements(size))
        each(ranks, lambda rank: rank.meet("MESH"))
        for rank in ranks:
            rank.tokens = TokenTable()  # a rank that was left has not entered its token
            rank.tokens.generation = 1

    def deviate() -> None:
        for rank in ranks:
            rank.tokens.begin_step()
        each(ranks, lambda rank: rank.announce("GATHER blocks.7 (another way)"))

    def fail() -> None:
        ranks[0].fail(ShardwellError("no memory"))
        each(ranks[1:], lambda rank: rank.failures.check())

    def restart() -> None:
        opened: set[Agreement] = set()

        def meet(rank: Agreement) -> None:
            rank.meet_after_failure("step 3", is_updating=False)
            opened.add(rank)

        each(ranks, meet)
        for rank in ranks:
            if rank not in opened:  # it was left while it waited for the others
                rank.open()

    yield "initialize", start
    yield "first step", lambda: step(ranks)
    yield "steady step", lambda: step(ranks)
    yield "deviation", deviate
    yield "save", lambda: saved(ranks)
    yield "failure", fail
    yield "restart", restart


def measure(size: int, collectives: int) -> dict[str, dict[str, float]]:
    """Return the questions of each rank and the seconds of all of them, by event."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store, found = CountingStore(server), {}
    with simulated(store):
        for name, happen in events(size, collectives):
            before, begin = store.asked, time.perf_counter()
            happen()
            found[name] = {"per_rank": (store.asked - before) / size, "seconds": time.perf_counter() - begin}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and keep the raw figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,256,1024,4096,16384", help="numbers of ranks, with commas")
    parser.add_argument("--collectives", type=int, default=300, help="collectives of a step")
    parser.add_argument("--json", help="where the raw figures go; '-': nowhere")
    args = parser.parse_args(argv)
    sizes = [int(size) for size in args.ranks.split(",")]
    found = {size: measure(size, args.collectives) for size in sizes}
    table = Table(title="questions to the store for each rank (seconds for all of them)", title_justify="left")
    table.add_column("event")
    for size in sizes:
        table.add_column(f"{size:,} ranks", justify="right")
    for event in found[sizes[0]]:
        cells = (found[size][event] for size in sizes)
        table.add_row(event, *(f"{cell['per_rank']:.2f} ({cell['seconds']:.2f})" for cell in cells))
    report = {**circumstances(command_line("store", argv), "cpu"), "found": {str(n): one for n, one in found.items()}}
    console = Console()
    console.print(table)
    console.print(told(report))
    if (path := keep(report, "store", args.json)) is not None:
        console.print(f"raw results: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
