"""Reading sharded state of single parameters through `shardwell.utils`."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell import utils
from tests.support.patience import soon
from tests.support.ranks import Ranks
from tests.support.state_access import DTYPES, NEAR, STAGES, Plain, backward, in_memory_order, initialize, near, read

HOST = {"offload_optimizer": {"device": "cpu"}}
KEYS = ("exp_avg", "exp_avg_sq", "step")


def readings(stage: int, precision: str, accumulation: int) -> dict[str, Any]:
    engine = initialize(stage, precision, gradient_accumulation_steps=accumulation)
    found: dict[str, Any] = {}

    def note(when: str) -> None:
        found[f"{when}: gradients"] = read(engine, utils.safe_get_full_grad)
        if "backward" not in when:
            found[f"{when}: masters"] = read(engine, utils.safe_get_full_fp32_param)
            for key in KEYS:
                found[f"{when}: {key}"] = read(engine, lambda p, key=key: utils.safe_get_full_optimizer_state(p, key))

    note("at first")
    for step in range(2):
        for micro in range(accumulation):
            backward(engine, 10 * step + micro)
            note(f"{step}.{micro} after backward")
            engine.step()
        note(f"{step} after the step")
    found["no such key"] = read(engine, lambda p: utils.safe_get_full_optimizer_state(p, "sum"))
    return found


def plain_readings(precision: str, num_ranks: int, accumulation: int) -> dict[str, Any]:
    plain = Plain(precision, num_ranks, accumulation)
    found: dict[str, Any] = {}

    def note(when: str) -> None:
        found[f"{when}: gradients"] = {name: master.grad for name, master in plain.masters.items()}
        if "backward" in when:
            return
        states = [plain.optimizer.state.get(master, {}) for master in plain.masters.values()]
        for key in KEYS:
            values = {n: state.get(key) for n, state in zip(plain.masters, states, strict=True)}
            found[f"{when}: {key}"] = {name: None if v is None else v.clone() for name, v in values.items()}
        found[f"{when}: masters"] = {name: master.detach().clone() for name, master in plain.masters.items()}

    note("at first")
    for step in range(2):
        for micro in range(accumulation):
            plain.backward(10 * step + micro)
            note(f"{step}.{micro} after backward")
        plain.step()
        note(f"{step} after the step")
    found["no such key"] = dict.fromkeys(plain.masters)
    return found


CASES = {  # stages and micro-steps: every two of precision, stage and number of micro-steps meet
    "fp32": [(0, 1), (1, 2), (2, 2), (3, 1)],
    "bf16": [(0, 2), (1, 1), (2, 1), (3, 2)],
    "fp16": [(1, 2), (2, 1), (3, 2)],
}


def all_readings(precision: str) -> dict[tuple[int, int], dict[str, Any]]:
    cases = (
        CASES[precision]
        if dist.get_world_size() == 2
        else [{"fp32": (3, 1), "bf16": (1, 2), "fp16": (3, 2)}[precision]]
    )
    return {(stage, accumulation): readings(stage, precision, accumulation) for stage, accumulation in cases}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("precision", list(DTYPES))
def test_whole_state_is_the_plain_optimizers(ranks: Ranks, precision: str, num_ranks: int) -> None:
    rtol, atol = NEAR[precision]
    expected = {g: plain_readings(precision, num_ranks, g) for g in (1, 2)}
    for answer in ranks.run(num_ranks, all_readings, precision):
        for (stage, accumulation), found in answer.items():
            wanted = expected[accumulation]
            assert found.keys() == wanted.keys()
            for what in wanted:
                for name in wanted[what]:
                    where = f"{what} of {name} at stage {stage}"
                    near(found[what][name], wanted[what][name], rtol, atol, where)


def parts(stage: int, precision: str) -> dict[str, Any]:
    """This rank's parts, next to the whole values."""
    engine = initialize(stage, precision)
    backward(engine, 0)
    engine.step()
    backward(engine, 1)
    whole = {
        "master": utils.safe_get_full_fp32_param,
        "gradient": utils.safe_get_full_grad,
        "exp_avg": lambda p: utils.safe_get_full_optimizer_state(p, "exp_avg"),
    }
    local = {
        "master": utils.safe_get_local_fp32_param,
        "gradient": utils.safe_get_local_grad,
        "exp_avg": lambda p: utils.safe_get_local_optimizer_state(p, "exp_avg"),
    }
    strides = read(engine, lambda p: p.stride())
    return {
        "whole": {what: read(engine, ask) for what, ask in whole.items()},
        "local": {what: read(engine, ask) for what, ask in local.items()},
        "strides": strides,
    }


