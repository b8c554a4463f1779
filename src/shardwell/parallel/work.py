"""A handle for an asynchronous collective."""

from __future__ import annotations

from collections.abc import Callable


class Work:
    """A collective in flight. `wait` may be called any number of times; the first call finishes the work."""

    def __init__(self, finish: Callable[[], None] | None = None, advance: Callable[[], bool] | None = None) -> None:
        self._finish, self._advance = finish, advance

    @property
    def done(self) -> bool:
        """Whether `wait` has been called, or nothing was in flight."""
        return self._finish is None

    def wait(self) -> None:
        """Wait for the collective, in the way that its backend needs: on the host or on the current stream."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def start_next_hop(self) -> bool:
        """Wait for the first hop and start the second; return false if there is no second hop that has not started."""
        return self._finish is not None and self._advance is not None and self._advance()

    def then(self, more: Callable[[], None]) -> Work:
        """Return a work whose `wait` waits for this collective and then calls `more`."""

        def both() -> None:
            self.wait()
            more()

        return Work(both, self.start_next_hop)

    def then_start(self, start: Callable[[], Work]) -> Work:
        """Return a work of two hops: this collective is the first, and `start` starts the second."""
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
