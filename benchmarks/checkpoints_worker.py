"""One rank of one contender that saves or loads: what ``benchmarks.checkpoints`` starts, and nobody calls by hand.

A process that saves trains two steps, saves twice to each place, and then saves twice to each place in the background
while it trains on. A process that loads begins with other parameters, loads once by the clock, and holds parameters and
both moments against checksums that the saving process took of them, whole, in each engine's own way.

What the counters see: CPU-seconds are those of this process with all its threads. Growth of memory is the peak of the
resident set during a call above what it was before; pages that malloc kept from before do not count. Bytes read are
those of read calls (``rchar``), from the page cache or not; what is mapped would not count, but nobody maps.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import (
    EngineTrainer,
    TorchTrainer,
    Trainer,
    Workload,
    build_deepspeed,
    build_fsdp2,
    build_shardwell,
)
from benchmarks.launch import without_folders
from benchmarks.measure import cpu_seconds
from benchmarks.model import PRESETS
from benchmarks.worker import batch_for

WARM_UP_STEPS = 2
STEPS_BESIDE = 2  # a save in the background
MOMENTS = ("exp_avg", "exp_avg_sq")
KEPT, LATER = "kept", "later"  # the tags that are loaded: saved at once, and in the background


class Subject(Protocol):
    """An engine that is ready to train, to save and to load."""

    trainer: Trainer

    def save(self, folder: str, tag: str) -> None: ...

    def save_later(self, folder: str, tag: str) -> Callable[[], object] | None:
        """Returns what waits for the end of it; None if the engine cannot save in the background."""

    def load(self, folder: str, tag: str) -> int | None:
        """The bytes that it says it has read, if it says so."""

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and moments."""

    def held(self) -> int:
        """Elements of the parameters that rest on this rank for its optimizer."""


class Shardwell:
    def __init__(self, workload: Workload, stage: int) -> None:
        self.trainer = build_shardwell(workload, stage)
        assert isinstance(self.trainer, EngineTrainer)
        self.engine = self.trainer.engine

    def save(self, folder: str, tag: str) -> None:
        self.engine.save_checkpoint(folder, tag)

    def save_later(self, folder: str, tag: str) -> Callable[[], object] | None:
        self.engine.save_checkpoint(folder, tag, asynchronous=True)
        wait: Callable[[], object] = self.engine.finish_saving
        return wait

    def load(self, folder: str, tag: str) -> int | None:
        from shardwell.checkpoint.sources import ShardwellSource

        read: list[int] = []
        close = ShardwellSource.close
        ShardwellSource.close = lambda self: (read.append(self.bytes_read), close(self))[1]  # type: ignore[method-assign]
        try:
            self.engine.load_checkpoint(folder, tag)
        finally:
            ShardwellSource.close = close  # type: ignore[method-assign]
        return read[0]

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        from shardwell.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        for name, parameter in self.engine.module.named_parameters():
            yield name, safe_get_full_fp32_param(parameter)
            for key in MOMENTS:
                yield f"{name} {key}", safe_get_full_optimizer_state(parameter, key)

    def held(self) -> int:
        groups = [group for unit in self.engine._scheduler.units for group in unit.groups]
        return sum(piece.numel for group in groups for run in group.spans for piece in run.pieces)


class Dcp:
    """torch.distributed.checkpoint over FSDP2. In the background it needs a process group of its own, and a stager that
    is kept, so that its buffers are used again."""

    def __init__(self, workload: Workload) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        trainer = build_fsdp2(workload)
        assert isinstance(trainer, TorchTrainer)
        self.trainer, self.model, self.optimizer = trainer, trainer.model, trainer.optimizer
        self._group = dist.new_group(backend="gloo")
        self._stager = DefaultStager(StagingOptions(False, False, False, False))

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: str, tag: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=f"{folder}/{tag}")  # type: ignore[attr-defined]

    def save_later(self, folder: str, tag: str) -> Callable[[], object] | None:
        import torch.distributed.checkpoint as dcp

        answer = dcp.async_save(  # type: ignore[attr-defined]
            self._state(), checkpoint_id=f"{folder}/{tag}", process_group=self._group, async_stager=self._stager
        )
        wait: Callable[[], object] = answer.result
        return wait

    def load(self, folder: str, tag: str) -> int | None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=f"{folder}/{tag}")  # type: ignore[attr-defined]
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return None

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.full_tensor()  # type: ignore[attr-defined]
            for key in MOMENTS:
                yield f"{name} {key}", self.optimizer.state[parameter][key].full_tensor()

    def held(self) -> int:
        return sum(parameter.to_local().numel() for parameter in self.model.parameters())  # type: ignore[attr-defined]


class DeepSpeed:
    def __init__(self, workload: Workload) -> None:
        self.trainer = build_deepspeed(workload, 3)
        assert isinstance(self.trainer, EngineTrainer)
        self.engine = self.trainer.engine

    def save(self, folder: str, tag: str) -> None:
        self.engine.save_checkpoint(folder, tag)

    def save_later(self, folder: str, tag: str) -> Callable[[], object] | None:
        return None

    def load(self, folder: str, tag: str) -> int | None:
        self.engine.load_checkpoint(folder, tag)
        return None

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        for name, parameter in self.engine.module.named_parameters():
            yield name, safe_get_full_fp32_param(parameter)
            for key in MOMENTS:
                yield f"{name} {key}", safe_get_full_optimizer_state(parameter, key)

    def held(self) -> int:
        return sum(parameter.ds_tensor.numel() for parameter in self.engine.module.parameters())


