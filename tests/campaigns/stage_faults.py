"""Faults at any operation of any schedule of a pipeline: all ranks end with the first cause, and a restart resumes.

    python -m tests.campaigns.stage_faults --count 200 --seed 1 --minutes 20 --json results.json

Ranks are forked from this process once torch is imported. Each case is drawn from its seed: the schedule, the layout,
the ZeRO stage, the rank, the batch and the operation of it, and what happens there: the rank raises, is killed, or
all-gathers parameters that the others do not. Some jobs are started again from a checkpoint, in another layout.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwell
from shardwell.pipeline import make_schedule
from tests.campaigns.result import Result, command_line
from tests.support.faults import fault_at
from tests.support.patience import soon
from tests.support.pipelines import CHUNKS, LENGTH, ROWS, VOCABULARY, Decoder, next_token_loss, pipeline_config

LIMIT = 90.0  # seconds for the ranks of one job
DIVERGENCE = 5.0  # seconds that ranks wait for each other in a circle
SOON = 15.0  # seconds until a rank knows that another one failed
TOTAL = 8  # micro-batches of a step over all ranks
KINDS = ("raises", "is killed", "diverges")


class Fault(Exception):  # noqa: N818
    """What nobody expects."""


@dataclass(frozen=True)
class Layout:
    """How a job is laid out."""

    schedule: str
    ranks: int
    stages: int  # along the pipeline
    zero: int
    tied: bool = False

    @property
    def micro_batches(self) -> int:
        return TOTAL * self.stages // self.ranks


@dataclass(frozen=True)
class Plan:
    """What happens to a job, and how it goes on."""

    layout: Layout
    kind: str
    rank: int
    batch: int
    operation: str
    resumes: Layout | None


def drawn_layout(rng: random.Random, *, tied: bool) -> Layout:
    ranks, stages = rng.choice([(2, 2), (4, 2), (4, 4), (3, 3)])
    schedule = rng.choice(["1f1b", "gpipe", "zb-h1"] if ranks > 2 and stages > 2 else sorted(CHUNKS))
    return Layout(schedule, ranks, stages, rng.randrange(4), tied)


def drawn(rng: random.Random) -> Plan:
    kind, tied = rng.choice(KINDS), rng.random() < 0.3
    layout = drawn_layout(rng, tied=tied)
    if kind == "diverges":  # where parameters are all-gathered, and others have the same ones
        layout = Layout(rng.choice(sorted(CHUNKS)), 4, 2, 3, tied)
    schedule = make_schedule(layout.schedule, layout.stages, layout.micro_batches, CHUNKS[layout.schedule])
    rank = rng.randrange(layout.ranks)
    operations = schedule.ranks[rank // (layout.ranks // layout.stages)]
    resumes = drawn_layout(rng, tied=layout.tied) if rng.random() < 0.3 else None
    return Plan(layout, kind, rank, rng.randint(1, 2), str(rng.choice(operations)), resumes)


def batches_of(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the micro-batches of a step, over all ranks."""
    shape = TOTAL, ROWS, LENGTH + 1
    ids = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(step))
    return [(one[:, :-1], one[:, 1:]) for one in ids]


def plainly(tied: bool, steps: int) -> list[float]:
    """Return the losses of one process of plain PyTorch."""
    torch.manual_seed(0)
    model = Decoder(tied=tied).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = torch.stack([next_token_loss(model(ids), labels) for ids, labels in batches_of(step)]).mean()
        loss.backward()
        losses.append(float(loss.detach()))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def engine_of(layout: Layout) -> Any:
    torch.manual_seed(0)
    model = shardwell.pipeline.split(Decoder(tied=layout.tied).double(), loss_fn=next_token_loss)
    limit = {"divergence_timeout": DIVERGENCE}
    config = pipeline_config(layout.zero, layout.schedule, layout.stages, shardwell=limit)
    return shardwell.initialize(
        model=model, config={**config, "gradient_accumulation_steps": layout.micro_batches}
    ).engine


def train(engine: Any, step: int) -> float:
    mine = batches_of(step)[engine.data_rank :: engine.data_size]
    return float(engine.train_batch(iter(mine)))


def fail(plan: Plan, folder: str) -> dict[str, Any]:
    """One rank's life: a step, a checkpoint, and a batch in which something happens."""
    engine = engine_of(plan.layout)
    rank = engine.global_rank
    losses, begin = [], 0.0
    met = [0]

    def happen(note: Any, where: Any, operation: Any) -> None:
        if rank == plan.rank and str(operation) == plan.operation:
            met[0] += 1
            if met[0] == plan.batch and plan.kind == "raises":
                raise Fault(plan.operation)
            if met[0] == plan.batch and plan.kind == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if met[0] == plan.batch:
                with shardwell.zero.GatheredParameters(list(engine.module.parameters())):
                    pass
        note(where, operation)

    losses.append(train(engine, 0))
    engine.save_checkpoint(f"{folder}/checkpoint")
    engine.finish_saving()
    try:
        with fault_at("operation of a pipeline", happen):
            for step in (1, 2):
                begin = time.monotonic()
                losses.append(train(engine, step))
    except BaseException as error:
        seconds = time.monotonic() - begin
        return {"error": type(error).__name__, "text": str(error), "seconds": seconds, "losses": losses}
    return {"error": "", "text": "", "seconds": 0.0, "losses": losses}


