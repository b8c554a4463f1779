"""Checkpointed inputs on the host next to a GPU: their memory is free until backward, and gradients are the same."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwell import ShardwellError, activation_checkpointing
from shardwell.activation_checkpointing import ActivationPolicy
from tests.support.model_parallel import Peers
from tests.support.ranks import Ranks

pytestmark = pytest.mark.gpu

HOST = ActivationPolicy(on_host=True)


def stack(depth: int, width: int) -> nn.ModuleList:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)])


def step(blocks: nn.ModuleList, x: Tensor, policy: ActivationPolicy) -> list[Tensor]:
    torch.manual_seed(1)
    blocks.zero_grad()
    y = x * 1
    for block in blocks:
        y = y + activation_checkpointing._run(policy, block, (y,), {})
    y.square().mean().backward()
    return [parameter.grad.clone() for parameter in blocks.parameters()]


def peak(blocks: nn.ModuleList, x: Tensor, policy: ActivationPolicy) -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(blocks, x, policy)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_inputs_on_the_host_free_the_memory_of_all_but_a_few() -> None:
    depth, rows, width = 24, 16_384, 1024
    blocks, x = stack(depth, width), torch.randn(rows, width, device="cuda")
    for policy in (ActivationPolicy(), HOST):  # whatever the math libraries keep is there before we count
        step(blocks, x, policy)
    here, there = peak(blocks, x, ActivationPolicy()), peak(blocks, x, HOST)
    assert (depth - 4) * x.nbytes <= here - there <= (depth + 1) * x.nbytes, (here / x.nbytes, there / x.nbytes)


def test_gradients_are_the_same_bits() -> None:
    blocks = stack(12, 256)
    for seed in range(10):
        torch.manual_seed(seed)
        x = torch.randn(2000 + 100 * seed, 256, device="cuda")
        for one, other in zip(step(blocks, x, HOST), step(blocks, x, ActivationPolicy()), strict=True):
            assert torch.equal(one, other)


def test_copies_have_a_stream_of_their_own(tmp_path: Path) -> None:
    blocks, x = stack(4, 512), torch.randn(8192, 512, device="cuda")
    step(blocks, x, HOST)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(blocks, x, HOST)
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if "cat" in event]
    kernels = {event["args"]["stream"] for event in events if event["cat"] == "kernel"}
    copies = [event for event in events if event["cat"] == "gpu_memcpy" and event["args"]["bytes"] == x.nbytes]
    to, back = ([event for event in copies if way in event["name"]] for way in ("DtoH", "HtoD"))
    assert len(to) == len(back) == 4
    assert len({event["args"]["stream"] for event in to + back} - kernels) == 1
    assert not kernels & {event["args"]["stream"] for event in to + back}


def test_an_input_that_is_changed_while_it_is_copied_is_an_error() -> None:
    x = torch.randn(1000, device="cuda", requires_grad=True)
    y = x * 1
    out = activation_checkpointing._run(HOST, torch.sin, (y,), {})
    with torch.no_grad():
        y.zero_()
    with pytest.raises(ShardwellError, match="changed in place"):
        out.sum().backward()


def split_on_the_gpu(on_host: bool) -> dict[str, Any]:
    blocks, x = stack(6, 64), torch.randn(999, 64, generator=torch.Generator().manual_seed(3)).cuda()
    expected = step(blocks, x, ActivationPolicy())
    activation_checkpointing.configure(Peers(), partition_activations=True, checkpoint_in_cpu=on_host)
    policy = activation_checkpointing.policy()
    found = step(blocks, x, policy)
    same = [bool(torch.equal(one, other)) for one, other in zip(found, expected, strict=True)]
    return {"same": same, "splits": policy.splits}


@pytest.mark.parametrize("on_host", [False, True], ids=["on the device", "on the host"])
def test_inputs_are_split_over_ranks_on_one_gpu(ranks: Ranks, on_host: bool) -> None:
    for answer in ranks.run(2, split_on_the_gpu, on_host):
        assert answer["splits"]
        assert all(answer["same"]), answer["same"]
