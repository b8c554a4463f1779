"""An optimizer update of a unit that is in flight, or that failed."""

from __future__ import annotations

from typing import Protocol

from shardwell.errors import ShardwellError


class PendingUpdate(Protocol):
    """An optimizer update that is in flight."""

    @property
    def is_done(self) -> bool:
        """Whether the host has done its part."""

    def wait_local(self) -> None:
        """Wait for the update without any collective, as one rank can alone."""

    def wait(self) -> None:
        """Wait for the update, and run the collectives that follow it on all ranks."""


class FailedUpdate:
    """A change of a unit's values that failed: every later use of the unit raises an error."""

    is_done = True

    def __init__(self, what: str, error: Exception) -> None:
        self._words = (
            f"{what} failed, so that parameters and optimizer state may be updated in part: {error}. This engine "
            "cannot be used any more: start again, from the latest checkpoint."
        )

    def wait_local(self) -> None:
        """Raise the error."""
        raise ShardwellError(self._words)

    def wait(self) -> None:
        """Raise the error."""
        raise ShardwellError(self._words)
