"""`deepspeed.comm`: `torch.distributed` under DeepSpeed's names.

The arguments that DeepSpeed adds for its log of collectives (`prof`, `log_name`, `debug`) are accepted and change
nothing: the log is of an engine's own collectives. Objects travel as JSON, because torch would pickle them; what JSON
cannot hold is refused on all ranks. Names that are not written here are those of `torch.distributed`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shardwell.compat.deepspeed_api.accelerator import get_accelerator
from shardwell.errors import ShardwellError
from shardwell.memory.local_gpus import default_device
from shardwell.parallel import start_process_group

if TYPE_CHECKING:
    from shardwell.monitor.comms_log import CommsLog

ReduceOp = dist.ReduceOp
ProcessGroup = dist.ProcessGroup
P2POp = dist.P2POp
default_pg_timeout = timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "30")))
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500

# Ranks as other launchers describe them; torchrun and shardwell run set RANK themselves.
_OTHER_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
_PICKLED = ("gather_object", "scatter_object_list", "send_object_list", "recv_object_list")


def __getattr__(name: str) -> Any:
    if name in _PICKLED:
        raise AttributeError(
            f"deepspeed.comm.{name} is not supported: torch.distributed would pickle the objects, and what another "
            "rank sends must not be executed; use all_gather_object or broadcast_object_list with JSON values, or "
            "send tensors"
        )
    if not name.startswith("__") and hasattr(dist, name):
        return getattr(dist, name)
    raise AttributeError(f"deepspeed.comm has no {name!r} here, and torch.distributed has none either")


# --- the process group ------------------------------------------------------------------------------------------


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialise the default process group, if it is not there yet.

    The ranks are those of the launcher, or of MPI or Slurm (`auto_mpi_discovery`), or this process alone. Without a
    backend it is nccl for GPUs and gloo for the CPU, so that ranks never take themselves for the only one.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise NotInitializedError(
            "dist_init_required is False, and there is no process group; call torch.distributed.init_process_group or "
            "deepspeed.init_distributed() before, or leave it out"
        )
    if auto_mpi_discovery and "RANK" not in os.environ and init_method is None:
        mpi_discovery(distributed_port, verbose)
    backend = _backend(dist_backend)
    limit = timeout or default_pg_timeout
    if init_method is None and "RANK" in os.environ and rank < 0:
        if not os.environ.get("MASTER_ADDR"):
            if os.environ.get("WORLD_SIZE", "1") != "1":
                raise ShardwellError(
                    "MASTER_ADDR is not set, and there are several ranks: set it to the address of rank 0, or start "
                    "the ranks with shardwell run or torchrun"
                )
            os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
        if backend == get_accelerator().communication_backend_name():
            start_process_group(default_device(), limit)
            return
    if init_method is None and "RANK" not in os.environ and max(world_size, 1) == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)  # type: ignore[attr-defined, unused-ignore]
        return
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=limit)


class NotInitializedError(ShardwellError, AssertionError):
    """Raised if there is no process group, and the caller wants none made; an AssertionError, as DeepSpeed raises."""


def _backend(asked: str | None) -> str:
    """Return the backend to use; nccl and others for GPUs become gloo, with a warning, where there is no GPU."""
    usual: str = get_accelerator().communication_backend_name()
    if asked is None or asked in ("ccl", "mpi") or (asked == "nccl" and usual == "gloo"):
        if asked is not None:
            from shardwell.compat.deepspeed_api.logging import logger

            logger.warning("dist_backend %r is not available on this device: %s is used", asked, usual)
        return usual
    return asked


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Set torch's variables from those of MPI or Slurm, if one of them started this process."""
    for rank, size, local in _OTHER_LAUNCHERS:
        is_alone = rank == "SLURM_PROCID" and "SLURM_STEP_ID" not in os.environ  # a batch script, not started by srun
        if rank in os.environ and size in os.environ and not is_alone:
            found = {"RANK": os.environ[rank], "WORLD_SIZE": os.environ[size], "LOCAL_RANK": os.environ.get(local, "0")}
            os.environ.update({name: value for name, value in found.items() if name not in os.environ})
            os.environ.setdefault("MASTER_PORT", str(distributed_port))
            return


def known_world_size(world_size: int | None) -> int | None:
    """Return the number of ranks as it was passed or as the launcher says; None where neither says it."""
    if world_size is not None and world_size > 0:
        return world_size
    told = os.environ.get("WORLD_SIZE", "")
    return int(told) if told.isdigit() and int(told) > 0 else None


