"""Between backward and step, with updates in other memory: nobody sees them, and what is changed then counts.

Whatever is done there, a shadow gives the bits of an update after the norm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.errors import ReleasedParameterError
from shardwell.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from tests.support.internals import updates_if_any
from tests.support.models import whole_parameters, zero
from tests.support.offload_cases import PRECISIONS, check_equal
from tests.support.ranks import Ranks
from tests.support.updates_in_flight import slowly

Engine = shardwell.Engine
Change = Callable[[Engine], Iterator[None]]  # until it yields: before backward; then: before the step
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),  # no kernel: stepped in line
}
MOMENTS = {"AdamW": "exp_avg", "SGD": "momentum_buffer", "NAdam": "exp_avg"}


class Net(nn.Module):
    """Three units of a large and a small parameter, which shards cut through."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(13, 13) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.float().square().mean()


def engine_for(commit: str, stage: int, name: str, clip: float, precision: str = "bf16", **others: Any) -> Engine:
    """Units with large parameters on the host, and small ones that stay whole on the device."""
    torch.manual_seed(0)
    model = Net()
    config = zero(
        stage,
        zero_optimization={"offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 100},
        gradient_clipping=clip,
        shardwell={"commit": commit, "shard_at_world_one": True, "divergence_timeout": 10},
        **PRECISIONS[precision],
        **others,
    )
    optimizer = OPTIMIZERS[name](model.parameters())
    return shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine


def rows(number: int) -> Tensor:
    """Of a step, on this rank."""
    return torch.randn(2, 13, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def backward(engine: Engine, number: int) -> None:
    engine.backward(engine(rows(number)))


def is_ahead(engine: Engine) -> bool:
    """Some update was begun before the norm is known."""
    queue = updates_if_any(engine)
    return queue is not None and bool(queue._jobs)


def end_updates(engine: Engine) -> None:
    """The worker has done what was begun."""
    queue = updates_if_any(engine)
    for job in queue._jobs.values() if queue is not None else ():
        job.tickets[0].wait()


# -------------------------------------------------------------------------------------------------------- changing


def two(engine: Engine) -> list[nn.Parameter]:
    """A parameter that is released at stage 3, and one that is not."""
    return [engine.module.blocks[0].weight, engine.module.blocks[1].bias]


def nothing(engine: Engine) -> Iterator[None]:
    yield


def masters(engine: Engine) -> Iterator[None]:
    yield
    for parameter in two(engine):
        safe_set_full_fp32_param(parameter, safe_get_full_fp32_param(parameter) * 0.5)


def gathered(engine: Engine) -> Iterator[None]:
    yield
    with shardwell.zero.GatheredParameters(two(engine), modifier_rank=0), torch.no_grad():
        for parameter in two(engine):
            parameter.mul_(0.5)


def open_since_before(engine: Engine) -> Iterator[None]:
    with shardwell.zero.GatheredParameters(two(engine), modifier_rank=0), torch.no_grad():
        with torch.enable_grad():
            yield
        for parameter in two(engine):
            parameter.mul_(0.5)


def model_state(engine: Engine) -> Iterator[None]:
    yield
    engine.load_state_dict({name: value * 0.5 for name, value in engine.state_dict().items()})


def gradients(engine: Engine) -> Iterator[None]:
    yield
    for parameter in two(engine):
        gradient = safe_get_full_grad(parameter)
        assert gradient is not None
        safe_set_full_grad(parameter, gradient * 3)


def moments(engine: Engine) -> Iterator[None]:
    yield
    key = MOMENTS[type(engine.optimizer.inner).__name__]
    for parameter in two(engine) if engine.global_steps else ():
        before = safe_get_full_optimizer_state(parameter, key)
        safe_set_full_optimizer_state(parameter, before * 0.5, key)


def optimizer_state(engine: Engine) -> Iterator[None]:
    yield
    found = engine.optimizer.state_dict()
    found["state"] = {number: {key: value * 2 for key, value in one.items()} for number, one in found["state"].items()}
    engine.optimizer.load_state_dict(found)


def hyperparameter(key: str) -> Change:
    def change(engine: Engine) -> Iterator[None]:
        yield
        for group in engine.optimizer.param_groups:
            group[key] = 2 * group[key] + 0.1

    return change


def on_one_rank(engine: Engine) -> Iterator[None]:
    """Rank 0 changes its own part of what others have no copy of."""
    yield
    weight = two(engine)[0]
    if dist.get_rank() == 0:
        part = safe_get_local_fp32_param(weight)
        if part is not None and engine.zero_optimization_stage() == 3:
            safe_set_local_fp32_param(weight, part * 0.5)
        if part is not None and engine.global_steps:
            key = MOMENTS[type(engine.optimizer.inner).__name__]
            safe_set_local_optimizer_state(weight, torch.full_like(part, 0.01), key)


def another_backward(engine: Engine) -> Iterator[None]:
    yield
    backward(engine, 3)


def same_graph_again(engine: Engine) -> Iterator[None]:
    yield
    loss = engine(rows(3))
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)


CHANGES: dict[str, Change] = {
    "nothing": nothing,
    "masters": masters,
    "gathered": gathered,
    "open since before": open_since_before,
    "the model's state": model_state,
    "gradients": gradients,
    "moments": moments,
    "the optimizer's state": optimizer_state,
    "the learning rate": hyperparameter("lr"),
    "weight decay": hyperparameter("weight_decay"),
    "on one rank": on_one_rank,
    "another backward": another_backward,
    "the same graph again": same_graph_again,
}


def changed(commit: str, what: str, *args: Any, **others: Any) -> tuple[dict[str, Any], list[bool]]:
    """All values after steps of which two were changed; and whether updates had begun there.

    At the first the worker is behind, at the other it is done. Between them it may pause.
    """
    engine = engine_for(commit, *args, **others)
    begun = []
    for number in range(3):
        while not engine.is_gradient_accumulation_boundary():
            backward(engine, number)
            engine.step()
        change = CHANGES[what if number in (0, 2) else "nothing"](engine)
        next(change)
        with slowly() if number == 0 else contextlib.nullcontext():
            backward(engine, number)
            if number in (0, 2):
                begun.append(is_ahead(engine))
            if number == 2:
                end_updates(engine)
            next(change, None)
            engine.step()
    found = values(engine)
    engine.destroy(whole=False)  # the threads of its links would wake up now and then
    return found, begun


def values(engine: Engine) -> dict[str, Any]:
    """Parameters, and this rank's part of masters and state."""
    found: dict[str, Any] = dict(whole_parameters(engine.module))
    for name, parameter in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer", "mu_product", "step"):
            found[f"{name} {key}"] = safe_get_local_optimizer_state(parameter, key)
        found[f"{name} master"] = safe_get_local_fp32_param(parameter)
    return {name: torch.as_tensor(value).clone() for name, value in found.items() if value is not None}


def all_changed(names: list[str], *args: Any) -> dict[str, list[tuple[dict[str, Any], list[bool]]]]:
    return {what: [changed(commit, what, *args) for commit in ("after_norm", "shadow")] for what in names}


def check_changes(found: dict[str, list[tuple[dict[str, Any], list[bool]]]], *, speculates: bool = True) -> None:
    unchanged = found["nothing"][0][0]
    for what, ((expected, waited), (values, begun)) in found.items():
        assert not any(waited), what
        assert begun[0] == any(begun) == speculates, what  # after a step that was clipped, speculation may pause
        assert values.keys() == expected.keys(), what
        differ = [name for name in expected if not np.array_equal(values[name], expected[name])]
        assert not differ, (what, differ)
        if what not in ("nothing", "on one rank"):
            assert any(not np.array_equal(unchanged[name], expected[name]) for name in unchanged), what


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "stage", "clip", "precision"),
    [(1, 2, 0.0, "fp32"), *((2, stage, *how) for stage in (1, 2, 3) for how in ((0.0, "fp32"), (0.01, "bf16")))],
)
def test_what_is_changed_before_the_step_counts(
    ranks: Ranks, num_ranks: int, stage: int, clip: float, precision: str
) -> None:
    """Each change is met at two stages, clipped at one of them and not clipped at the other; a rank alone has a few."""
    names = ["nothing", *list(CHANGES)[1 + (stage + num_ranks + (clip > 0)) % 3 :: 3]][: 3 if num_ranks == 1 else None]
    for found in ranks.run(num_ranks, all_changed, names, stage, "AdamW", clip, precision):
        check_changes(found)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "clip", "precision"), [(1, 0.0, "bf16"), (2, 0.01, "fp32"), (3, 0.01, "bf16")])
