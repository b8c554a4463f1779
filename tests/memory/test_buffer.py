"""Flat buffers in pinned memory."""

from __future__ import annotations

import pytest
import torch

from shardwell.memory import Device, FlatBuffer, MemoryStats, StateKind, Tier


class Runtime:
    """CUDA's registration of pinned memory, which refuses an address twice."""

    def __init__(self) -> None:
        self.registered: set[int] = set()

    def cudaHostRegister(self, address: int, _size: int, _flags: int) -> int:  # noqa: N802
        assert address not in self.registered, "already mapped"
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self.registered.remove(address)


def test_a_freed_buffer_is_no_longer_pinned_although_its_storage_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, device = Runtime(), Device(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: None)
    monkeypatch.setattr(device, "has_streams", True)
    entry = (StateKind.PARAMETERS, "unit", Tier.HOST)
    first, second = (FlatBuffer(device, MemoryStats(), entry, 1000, torch.float32, pinned=True) for _ in range(2))
    assert len(runtime.registered) == 2
    view = first.tensor[:10]
    first.free()
    assert len(runtime.registered) == 1
    del view, first
    assert len(runtime.registered) == 1
    del second
    assert not runtime.registered
