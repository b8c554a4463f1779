"""Cores for updates: near the GPU, shared among its neighbours, with two left over."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import shardwell
from shardwell.memory import Device
from shardwell.offload.cores import update_cores
from tests.support.models import Gpt, batches, share, zero
from tests.support.ranks import Ranks

BUSES = ["0000:1a:00.0", "0000:3B:00.0", "0000:9a:00.0", "0000:bb:00.0"]


def machine(root: Path) -> Path:
    """Two memory nodes with eight cores each, two GPUs on each."""
    for bus, node in zip(BUSES, (0, 0, 1, 1), strict=True):
        folder = root / "bus/pci/devices" / bus.lower()
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    for node, cores in enumerate(("0-3,8-11", "4-7,12-15")):
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    return root


def test_ranks_share_the_cores_of_their_node(tmp_path: Path) -> None:
    system = machine(tmp_path)
    found = [update_cores(rank, BUSES, range(16), system) for rank in range(4)]
    assert found == [[0, 1], [8, 9], [4, 5], [12, 13]]
    assert update_cores(0, BUSES[2:3], range(16), system) == [4, 5, 6, 7, 12, 13]


def test_only_cores_that_the_process_may_use(tmp_path: Path) -> None:
    system = machine(tmp_path)
    assert update_cores(0, BUSES[:1], [2, 3, 4, 5, 8], system) == [2]
    assert update_cores(0, BUSES[:1], [4, 5, 6, 7], system) == [4, 5]


def test_a_system_that_tells_nothing_is_one_node(tmp_path: Path) -> None:
    assert update_cores(0, BUSES[:1], range(16), tmp_path) == list(range(14))
    assert [update_cores(rank, BUSES[:2], range(8), tmp_path) for rank in range(2)] == [[0, 1], [4, 5]]


@given(num_ranks=st.integers(1, 9), num_cores=st.integers(1, 40), num_nodes=st.sampled_from([0, 1, 2]))
def test_ranks_of_a_machine_get_cores_evenly(num_ranks: int, num_cores: int, num_nodes: int) -> None:
    """Between ranks of a memory node their numbers differ by one at most; cores are shared only where there are few."""
    with TemporaryDirectory() as folder:
        buses = [f"0000:{rank:02x}:00.0" for rank in range(num_ranks)]
        nodes = spread(Path(folder), buses, num_cores, num_nodes)
        found = [update_cores(rank, buses, range(num_cores), Path(folder)) for rank in range(num_ranks)]
    for node in set(nodes):
        shares = [share for share, own in zip(found, nodes, strict=True) if own == node]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        users = Counter(core for share in shares for core in share)
        near = num_cores if node < 0 else len(range(node, num_cores, num_nodes))
        assert max(users.values()) <= -(-len(shares) // near)


def spread(root: Path, buses: list[str], num_cores: int, num_nodes: int) -> list[int]:
    """A machine whose GPUs and cores take turns with its memory nodes; 0: it does not tell. Return each GPU's node."""
    if num_nodes == 0 or num_cores < num_nodes:
        return [-1] * len(buses)
    for node in range(num_nodes):
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(map(str, range(node, num_cores, num_nodes))) + "\n")
    for rank, bus in enumerate(buses):
        folder = root / "bus/pci/devices" / bus
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{rank % num_nodes}\n")
    return [rank % num_nodes for rank in range(len(buses))]


def test_there_is_always_a_core(tmp_path: Path) -> None:
    assert update_cores(3, BUSES, range(2), tmp_path) == [1]
    assert update_cores(0, BUSES, range(2), tmp_path) == [0]


def cores_of_updates() -> tuple[list[int], list[int]]:
    """The cores that this rank may use, and those on which its thread for updates runs; all ranks have a GPU each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    allowed = sorted(os.sched_getaffinity(0))
    buses = [f"0000:{number:02x}:00.0" for number in range(size)]
    model = Gpt(blocks=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "local_gpu_buses", lambda self: (rank, buses))
        block = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
        optimizer = torch.optim.AdamW(model.parameters())
        engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(2, **block)).engine
    engine.backward(engine(share(batches(1, size)[0], rank, size)))
    engine.step()
    engine(share(batches(1, size)[0], rank, size))  # waits for the updates, which have a thread then
    threads = [thread for thread in threading.enumerate() if thread.name == "shardwell host updates"]
    found = [sorted(os.sched_getaffinity(thread.native_id)) for thread in threads if thread.native_id is not None]
    engine.destroy()
    return allowed, found[-1]


def test_the_updates_of_2_and_4_ranks_run_on_cores_of_their_own(ranks: Ranks) -> None:
    for size in (2, 4):
        answers = ranks.run(size, cores_of_updates)
        users = Counter(core for _, cores in answers for core in cores)
        num_cores = len(answers[0][0])
        assert max(users.values()) <= -(-size // num_cores), answers
        assert len({len(cores) for _, cores in answers}) == 1, answers