def is_initialized() -> bool:
    """Tell whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def is_available() -> bool:
    """Tell whether torch was built with `torch.distributed`."""
    return dist.is_available()


def destroy_process_group(group: Any = None) -> None:
    """Destroy a process group, by default all of them."""
    dist.destroy_process_group(group)


def configure(deepspeed_config: Any = None, enabled: bool | None = None, **options: Any) -> None:
    """Accept the settings of DeepSpeed's log of collectives; asked for, it says which block turns the log on."""
    if enabled:
        from shardwell.compat.deepspeed_api.logging import logger

        logger.warning_once("collectives are logged if the configuration of an engine has comms_logger.enabled")


def get_rank(group: Any = None) -> int:
    """Return the rank of this process; 0 if there is no process group."""
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks; 1 if there is no process group."""
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    """Return the rank on this machine, as the launcher says; 0 without one."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the rank in the default group of a rank of `group`."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the ranks in the default group of all ranks of `group`."""
    return list(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


def new_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """Make a process group of these ranks; all ranks call it."""
    return dist.new_group(None if ranks is None else list(ranks), **options)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """Return a DeviceMesh of this shape over the ranks."""
    where = get_accelerator().device_name()
    return init_device_mesh(where, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


# --- collectives ------------------------------------------------------------------------------------------------


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of `torch.distributed`: DeepSpeed's own arguments are dropped, and a group is demanded."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        for name in ("prof", "log_name", "debug"):
            options.pop(name, None)
        if not is_initialized():
            raise NotInitializedError(
                f"deepspeed.comm.{function.__name__}: there is no process group; call deepspeed.init_distributed()"
            )
        return function(*args, **options)

    return call


send, recv, isend, irecv = (_quiet(one) for one in (dist.send, dist.recv, dist.isend, dist.irecv))
gather, scatter = _quiet(dist.gather), _quiet(dist.scatter)
broadcast, reduce_scatter = _quiet(dist.broadcast), _quiet(dist.reduce_scatter)
all_gather, all_to_all, all_to_all_single = (
    _quiet(one) for one in (dist.all_gather, dist.all_to_all, dist.all_to_all_single)
)
monitored_barrier = _quiet(dist.monitored_barrier)
batch_isend_irecv = _quiet(dist.batch_isend_irecv)


@_quiet
def all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """Reduce a tensor over the ranks, in place; an average also where the backend has only sums."""
    if op != ReduceOp.AVG or dist.get_backend(group) != "gloo":
        return dist.all_reduce(tensor, op, group, async_op)
    _only_now(async_op, "all_reduce")
    dist.all_reduce(tensor, ReduceOp.SUM, group)
    tensor.div_(dist.get_world_size(group))
    return None


@_quiet
def reduce(tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """Reduce a tensor to one rank; an average also where the backend has only sums."""
    if op != ReduceOp.AVG or dist.get_backend(group) != "gloo":
        return dist.reduce(tensor, dst, op, group, async_op)
    _only_now(async_op, "reduce")
    dist.reduce(tensor, dst, ReduceOp.SUM, group)
    if dist.get_rank() == dst:
        tensor.div_(dist.get_world_size(group))
    return None


def _only_now(async_op: bool, name: str) -> None:
    if async_op:
        raise ShardwellError(f"{name} with ReduceOp.AVG and async_op=True: gloo has no average; use SUM and divide")


inference_all_reduce = all_reduce


@_quiet
def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Gather tensors of equal size from all ranks into one."""
    return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


