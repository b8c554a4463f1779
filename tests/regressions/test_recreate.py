"""Pain: an engine cannot be made again in the same process, and what it leaves behind grows."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.optim import param_access
from tests.support.internals import groups_of, roles_of
from tests.support.live_bytes import live_bytes
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.patience import soon
from tests.support.ranks import Ranks
from tests.support.training import distance

ROUNDS = 6
MORE = ROUNDS // 2  # threads or files in the end: fewer than one for each engine


def make(stage: int, **config: Any) -> shardwell.Engine:
    torch.manual_seed(0)
    model = Gpt(blocks=2).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage, **config)).engine


def train(engine: shardwell.Engine, num_steps: int = 2, seed: int = 1) -> list[float]:
    losses = []
    for batch in batches(num_steps, 12, seed=seed):
        for micro in range(engine.gradient_accumulation_steps()):
            steps = engine.gradient_accumulation_steps()
            loss = engine(share(batch, dist.get_rank(), dist.get_world_size(), micro, steps))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def num_hooks(model: nn.Module) -> int:
    of_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    of_modules += sum(len(m._backward_hooks) + len(m._backward_pre_hooks) for m in model.modules())
    return of_modules + sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())


def come_and_go(stage: int) -> dict[str, list[Any]]:
    """What is left of many engines: bytes (after the first and the last), threads, files, hooks, and their losses."""
    left: dict[str, list[Any]] = {key: [] for key in ("bytes", "threads", "files", "hooks", "losses")}
    for turn in range(ROUNDS):
        engine = make(stage)
        model = engine.module
        left["losses"].append(train(engine))
        engine.destroy()
        left["hooks"].append(num_hooks(model))
        del engine, model
        if turn in (0, ROUNDS - 1):
            left["bytes"].append(live_bytes())  # this collects garbage
            await_few(left)
    return left


def await_few(left: dict[str, list[Any]]) -> None:
    """Count threads and files; those of gloo end a little later than their group."""
    deadline = time.monotonic() + soon(5.0)
    while True:
        counts = {"threads": len(os.listdir("/proc/self/task")), "files": len(os.listdir("/proc/self/fd"))}
        if all(counts[key] <= left[key][0] + MORE for key in counts if left[key]) or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    for key, count in counts.items():
        left[key].append(count)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_engines_come_and_go_and_leave_nothing_behind(ranks: Ranks, stage: int) -> None:
    """Global state keeps every engine alive; here bytes, hooks, threads and files stay what they were."""
    for left in ranks.run(2, come_and_go, stage):
        assert left["hooks"] == [0] * ROUNDS
        assert left["bytes"][-1] <= left["bytes"][0] + 1024
        assert left["threads"][-1] <= left["threads"][0] + MORE
        assert left["files"][-1] <= left["files"][0] + MORE
        assert all(losses == left["losses"][0] for losses in left["losses"])


def hand_over(stages: tuple[int, int]) -> dict[str, Tensor]:
    """The values of a destroyed engine go on in a new one, with a new optimizer."""
    first = make(stages[0])
    train(first, seed=1)
    state = first.state_dict()
    first.destroy()
    del first
    model = Gpt(blocks=2).double()
    model.load_state_dict(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    second = shardwell.initialize(model=model, optimizer=optimizer, config=zero(stages[1])).engine
    train(second, seed=2)
    return whole_parameters(model)


@pytest.mark.parametrize("stages", [(3, 3), (3, 1), (1, 3), (2, 0)], ids=str)
def test_the_values_of_a_destroyed_engine_go_on_in_a_new_one(ranks: Ranks, stages: tuple[int, int]) -> None:
    """A second engine finds the first one's leftovers; here it starts from the state that the first one gave."""
    torch.manual_seed(0)
    model = Gpt(blocks=2).double()
    for seed in (1, 2):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for batch in batches(2, 12, seed=seed):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for found in ranks.run(2, hand_over, stages):
        difference, name = distance(found, expected)
        assert difference < 1e-10, f"{name} differs by {difference}"


CONFIGS = [
    (3, {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1}),
    (1, {"bf16": {"enabled": True}}),
    (3, {"zero_optimization": {"stage3_param_persistence_threshold": 100}}),
]


def side_by_side() -> tuple[list[list[float]], list[list[float]]]:
    """Losses of several engines that take turns, and of the same engines one after the other."""
    engines = [make(stage, **config) for stage, config in CONFIGS]
    together: list[list[float]] = [[] for _ in engines]
    for turn in range(3):
        for engine, losses in zip(engines, together, strict=True):
            losses += train(engine, 1, seed=turn)
    for engine in engines:
        engine.destroy()
    alone = []
    for stage, config in CONFIGS:
        engine = make(stage, **config)
        alone.append([loss for turn in range(3) for loss in train(engine, 1, seed=turn)])
        engine.destroy()
    return together, alone


@pytest.mark.slow
def test_engines_of_different_configurations_do_not_touch_each_other(ranks: Ranks) -> None:
    """The last configuration holds for all engines; here each keeps its own, also while they take turns."""
    for together, alone in ranks.run(2, side_by_side):
        assert together == alone
        assert len({tuple(losses) for losses in together}) == len(CONFIGS)


def given_back(stage: int, together: int) -> dict[str, Any]:
    """The parameters before and after a `destroy`, which reads so many elements at once, and its collectives."""
    usual, param_access.READ_TOGETHER = param_access.READ_TOGETHER, together
    try:
        engine = make(stage)
        train(engine, 1)
        before, tokens = whole_parameters(engine.module), roles_of(engine).agreement.tokens
        announced, num_groups, model = tokens.num_announced, len(groups_of(engine)), engine.module
        engine.destroy()
    finally:
        param_access.READ_TOGETHER = usual
    after = {name: parameter.detach() for name, parameter in model.named_parameters()}
    same = [torch.equal(before[name], value) for name, value in after.items()]
    return {"same": same, "collectives": tokens.num_announced - announced, "groups": num_groups}


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_gives_small_parameters_back_in_a_collective_for_each_of_its_groups(ranks: Ranks, stage: int) -> None:
    for found in ranks.run(2, given_back, stage, 1 << 18):
        assert all(found["same"])
        assert len(found["same"]) > 20
        assert found["collectives"] <= found["groups"] + 1  # all ranks meet first
    for found in ranks.run(3, given_back, stage, 100):  # most are large then, and have collectives of their own
        assert all(found["same"])
        assert found["collectives"] > found["groups"] + 10
