"""The same small work on each of many files, several at a time: each of them waits for the file system.

One rank looks at the files of all ranks while the others wait for it. On storage behind a network each look takes the
time of a message, and there are as many as ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

FEW = 64  # files, up to which threads would cost more than they save
THREADS = 8
WAVE = 1024  # files between two times at which all threads have ended: what they return is in memory together

Item = TypeVar("Item")
Found = TypeVar("Found")


def each(work: Callable[[Item], Found], items: Sequence[Item]) -> Iterator[Found]:
    """Yield what `work` returns for each item, in order, or raise what it raises for the first that fails.

    It may be called for later items before that. If the system has no threads left, this one does the work alone.
    """
    if len(items) <= FEW:
        yield from map(work, items)
        return
    for start in range(0, len(items), WAVE):
        yield from _at_once(work, items[start : start + WAVE])


def _at_once(work: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    found: dict[int, Found] = {}
    errors: dict[int, Exception] = {}
    rest = iter(range(len(items)))  # each thread takes the next one

    def run() -> None:
        for place in rest:
            try:
                found[place] = work(items[place])
            except Exception as error:
                errors[place] = error

    threads: list[threading.Thread] = []
    for number in range(THREADS - 1):
        thread = threading.Thread(target=run, name=f"shardwell files {number}")
        try:
            thread.start()
        except RuntimeError:
            break
        threads.append(thread)
    run()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [found[place] for place in range(len(items))]