def resume(plan: Plan, folder: str) -> dict[str, Any]:
    """One rank's life after a restart: it goes on where the checkpoint was made."""
    assert plan.resumes is not None
    engine = engine_of(plan.resumes)
    engine.load_checkpoint(f"{folder}/checkpoint", strict=True)
    return {"losses": [train(engine, step) for step in (1, 2)]}


def started(life: Any, plan: Plan, size: int, folder: str) -> tuple[list[Any], bool]:
    """Fork the ranks of a job; return what each said, None if nothing, and whether all ended by themselves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    staying, leaving = os.pipe()  # who ends early must not be taken for one that is gone
    for rank in range(size):
        child = os.fork()
        if child == 0:
            os.close(leaving)
            os.environ.update(
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size),
                LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), SHARDWELL_DEVICE="cpu",
            )  # fmt: skip
            torch.set_num_threads(1)
            try:
                answer = life(plan, folder)
            except BaseException as error:
                answer = {"error": f"raw {type(error).__name__}", "text": str(error), "seconds": 0.0, "losses": []}
            file = Path(folder, f"{life.__name__} {rank}")
            file.with_suffix(".part").write_text(json.dumps(answer))
            file.with_suffix(".part").rename(file)
            os.read(staying, 1)
            os._exit(0)
        children.append(child)
    os.close(staying)
    files = [Path(folder, f"{life.__name__} {rank}") for rank in range(size)]
    left, end = set(children), time.monotonic() + soon(LIMIT)
    while time.monotonic() < end:
        left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
        if all(file.exists() or children[rank] not in left for rank, file in enumerate(files)):
            break
        time.sleep(0.02)
    is_over = all(file.exists() or children[rank] not in left for rank, file in enumerate(files))
    os.close(leaving)
    for child in left:
        if not is_over:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return [json.loads(file.read_text()) if file.exists() else None for file in files], is_over


def judged(plan: Plan, answers: list[Any], expected: list[float], *, is_over: bool) -> str:
    """Return what came of a job."""
    if not is_over:
        return "hang"
    survivors = [one for rank, one in enumerate(answers) if plan.kind != "is killed" or rank != plan.rank]
    if any(one is None for one in survivors):
        return "crash"
    if plan.kind == "diverges" and not any(one["error"] for one in survivors):
        is_right = all(_is_close(one["losses"], expected) for one in survivors)
        return "unharmed" if is_right else "other losses"
    words = {
        "raises": [f"rank {plan.rank} failed first: Fault in train_batch: {plan.operation}"],
        "is killed": [f"rank {plan.rank} is gone", "stopped answering"],
        "diverges": ["ranks diverge"],
    }[plan.kind]
    for rank, one in enumerate(answers):
        if one is None:
            continue
        is_own = plan.kind == "raises" and rank == plan.rank
        if is_own and (one["error"], one["text"]) != ("Fault", plan.operation):
            return "its own words are lost"
        if not is_own and one["error"] != ("DivergenceError" if plan.kind == "diverges" else "PeerError"):
            return f"raw error {one['error']}" if one["error"] else "trained on in silence"
        if not is_own and not any(word in one["text"] for word in words):
            return "another cause"
        if one["seconds"] > soon(2 * SOON):
            return "late"
    return "told"


def _is_close(losses: list[float], expected: list[float]) -> bool:
    return len(losses) == len(expected) and all(
        abs(one - other) < 1e-9 for one, other in zip(losses, expected, strict=True)
    )


def play(rng: random.Random) -> dict[str, Any]:
    """One case, judged."""
    plan = drawn(rng)
    expected = plainly(plan.layout.tied, 3)
    with tempfile.TemporaryDirectory() as folder:
        answers, is_over = started(fail, plan, plan.layout.ranks, folder)
        outcome, resumed = judged(plan, answers, expected, is_over=is_over), None
        if plan.resumes is not None and outcome in ("told", "unharmed"):
            resumed, is_over = started(resume, plan, plan.resumes.ranks, folder)
            is_right = is_over and all(one and _is_close(one["losses"], expected[1:]) for one in resumed)
            outcome = f"{outcome}, resumed" if is_right else "does not resume"
    seconds = max((one["seconds"] for one in answers if one), default=0.0)
    return {**asdict(plan), "outcome": outcome, "answers": answers, "resumed": resumed, "seconds": seconds}


def campaign(count: int, seed: int, seconds: float) -> Result:
    plainly(False, 1)  # torch imports more when the first optimizer steps
    result, begin = Result("stage_faults"), time.monotonic()
    for number in range(count):
        if time.monotonic() - begin > seconds:
            break
        found = play(random.Random(f"{seed} {number}"))
        good = found["outcome"].partition(",")[0] in ("told", "unharmed")
        result.count(found["outcome"], "" if good else f"seed {seed}, number {number}: {found}")
        result.figures[f"jobs whose rank {found['kind']}"] += 1
        result.figures[f"jobs in {found['layout']['schedule']}"] += 1
        if found["kind"] != "diverges":
            result.took(f"rank {found['kind']}", found["seconds"])
    result.seconds = round(time.monotonic() - begin, 1)
    return result


if __name__ == "__main__":
    sys.exit(command_line(campaign, "tests.campaigns.stage_faults", __doc__))