@_quiet
def reduce_scatter_tensor(
    output_tensor: Tensor, input_tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Reduce a tensor over the ranks, and give each its part; an average also where the backend has only sums."""
    if op != ReduceOp.AVG or dist.get_backend(group) != "gloo":
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
    _only_now(async_op, "reduce_scatter_tensor")
    dist.reduce_scatter_tensor(output_tensor, input_tensor, ReduceOp.SUM, group)
    output_tensor.div_(dist.get_world_size(group))
    return None


allgather_fn, reduce_scatter_fn = all_gather_into_tensor, reduce_scatter_tensor


def has_all_gather_into_tensor() -> bool:
    return True


def has_reduce_scatter_tensor() -> bool:
    return True


def has_all_reduce_coalesced() -> bool:
    return True


def has_coalescing_manager() -> bool:
    return True


@_quiet
def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Reduce several tensors, one after the other."""
    works = [dist.all_reduce(tensor, op, group, async_op) for tensor in tensors]
    return works[-1] if async_op and works else None


@_quiet
def all_gather_coalesced(
    output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], group: Any = None, async_op: bool = False
) -> Any:
    """Gather several tensors, each into one, one after the other."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    works = [dist.all_gather_into_tensor(whole, part, group, async_op) for whole, part in pairs]
    return works[-1] if async_op and works else None


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, **_logging: Any) -> Any:
    """Wait for all ranks; a process alone does not wait."""
    return dist.barrier(group, async_op, device_ids) if is_initialized() else None


# --- objects, as JSON -------------------------------------------------------------------------------------------


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None, **_logging: Any) -> None:
    """Fill `object_list` with the object of each rank. Objects are JSON values: nothing is pickled."""
    mine = _encoded(obj)
    size = get_world_size(group)
    if size == 1:
        object_list[0] = _decoded(mine, "all_gather_object")
        return
    lengths = torch.zeros(size, dtype=torch.int64, device=_wire())
    dist.all_gather_into_tensor(lengths, torch.tensor([mine.numel()], device=_wire()), group=group)
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=_wire())
    padded[: mine.numel()] = mine.to(_wire())
    whole = torch.zeros(size * longest, dtype=torch.uint8, device=_wire())
    dist.all_gather_into_tensor(whole, padded, group=group)
    for rank, (part, length) in enumerate(zip(whole.cpu().view(size, -1), lengths.tolist(), strict=True)):
        object_list[rank] = _decoded(part[:length], "all_gather_object")


def broadcast_object_list(
    object_list: list[Any], src: int = 0, group: Any = None, device: Any = None, **_logging: Any
) -> None:
    """Replace the objects of all ranks by those of `src`. Objects are JSON values: nothing is pickled."""
    if get_world_size(group) == 1:
        object_list[:] = _decoded(_encoded(list(object_list)), "broadcast_object_list")
        return
    sends = get_rank() == src
    mine = _encoded(list(object_list)) if sends else torch.zeros(0, dtype=torch.uint8)
    length = torch.tensor([mine.numel()], device=_wire())
    dist.broadcast(length, src, group=group)
    words = mine.to(_wire()) if sends else torch.zeros(int(length), dtype=torch.uint8, device=_wire())
    dist.broadcast(words, src, group=group)
    object_list[:] = _decoded(words.cpu(), "broadcast_object_list")


def _wire() -> torch.device:
    """Return the device whose tensors the process group sends."""
    return torch.device(get_accelerator().current_device_name() if dist.get_backend() == "nccl" else "cpu")


def _encoded(value: Any) -> Tensor:
    """Return the JSON of a value as bytes; of what JSON does not give back as it was, a refusal for all ranks."""
    try:
        text = json.dumps(["value", value])
        if json.loads(text)[1] != value:
            raise TypeError("JSON gives it back as another value")
    except (TypeError, ValueError) as error:
        text = json.dumps(["refused", f"a {type(value).__name__}: {error}"])
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _decoded(words: Tensor, name: str) -> Any:
    kind, value = json.loads(bytes(words.tolist()))
    if kind == "refused":
        raise ShardwellError(
            f"deepspeed.comm.{name}: {value}. Objects are sent as JSON here, because a pickle of another rank would be "
            "executed; send lists, dictionaries with text keys, numbers and text, or tensors by other collectives"
        )
    return value


# --- DeepSpeed's log of collectives -----------------------------------------------------------------------------


def _logs() -> list[CommsLog]:
    """Return the logs of the engines of this process whose configuration has `comms_logger.enabled`."""
    module = sys.modules.get("shardwell.monitor.comms_log")
    found = [] if module is None else list(module.LIVING)
    if not found:
        from shardwell.compat.deepspeed_api.logging import logger

        logger.warning_once(
            "no collectives are logged on this rank: set comms_logger.enabled in the configuration, and read on rank 0"
        )
    for log in found:
        log.take()
    return found


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the log of collectives of this rank, or return it: calls, bytes and seconds by name."""
    logs = _logs()
    if return_dict:
        keys = ("calls", "bytes", "seconds")
        return {name: dict(zip(keys, sums, strict=True)) for log in logs for name, sums in log.sums.items()}
    for log in logs:
        print(log.summary(), flush=True)
    return None


def reset_log() -> None:
    """Begin the log of collectives anew."""
    for log in _logs():
        log.sums.clear()


def has_comm_data() -> bool:
    return any(log.sums for log in _logs())


def get_comm_operation_count() -> int:
    return sum(calls for log in _logs() for calls, _, _ in log.sums.values())


def get_logged_comm_ops() -> list[str]:
    return sorted({name for log in _logs() for name in log.sums})