def all_parts() -> dict[tuple[str, int], dict[str, Any]]:
    """Each stage in two precisions, on three ranks in one."""
    stages = {"fp32": (0, 3), "bf16": (1, 3), "fp16": (2, 0)}
    if dist.get_world_size() == 2:
        stages = {"fp32": (0, 1, 2, 3), "bf16": (1, 3), "fp16": (2, 0)}
    return {(precision, stage): parts(stage, precision) for precision in DTYPES for stage in stages[precision]}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_local_parts_make_up_the_whole(ranks: Ranks, num_ranks: int) -> None:
    by_rank = ranks.run(num_ranks, all_parts)
    for precision, stage in by_rank[0]:
        answers = [answer[precision, stage] for answer in by_rank]
        holders = set()
        for what, by_name in answers[0]["whole"].items():
            for name, whole in by_name.items():
                every = [answer["local"][what][name] for answer in answers]
                held = [torch.as_tensor(part) for part in every if part is not None]
                holders.add(len(held))
                flat = in_memory_order(torch.as_tensor(whole), answers[0]["strides"][name])
                for part in held if stage == 0 else [torch.cat(held)]:
                    assert torch.equal(part, flat), f"{what} of {name} at stage {stage} in {precision}"
        assert holders == ({num_ranks} if stage == 0 else holders - {0})
        assert stage == 0 or 1 in holders, "no parameter lies on one rank alone"


# --------------------------------------------------------------------------------------------------------- divergence


def one_asks(stage: int, what: str, warm_up: int) -> tuple[str, float]:
    """Rank 0 reads something while the others train on."""
    engine = initialize(stage, shardwell={"divergence_timeout": 1.0})
    for step in range(warm_up):
        backward(engine, step)
        engine.step()
    parameter = engine.module.blocks[0][0].weight
    start = time.monotonic()
    try:
        if engine.global_rank == 0:
            if what == "state":
                utils.safe_get_full_optimizer_state(parameter, "exp_avg")
            elif what == "state dict":
                engine.state_dict()
            else:
                utils.safe_get_full_fp32_param(parameter)
        backward(engine, warm_up)
        engine.step()
    except shardwell.ShardwellError as error:
        return type(error).__name__, time.monotonic() - start
    return "", time.monotonic() - start


@pytest.mark.parametrize(
    ("stage", "what", "warm_up"),
    [(0, "state", 1), (1, "master", 0), (1, "master", 1), (2, "state", 0), (3, "state dict", 0), (3, "state dict", 1)],
)
def test_a_rank_that_asks_alone_gets_an_error_and_no_hang(ranks: Ranks, stage: int, what: str, warm_up: int) -> None:
    answers = ranks.run(2, one_asks, stage, what, warm_up)
    errors = [error for error, _ in answers]
    assert "DivergenceError" in errors
    assert set(errors) <= {"DivergenceError", "PeerError"}
    assert all(seconds < soon(12) for _, seconds in answers)


def one_asks_for_its_part(stage: int, block: dict[str, Any], asks: bool) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Rank 0 looks at its parts of gradients again and again; what it is told is sorted by when."""
    config = {"gradient_accumulation_steps": 2, "shardwell": {"divergence_timeout": 5.0}, "zero_optimization": block}
    engine = initialize(stage, **config)
    answers: dict[str, list[str]] = {}

    def ask(when: str) -> None:
        for name, parameter in engine.module.named_parameters() if asks and engine.global_rank == 0 else ():
            try:
                part = utils.safe_get_local_grad(parameter)
                answers.setdefault(f"{when}: {'none' if part is None else 'found'}", []).append(name)
            except shardwell.ShardwellError as error:
                answers.setdefault(f"{when}: {'refused' if 'on all ranks' in str(error) else error}", []).append(name)

    for step in range(4):
        backward(engine, step)
        ask("at the boundary" if step % 2 else "before")
        if asks and step == 3:
            read(engine, utils.safe_get_full_grad)
            ask("after all did")
        engine.step()
    ask("after the step")
    return read(engine, utils.safe_get_full_fp32_param), answers


@pytest.mark.parametrize(
    ("stage", "block"), [*((stage, {}) for stage in STAGES), *((stage, HOST) for stage in (1, 3))], ids=str
)
def test_a_rank_asks_alone_for_its_part_of_a_gradient_or_is_refused(ranks: Ranks, stage: int, block: Any) -> None:
    (expected, _), (values, answers) = (ranks.run(2, one_asks_for_its_part, stage, block, asks)[0] for asks in (0, 1))
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(values[name])), name
    assert ("before: refused" in answers) == (stage < 2)
    assert ("before: found" in answers) == (stage >= 2)
    assert "at the boundary: found" in answers
    assert ("at the boundary: refused" in answers) == (stage == 0)  # the last unit is on its way to all
    assert "after all did: refused" not in answers
    assert {when.split(": ")[1] for when in answers} <= {"found", "none", "refused"}
    assert answers.keys() & {"after the step: found", "after the step: refused"} == set()