def test_it_counts_where_updates_are_done_in_line(ranks: Ranks, stage: int, clip: float, precision: str) -> None:
    """The stages share the changes."""
    names = ["nothing", *list(CHANGES)[stage::3]]
    for found in ranks.run(2, all_changed, names, stage, "NAdam", clip, precision):
        check_changes(found, speculates=False)


@pytest.mark.parametrize(
    ("what", "others"),
    [("masters", {"gradient_accumulation_steps": 2}), ("gathered", {}), ("another backward", {})],
)
def test_sums_of_micro_steps_and_loss_scales_stay(ranks: Ranks, what: str, others: dict[str, Any]) -> None:
    for stage in (2, 3) if others else (3,):
        (expected, _), (found, begun) = (
            ranks.run(2, changed, commit, what, stage, "AdamW", 1e-4, "fp16", **others)[0]
            for commit in ("after_norm", "shadow")
        )
        assert any(begun)
        check_equal(found, expected)


def with_state_before_the_first_step(commit: str) -> dict[str, Any]:
    engine = engine_for(commit, 2, "SGD", 0.0)
    for number in range(3):
        backward(engine, number)
        for parameter in two(engine) if number == 0 else ():
            assert safe_get_full_optimizer_state(parameter, "momentum_buffer") is None
            safe_set_full_optimizer_state(parameter, torch.ones(parameter.shape), "momentum_buffer")
        engine.step()
    return values(engine)


