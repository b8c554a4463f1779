"""A read of a file whose bytes are checked in blocks, as backends take it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FileRead:
    """`before` bytes of a file from `offset` on, then those for `data`, then `after` bytes: all of them are checked.

    The first checksum goes on from `value`, that of earlier bytes of the block.
    """

    file: int  # its descriptor
    offset: int
    data: memoryview  # gets the bytes in the middle
    block: int  # bytes; the last block may be shorter
    before: int = 0
    after: int = 0
    value: int = 0

    @property
    def num_bytes(self) -> int:
        return self.before + len(self.data) + self.after

    @property
    def num_blocks(self) -> int:
        return -(-self.num_bytes // self.block)
