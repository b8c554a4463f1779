"""Something on its way, and how to wait for it."""

from __future__ import annotations

from collections.abc import Callable


class Pending:
    """A collective on its way. `wait` may be called any number of times; the first one finishes the work."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    @property
    def done(self) -> bool:
        return self._finish is None

    def wait(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def then(self, more: Callable[[], None]) -> Pending:
        """This collective, followed by `more` in the same wait."""

        def both() -> None:
            self.wait()
            more()

        return Pending(both)
