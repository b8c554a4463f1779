"""Where lines of progress go: a bar under them on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_REDRAW = 0.2  # seconds between two pictures of the bar; no thread draws it


class Display:
    """Prints lines; on a terminal a bar stays below them, and below what the script prints."""

    def __init__(self, *, with_bar: bool) -> None:
        self.wants_bar = with_bar and is_terminal()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._drawn = 0.0
        self._last: tuple[int, int | None] = (0, None)

    def line(self, text: str) -> None:
        """Print text."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def tick(self, step: int, total: int | None) -> None:
        """Show that a step has ended, on a display that wants a bar; it is drawn a few times a second at most."""
        now, self._last = time.perf_counter(), (step, total)
        if now - self._drawn < _REDRAW and step != total:
            return
        self._drawn = now
        if self._bar is None:
            self._start()
        self._draw()
        if step == total:
            self.close()

    def _draw(self) -> None:
        assert self._bar is not None
        assert self._task is not None
        self._bar.update(self._task, completed=self._last[0], total=self._last[1], refresh=True)

    def _start(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, auto_refresh=False)
        self._bar.start()
        self._task = self._bar.add_task("", total=None)

    def close(self) -> None:
        """Leave the bar as it is, and give the terminal back."""
        if self._bar is not None:
            self._draw()
            bar, self._bar = self._bar, None
            self.wants_bar = False
            bar.stop()


def is_terminal() -> bool:
    """Return whether a person looks at standard output as it is written."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
