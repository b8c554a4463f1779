"""Something on its way, and how to wait for it."""

from __future__ import annotations

from collections.abc import Callable


class Work:
    """A collective on its way. `wait` may be called any number of times; the first one finishes the work."""

    def __init__(self, finish: Callable[[], None] | None = None, advance: Callable[[], bool] | None = None) -> None:
        self._finish, self._advance = finish, advance

    @property
    def done(self) -> bool:
        return self._finish is None

    def wait(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def start_next_hop(self) -> bool:
        """Wait for the first hop and begin the second; false if there is none that has not begun."""
        return self._finish is not None and self._advance is not None and self._advance()

    def then(self, more: Callable[[], None]) -> Work:
        """This collective, followed by `more` in the same wait."""

        def both() -> None:
            self.wait()
            more()

        return Work(both, self.start_next_hop)

    def then_start(self, start: Callable[[], Work]) -> Work:
        """This collective as the first hop, and what `start` begins as the second."""
        second: list[Work] = []

        def advance() -> bool:
            if second:
                return False
            self.wait()
            second.append(start())
            return True

        def finish() -> None:
            advance()
            second[0].wait()

        return Work(finish, advance)