def test_state_may_be_set_before_there_is_any(ranks: Ranks) -> None:
    expected, found = (ranks.run(2, with_state_before_the_first_step, c)[0] for c in ("after_norm", "shadow"))
    check_equal(found, expected)


# --------------------------------------------------------------------------------------------------------- looking


def read_directly(engine: Engine) -> dict[str, Any]:
    """Parameters that are whole, as any code of the user would read them."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        with contextlib.suppress(ReleasedParameterError), torch.no_grad():
            found[name] = parameter.detach().clone()
    return found


def losses(engine: Engine) -> dict[str, Any]:
    with torch.no_grad():
        return {"loss": engine(rows(9))}


def in_part(engine: Engine) -> dict[str, Any]:
    with torch.no_grad():
        return {"output": engine.module.blocks[1](torch.ones(2, 13).to(engine.module.blocks[1].bias.dtype))}


LOOKS: dict[str, Callable[[Engine], dict[str, Any]]] = {
    "directly": read_directly,
    "values": values,
    "loss": losses,
    "a part": in_part,
    "state": lambda engine: engine.state_dict(),
}


def seen(commit: str, look: str, alone: bool, *args: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What is seen before a backward and after it, by one rank or by all; and values after a loss and the step."""
    engine = engine_for(commit, *args)
    backward(engine, 0)
    engine.step()
    engine.state_dict()  # what the step began has ended
    found = []
    for number in (1, 2):
        is_mine = not alone or dist.get_rank() == 0
        found.append(LOOKS[look](engine) if is_mine else {})
        with slowly() if number == 1 else contextlib.nullcontext():
            backward(engine, number)
            if number == 2:
                end_updates(engine)
            found.append(LOOKS[look](engine) if is_mine else {})
            losses(engine)
            engine.step()
        engine.state_dict()
    return [{name: value.clone() for name, value in one.items()} for one in found], values(engine)


@pytest.mark.parametrize(  # every pair of values
    ("name", "stage", "clip"),
    [
        ("AdamW", 1, 0.0),
        ("AdamW", 2, 0.01),
        ("AdamW", 3, 0.0),
        ("NAdam", 1, 0.01),
        ("NAdam", 2, 0.0),
        ("NAdam", 3, 0.01),
    ],
)
def test_nobody_sees_what_is_not_true_yet(ranks: Ranks, name: str, stage: int, clip: float) -> None:
    """Each look is met at each stage, and with both optimizers."""
    looks_of_all = [("directly", True), *((look, False) for look in LOOKS)]
    for look, alone in looks_of_all[(stage + (name == "NAdam")) % 2 :: 2]:
        if not (look == "a part" and stage == 3):  # released
            expected, shadows = (
                ranks.run(2, seen, commit, look, alone, stage, name, clip) for commit in ("after_norm", "shadow")
            )
            for (looks, after), (its_looks, its_after) in zip(shadows, expected, strict=True):
                check_equal(looks[1], looks[0])
                for one, other in zip(looks, its_looks, strict=True):
                    check_equal(one, other)
                check_equal(after, its_after)


def taken_back(stage: int, name: str) -> tuple[list[bool], int]:
    """Whether updates were begun ahead of the norm in ordinary training, and how many of them were taken back."""
    engine = engine_for("shadow", stage, name, 100.0)
    begun: list[bool] = []
    back: list[Any] = []
    executor = engine.optimizer.executor
    getattr(executor, "device", executor).unpublished.revoke = back.append
    for number in range(3):
        backward(engine, number)
        begun.append(is_ahead(engine))
        engine.step()
    return begun, len(back)


@pytest.mark.parametrize(("name", "stage"), [*(("AdamW", stage) for stage in range(4)), ("NAdam", 3)])
def test_where_nobody_looks_nothing_is_taken_back(ranks: Ranks, name: str, stage: int) -> None:
    assert ranks.run(2, taken_back, stage, name) == [([name == "AdamW"] * 3, 0)] * 2
