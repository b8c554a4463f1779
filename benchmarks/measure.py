"""Counters that work for every engine alike: CPU time, loopback traffic, live tensor bytes, collective payload.

Nothing here knows an engine. What each counter sees:

* ``cpu_seconds``: user + system time of this process with all its threads.
* ``loopback_bytes``: everything sent over the loopback interface by anyone on the machine, headers included. Other
  programs can only add to it, so a report takes the least over rounds.
* ``TensorLedger``: the bytes of all live tensor storages, and the payload of collectives. It is a dispatch mode that
  must be entered before the model is built. torch.profiler's memory events were tried first and rejected: they are
  recorded per thread, and gloo frees its staging copies in threads of its own, so the running sum drifts by tens of MiB
  a step. The ledger keeps weak references to every storage that an operation takes or returns and adds up their
  *current* sizes at each operation, so that ``untyped_storage().resize_()``, which no operation announces, counts too.
  It does not see what a kernel or gloo allocates for itself; ``heap_bytes``, sampled at the same moments, does.
* ``heap_bytes``: what malloc has handed out in this process (glibc's mallinfo2), tensors or not, in all threads.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import json
import os
import platform
import resource
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

MIB = 2**20
RESULTS = Path(__file__).parent / "results"
PLACES = ("--folder", "--json", "--logs", "--peer", "--plot", "--profile", "--timeline")  # options for files


def cpu_seconds() -> float:
    """User and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def loopback_bytes() -> int | None:
    """Bytes sent over ``lo`` since boot, or None where the system does not say."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    return None


def wait_for_quiet(limit: float = 3.0) -> None:
    """Sleep until the loopback interface is quiet, at most ``limit`` seconds.

    An engine may still be sending when its step returns (a publish under the next forward). A window that opens or
    closes on moving traffic would miss some of it, and flatter that engine.
    """
    deadline = time.monotonic() + limit
    before = loopback_bytes()
    while before is not None and time.monotonic() < deadline:
        time.sleep(0.2)
        after = loopback_bytes()
        if after is None or after - before < 2**16:
            return
        before = after


class _Mallinfo2(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks")),
        ("hblkhd", ctypes.c_size_t),  # bytes in blocks that were mapped one by one
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks")),
        ("uordblks", ctypes.c_size_t),  # bytes in use in the arenas
        *((name, ctypes.c_size_t) for name in ("fordblks", "keepcost")),
    )


def _find_mallinfo() -> Any:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    function.restype = _Mallinfo2
    return function


_mallinfo = _find_mallinfo()


def heap_bytes() -> int:
    """Bytes that malloc has handed out and not got back; 0 where glibc is too old to tell."""
    if _mallinfo is None:
        return 0
    info = _mallinfo()
    return int(info.uordblks + info.hblkhd)


def gc_tensor_bytes() -> int:
    """Bytes of the storages behind every tensor that Python can see: a cross-check of the ledger, at rest only."""
    gc.collect()
    storages: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for item in gc.get_objects():
            if not issubclass(type(item), torch.Tensor) or issubclass(type(item), DTensor):
                continue
            try:
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):  # no storage: meta, fake or functional tensors
                continue
    return sum(storages.values())


def _ring_share(operation: str, num_bytes: int, world: int) -> float:
    """Bytes that a rank sends on average in a bandwidth-optimal algorithm, for a whole buffer of ``num_bytes``."""
    if operation == "send":
        return num_bytes
    if operation.startswith("recv"):
        return 0
    share = num_bytes * (world - 1) / world
    return 2 * share if operation.startswith("allreduce") else share


class TensorLedger(TorchDispatchMode):
    """Live storage bytes (now and at the peak) and the collective payload of everything run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self._heap_before = heap_bytes()
        self.reset()

    def reset(self) -> None:
        """Start a new window: the peaks and the payload begin anew, what is alive stays known."""
        self.peak = self.live()
        self.heap_peak = heap_bytes() - self._heap_before
        self.payload = 0.0  # bytes sent by this rank
        self.collectives: dict[str, int] = {}

    def live(self) -> int:
        """The bytes of all storages that are alive right now."""
        total = 0
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total

    def heap(self) -> int:
        """Heap bytes gained since the ledger was opened."""
        return heap_bytes() - self._heap_before

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the DTensor unwraps itself and comes back with its local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._note((args, kwargs, result))
        if func.namespace == "c10d":
            self._note_collective(func._schema.name.removeprefix("c10d::"), args)
        self.peak = max(self.peak, self.live())
        self.heap_peak = max(self.heap_peak, self.heap())
        return result

    def _note(self, tree: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # a guarded parameter may refuse to be asked
            for tensor in tree_iter(tree):
                if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                    storage = tensor.untyped_storage()
                    if storage._cdata not in self._storages:
                        self._storages[storage._cdata] = StorageWeakRef(storage)

    def _note_collective(self, name: str, args: Any) -> None:
        sizes: list[
            int
        ] = []  # of each tensor argument: the whole buffer is the greatest, or the sum of a list of parts
        for arg in args:
            tensors = [t for t in tree_iter(arg) if isinstance(t, torch.Tensor)]
            sizes.append(sum(t.numel() * t.element_size() for t in tensors))
        whole = max(sizes, default=0)
        if whole == 0 or name in {"barrier", "monitored_barrier_"}:
            return
        self.collectives[name] = self.collectives.get(name, 0) + 1
        self.payload += _ring_share(name, whole, dist.get_world_size())


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.platform(), "load": os.getloadavg()[0]}


def versions() -> dict[str, str]:
    """The versions of Python and of every engine that is installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("deepspeed", "shardwell"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if "shardwell" not in found:
        try:
            from shardwell import __version__ as found_version

            found["shardwell"] = str(found_version)
        except ImportError:
            pass
    return found


def command_line(name: str, argv: Sequence[str] | None) -> str:
    """The command that repeats a run of a benchmark; where its files were and its results went is left out."""
    words, skip = [], False
    for word in sys.argv[1:] if argv is None else argv:
        is_place = word.partition("=")[0] in PLACES
        if not skip and not is_place:
            words.append(word)
        skip = is_place and "=" not in word
    return shlex.join(["python", "-m", f"benchmarks.{name}", *words])


def circumstances(command: str, device: str) -> dict[str, Any]:
    """What every report begins with: the command, when it ran, and on what."""
    on = torch.cuda.get_device_name(0) if device == "cuda" else device
    return {
        "command": command.strip(),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": {**machine(), "device": on},
        "versions": versions(),
    }


def told(report: dict[str, Any]) -> str:
    """The machine and the versions of a report, in a line."""
    on, found = report["machine"], ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"{on['device']}; {on['cpu']}, {on['cores']} cores; {found}"


def keep(report: dict[str, Any], name: str, asked: str | None) -> Path | None:
    """Write a report where it was asked for, or among the results under its name and date; None for '-'."""
    if asked == "-":
        return None
    path = Path(asked) if asked else RESULTS / f"{name}-{report['date'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path
