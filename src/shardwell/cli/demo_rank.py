"""One rank of the demo: trains the same model from the same seed at each stage and reports measurements.

Runs in child processes. Rank 0 appends one JSON object per line to the file that the command reads:
`{"event": "step", ...}` after every step, `{"event": "stage", ...}` after every stage.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.cli.demo_model import ByteGpt, rows_of_step, standard_library_text
from shardwell.engine import Engine
from shardwell.memory import MemoryReport, StateKind

CONTEXT = 128


@dataclass(frozen=True)
class DemoJob:
    """The job that the command gives to its ranks."""

    stages: list[int]
    steps: int
    rows: int  # per rank and step
    learning_rate: float
    bf16: bool
    trace: bool
    events: str  # the file to report to
    seed: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def config(self, stage: int) -> dict[str, Any]:
        """Return the configuration of one stage, in which even the smallest parameter is sharded."""
        return {
            "train_micro_batch_size_per_gpu": self.rows,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": self.learning_rate}},
            "bf16": {"enabled": self.bf16},
        }


class Reporter:
    """Writes reports of rank 0 to the command; other ranks write nothing."""

    def __init__(self, path: str, rank: int) -> None:
        self._file: TextIO | None = open(path, "a", encoding="utf-8") if rank == 0 else None  # noqa: SIM115

    def say(self, event: str, **what: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"event": event, **what}) + "\n")
            self._file.flush()


class UpdateProbe:
    """Reads the memory statistics when all gradients of a step are averaged and nothing is updated yet."""

    report: MemoryReport | None = None

    def watch(self, engine: Engine) -> None:
        assert engine.optimizer is not None

        def look(*_: Any) -> None:
            self.report = self.report or engine.memory()

        engine.optimizer.optimizer.register_step_pre_hook(look)


def train(job: DemoJob, stage: int, text: Tensor, rank: int, num_ranks: int, reporter: Reporter) -> None:
    """Train one stage, from the seed to the last step."""
    torch.manual_seed(job.seed)
    model: nn.Module = ByteGpt(context=CONTEXT)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = shardwell.initialize(model=model, config=job.config(stage), device="cpu").engine
    at_update = UpdateProbe()
    at_update.watch(engine)
    losses: list[float] = []
    norms: list[float] = []
    after_backward: MemoryReport | None = None
    trace = ""
    began = time.perf_counter()
    for step in range(job.steps):
        rows = rows_of_step(text, step, job.rows * num_ranks, CONTEXT + 1).chunk(num_ranks)[rank]
        at_update.report = None
        with engine.record() as recorded:
            loss = engine(rows)
            engine.backward(loss)
            after_backward = engine.memory()
            engine.step()
        trace = str(recorded)
        mean = loss.detach().double() / num_ranks
        dist.all_reduce(mean)
        losses.append(float(mean))
        norms.append(engine.get_global_grad_norm() or 0.0)
        speed = (step + 1) * rows.shape[0] * CONTEXT * num_ranks / (time.perf_counter() - began)
        reporter.say("step", stage=stage, step=step + 1, loss=losses[-1], tokens_per_second=speed)
    measured = {
        "at_rest": _by_state(engine.memory()),
        "after_backward": _by_state(after_backward),
        "before_update": _by_state(at_update.report),
        "received_per_step": {"payload": engine.traffic().total()},
    }
    reporter.say(
        "stage",
        stage=stage,
        parameters=num_parameters,
        losses=losses,
        gradient_norms=norms,
        seconds=time.perf_counter() - began,
        trace=trace if job.trace else None,
        startup=engine.startup_report,
        **_largest_over_ranks(measured),
    )
    engine.destroy()


def _by_state(report: MemoryReport | None) -> dict[str, int]:
    assert report is not None
    return {state.value: report.total(state) for state in StateKind}


def _largest_over_ranks(measured: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Return the maximum of each number over the ranks. They are sent as a tensor: torch would pickle objects."""
    largest = torch.tensor([number for numbers in measured.values() for number in numbers.values()], dtype=torch.int64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    found = iter(largest.tolist())
    return {group: {key: next(found) for key in numbers} for group, numbers in measured.items()}


def main() -> None:
    job = DemoJob(**json.loads(sys.argv[1]))
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    reporter = Reporter(job.events, rank)
    text = standard_library_text()
    for stage in job.stages:
        train(job, stage, text, rank, num_ranks, reporter)
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
