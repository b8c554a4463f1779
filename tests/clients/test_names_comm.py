"""`deepspeed.comm`, `groups` and the checks that cross ranks, on real ranks and on one process alone."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from shardwell.compat.deepspeed_api import comm, groups
from shardwell.compat.deepspeed_api.runtime_names import CheckOverflow, clip_grad_norm_
from shardwell.errors import ShardwellError
from tests.support.command import environment
from tests.support.patience import HANG
from tests.support.ranks import Ranks


def collectives() -> dict[str, Any]:
    rank, found = comm.get_rank(), {}
    comm.init_distributed()  # there is a group already
    tensor = torch.full((2,), float(rank + 1))
    comm.all_reduce(tensor, prof=True, log_name="x", debug="y")
    found["sum"] = tensor.tolist()
    tensor = torch.full((2,), float(rank + 1))
    comm.all_reduce(tensor, op=comm.ReduceOp.AVG)
    found["average"] = tensor.tolist()
    whole = torch.zeros(2)
    comm.all_gather_into_tensor(whole, torch.tensor([float(rank)]))
    part = torch.zeros(1)
    comm.reduce_scatter_tensor(part, torch.tensor([1.0, 2.0]), op=comm.ReduceOp.AVG)
    comm.broadcast(tensor, 0)
    comm.barrier()
    found |= {"whole": whole.tolist(), "part": part.item(), "sizes": (comm.get_world_size(), comm.get_global_rank())}
    found["ranks"] = comm.get_all_ranks_from_group()
    return found


def objects() -> dict[str, Any]:
    rank = comm.get_rank()
    gathered: list[Any] = [None, None]
    comm.all_gather_object(gathered, {"rank": rank, "words": ["é" * rank]})
    sent = [{"a": [1, 2.5, None]}, "text"] if rank == 0 else [None, None]
    comm.broadcast_object_list(sent, 0)
    refusals = []
    for value in ((1, 2) if rank == 0 else [3], object() if rank == 0 else 1):  # one rank alone must not wait
        with pytest.raises(ShardwellError, match="sent as JSON") as caught:
            comm.all_gather_object([None, None], value)
        refusals.append(str(caught.value))
    with pytest.raises(ShardwellError, match="sent as JSON"):
        comm.broadcast_object_list([{1, 2}] if rank == 0 else [None], 0)
    return {"gathered": gathered, "sent": sent, "refusals": refusals}


def norms() -> dict[str, Any]:
    rank = comm.get_rank()
    one = torch.nn.Parameter(torch.zeros(2))
    one.grad = torch.tensor([3.0, 4.0]) if rank == 0 else torch.tensor([0.0, 1.0])
    norm = clip_grad_norm_([one], max_norm=0.5)
    bad = torch.nn.Parameter(torch.zeros(1))
    bad.grad = torch.tensor([float("inf") if rank == 1 else 1.0])
    check = CheckOverflow([[bad]])
    return {
        "norm": float(norm),
        "clipped": one.grad.tolist(),
        "overflow": check.check(),
        "by norm": check.check_using_norm([-1 if rank == 1 else 2.0]),
        "fine": CheckOverflow([[one]]).check(),
        "data": (groups._get_data_parallel_world_size(), groups._get_data_parallel_rank() == rank),
        "model": (groups.get_model_parallel_world_size(), groups.get_model_parallel_rank()),
        "alone": comm.get_world_size(groups.get_model_parallel_group()),
        "source": groups._get_broadcast_src_rank(),
    }


def test_collectives_under_deepspeeds_names(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(2, collectives)):
        assert found["sum"] == [3.0, 3.0]
        assert found["average"] == [1.5, 1.5]
        assert found["whole"] == [0.0, 1.0]
        assert found["part"] == float(rank + 1)
        assert found["sizes"] == (2, 0)
        assert found["ranks"] == [0, 1]


def test_objects_travel_as_json_and_others_are_refused_on_all_ranks(ranks: Ranks) -> None:
    for found in ranks.run(2, objects):
        assert found["gathered"] == [{"rank": 0, "words": [""]}, {"rank": 1, "words": ["é"]}]
        assert found["sent"] == [{"a": [1, 2.5, None]}, "text"]
        assert "a tuple" in found["refusals"][0]


def test_norms_overflows_and_groups_are_those_of_all_ranks(ranks: Ranks) -> None:
    first, second = ranks.run(2, norms)
    assert first["norm"] == second["norm"] == 3.0  # the average of 5 and 1, as DeepSpeed has it
    assert first["clipped"] == pytest.approx([0.5, 4 / 6], abs=1e-4)
    for found in (first, second):
        assert found["overflow"] is found["by norm"] is True
        assert found["fine"] is False
        assert (found["data"], found["model"], found["alone"], found["source"]) == ((2, True), (1, 0), 1, 0)


ALONE = """
import os, torch
from shardwell.compat.deepspeed_api import comm
assert (comm.get_rank(), comm.get_world_size(), comm.is_initialized()) == (0, 1, False)
comm.barrier()
try:
    comm.all_reduce(torch.ones(1))
except AssertionError as error:
    assert "init_distributed" in str(error)
else:
    raise SystemExit("a collective without a group")
try:
    comm.init_distributed(dist_init_required=False)
except AssertionError as error:
    assert "dist_init_required" in str(error)
comm.init_distributed(dist_backend="nccl")
assert torch.distributed.get_backend() == "gloo" and comm.get_world_size() == 1
one = torch.ones(1)
comm.all_reduce(one)
held = [None]
comm.all_gather_object(held, {"a": 1})
assert one.item() == 1 and held == [{"a": 1}]
comm.destroy_process_group()
os.environ.update({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"})
try:
    comm.init_distributed()
except RuntimeError as error:
    assert "MASTER_ADDR" in str(error)
else:
    raise SystemExit("a rank of MPI took itself for the only one")
print("done")
"""


def test_a_process_alone_gets_a_group_of_one_and_a_rank_of_mpi_never_does() -> None:
    clean = {key: value for key, value in environment().items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    done = subprocess.run([sys.executable, "-c", ALONE], env=clean, capture_output=True, text=True, timeout=HANG)
    assert done.stdout.split() == ["done"], done.stderr


def test_names_that_would_pickle_or_do_not_exist_are_refused() -> None:
    for name in ("gather_object", "scatter_object_list"):
        with pytest.raises(AttributeError, match="pickle"):
            getattr(comm, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        comm.no_such_name  # noqa: B018
    assert comm.Work is torch.distributed.Work  # the rest is torch's
    with pytest.raises(AttributeError, match="experts"):
        groups._get_expert_parallel_rank  # noqa: B018
    with pytest.raises(RuntimeError, match="expert parallelism"):
        groups.initialize(ep_size=2)
    with pytest.raises(KeyError):
        groups._get_sequence_parallel_group()


def test_the_users_mpu_answers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mpu:
        def get_model_parallel_world_size(self) -> int:
            return 4

        def get_model_parallel_rank(self) -> int:
            return 3

    monkeypatch.setattr(groups, "mpu", None)
    groups.initialize(mpu=Mpu())
    assert (groups.get_tensor_model_parallel_world_size(), groups.get_tensor_model_parallel_rank()) == (4, 3)
    assert groups._get_data_parallel_world_size() == 1


def test_the_local_rank_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert comm.get_local_rank() == 3
    assert "LOCAL_RANK" in os.environ
