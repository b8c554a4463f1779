"""Between a GPU and a drive, through pinned memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwell.memory import Device
from shardwell.offload.disk import DiskTier, aligned
from tests.support.disk_engines import EACH, settings

pytestmark = pytest.mark.gpu


@EACH
def test_what_a_gpu_sent_to_a_drive_comes_back(engine: str, tmp_path: Path) -> None:
    device = Device("cuda")
    values = torch.randn(1_000_003, device="cuda")
    size = values.numel() * values.element_size()
    memory = aligned(size, device)
    assert memory.is_pinned()
    memory.view(torch.float32).copy_(values, non_blocking=True)
    torch.cuda.synchronize()
    with DiskTier([tmp_path], settings(engine)) as tier:
        extent = tier.allocate(size)
        tier.write(extent, 0, memory).wait()
        memory.zero_()
        tier.read(extent, 0, memory).wait()
    assert torch.equal(memory.view(torch.float32).to("cuda", non_blocking=True), values)
