"""The device that a user names: `cuda` alone is this rank's GPU, and what is no device is refused in a sentence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwell
from shardwell.errors import ShardwellError
from shardwell.memory.local_gpus import default_device


@pytest.mark.parametrize(("local_rank", "index"), [(0, 0), (3, 3), (5, 1)])
def test_cuda_without_an_index_is_the_gpu_of_this_rank(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, index: int
) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("SHARDWELL_DEVICE", "cuda")
    assert default_device() == torch.device("cuda", index)
    assert current == [index]


def test_what_is_no_device_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShardwellError, match=r"initialize\(device=...\): 'gpu' is no device; expected cpu, cuda or"):
        shardwell.initialize(model=nn.Linear(2, 2), config={}, device="gpu")
    monkeypatch.setenv("SHARDWELL_DEVICE", "tpu9")
    with pytest.raises(ShardwellError, match="SHARDWELL_DEVICE: 'tpu9' is no device"):
        default_device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SHARDWELL_DEVICE", "cuda")
    with pytest.raises(ShardwellError, match="finds no CUDA device here"):
        default_device()