SUBJECTS: dict[str, Callable[[Workload], Subject]] = {
    "dcp": Dcp,
    "deepspeed3": DeepSpeed,
    "shardwell1": lambda workload: Shardwell(workload, 1),
    "shardwell3": lambda workload: Shardwell(workload, 3),
}


# ------------------------------------------------------------------------------------------------------- counters


def read_bytes() -> int:
    """What this process has asked the system to read so far."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("rchar:"):
                return int(line.split()[1])
    return 0


def resident(key: str) -> int:
    """VmRSS or VmHWM, its peak, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


def timed(action: Callable[[], Any]) -> tuple[dict[str, Any], Any]:
    """The figures of a call that all ranks make together, and what it returns."""
    gc.collect()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    dist.barrier()
    before, cpu, read, begin = resident("VmRSS"), cpu_seconds(), read_bytes(), time.perf_counter()
    result = action()
    seconds, cpu, read = time.perf_counter() - begin, cpu_seconds() - cpu, read_bytes() - read
    growth = max(0, resident("VmHWM") - before)
    return {"seconds": seconds, "cpu_seconds": cpu, "read_bytes": read, "growth_bytes": growth}, result


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def make_durable(folder: Path) -> None:
    """Bring a checkpoint to the disk, all its files at once. Unlike sync(), nobody else's data is waited for."""

    def sync(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sync, [*files_of(folder), folder, folder.parent]))


def checksums(subject: Subject) -> dict[str, int]:
    """Of parameters and moments, whole, the same whatever the number of ranks."""
    return {name: zlib.crc32(tensor.detach().contiguous().numpy().data) for name, tensor in subject.whole()}


def remove(folder: str, tag: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(Path(folder, tag))
    dist.barrier()


# --------------------------------------------------------------------------------------------------------- saving


def save_at_once(subject: Subject, folder: str, tag: str) -> dict[str, Any]:
    figures, begin = {}, 0.0

    def save() -> None:
        nonlocal begin
        begin = time.perf_counter()
        subject.save(folder, tag)

    figures, _ = timed(save)
    dist.barrier()
    if dist.get_rank() == 0:
        make_durable(Path(folder, tag))
    dist.barrier()
    figures["durable_seconds"] = time.perf_counter() - begin
    figures["bytes"] = sum(path.stat().st_size for path in files_of(Path(folder, tag)))
    return figures


def train(subject: Subject, workload: Workload, steps: int) -> list[float]:
    """Seconds of each step."""
    seconds = []
    for step in range(steps):
        batch = batch_for(workload, dist.get_rank(), step)
        begin = time.perf_counter()
        subject.trainer.step(*batch)
        seconds.append(time.perf_counter() - begin)
    return seconds


def save_beside(subject: Subject, workload: Workload, folder: str, tag: str, usual: float) -> dict[str, Any] | None:
    """A save in the background: how long it holds up the training loop, and how much slower the steps after it are."""
    begin = time.perf_counter()
    figures, wait = timed(lambda: subject.save_later(folder, tag))
    if wait is None:
        return None
    steps = train(subject, workload, STEPS_BESIDE)
    wait()
    return {
        "stall_seconds": figures["seconds"],
        "slowed_seconds": sum(steps) - STEPS_BESIDE * usual,
        "done_seconds": time.perf_counter() - begin,
        "growth_bytes": figures["growth_bytes"],
        "steps": steps,
    }


def saving(subject: Subject, workload: Workload, places: dict[str, str]) -> dict[str, Any]:
    """All saves of a process, to each place in turn."""
    train(subject, workload, WARM_UP_STEPS)
    result: dict[str, Any] = {KEPT: checksums(subject), "held": subject.held(), "places": {}}
    for place, folder in places.items():
        first = save_at_once(subject, folder, "first")
        remove(folder, "first")
        result["places"][place] = {"first": first, "second": save_at_once(subject, folder, KEPT)}
    for place, folder in places.items():
        usual = statistics.median(train(subject, workload, STEPS_BESIDE))
        first_later = save_beside(subject, workload, folder, "first", usual)
        if first_later is None:
            continue
        remove(folder, "first")
        result[f"{LATER} {place}"] = checksums(subject)
        second_later = save_beside(subject, workload, folder, LATER, usual)
        result["places"][place] |= {"first_later": first_later, "second_later": second_later, "step_seconds": usual}
    return result


# -------------------------------------------------------------------------------------------------------- loading


def loading(subject: Subject, folder: str, expected: dict[str, Any]) -> dict[str, Any]:
    """A load by the clock, and whether it gave what was saved; the same for what was saved in the background."""
    dist.barrier()
    figures, own_count = timed(lambda: subject.load(folder, KEPT))
    figures |= {"own_read_bytes": own_count, "held": subject.held(), "right": checksums(subject) == expected[KEPT]}
    if expected[LATER] is not None:
        subject.load(folder, LATER)
        figures["right_later"] = checksums(subject) == expected[LATER]
    return figures


def main() -> None:
    """Do what the JSON in argv[1] says and write the figures beside the other ranks'."""
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_saving = spec["expected"] is None
    workload = Workload(PRESETS[spec["size"]], batch=1, seed=0 if is_saving else 1)
    subject = SUBJECTS[spec["contender"]](workload)
    if is_saving:
        result = saving(subject, workload, spec["places"])
    else:
        try:
            result = loading(subject, spec["from"], json.loads(Path(spec["expected"]).read_text()))
        except Exception as error:  # what an engine says of another number of ranks is a figure too
            if not spec["may_refuse"]:
                raise
            result = {"refused": without_folders(f"{type(error).__name__}: {error}")}
    Path(spec["folder"], f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
