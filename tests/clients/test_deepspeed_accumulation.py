"""DeepSpeed's keys about how gradients are summed and in which dtypes states are kept: as in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwell.compat.deepspeed_api.initialization import initialize
from shardwell.errors import ConfigError
from tests.support.ranks import Ranks

STAGES = [0, 1, 2, 3]


def network(sparse: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(12, 6, sparse=sparse), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(12, (4, 2), generator=torch.Generator().manual_seed(10 * step + rank))


def settings(stage: int, **others: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **others,
    }


def plain(windows: list[int], divisor: float, lr: float, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Train in one process on the batches of both ranks: each window of micro-steps is one update."""
    model, step = network().to(dtype), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for window in windows:
        for _ in range(window):
            for rank in range(2):
                (model(batch(step, rank)).float().square().mean() / divisor).backward()
            step += 1
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def trained(windows: list[int], config: dict[str, Any], lr: float, *, by_optimizer: bool = False) -> list[Any]:
    """Train on two ranks with one update for each window; return how far the weights are from those of one process."""
    model, step = network(sparse=bool(config.get("sparse_gradients"))), 0
    own = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    engine, *_ = initialize(model=model, optimizer=own, config=config)
    is_managed = engine.managed_gradient_accumulation()
    boundaries = []
    for window in windows:
        for _ in range(window):
            engine.backward(engine(batch(step, dist.get_rank())).float().square().mean())
            step += 1
            boundaries.append(engine.is_gradient_accumulation_boundary())
            if is_managed:
                engine.step()
        if not is_managed:
            (own if by_optimizer else engine).step()
    dtypes = sorted({str(v.dtype) for one in engine.optimizer.inner.state.values() for v in one.values() if v.ndim})
    whole = engine.module_state_dict()
    counts = [engine.global_steps, engine.global_samples, sum(boundaries)]
    engine.destroy()
    return [whole, counts, dtypes]


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((torch.as_tensor(found[k]).float() - expected[k].float()).abs().max()) for k in expected)


def run_all(cases: list[tuple[list[int], dict[str, Any], float, bool]]) -> list[Any]:
    return [trained(windows, config, lr, by_optimizer=own) for windows, config, lr, own in cases]


def test_gradients_are_summed_over_ranks_where_the_configuration_says_so(ranks: Ranks) -> None:
    asked = {"gradient_allreduce_op": "SUM", "gradient_accumulation_steps": 2}
    cases = [([2, 2], settings(stage, **asked), 1e-3, False) for stage in STAGES]
    prescaled = settings(2, **asked, prescale_gradients=True)
    for found, *_ in ranks.run(2, run_all, [*cases, ([2, 2], prescaled, 1e-3, False)])[0]:
        assert apart(found, plain([2, 2], 2.0, 1e-3)) < 2e-5  # divided by the micro-steps, not by the ranks


def test_a_sum_has_the_norm_of_a_sum(ranks: Ranks) -> None:
    for mean, total in ranks.run(2, norms)[0]:
        assert total == pytest.approx(2 * mean, rel=1e-5)


def norms() -> list[tuple[float, float]]:
    found = []
    for stage in STAGES:
        both = []
        for op in ("mean", "sum"):
            model = network()
            own = torch.optim.SGD(model.parameters(), lr=0.1)
            engine, *_ = initialize(model=model, optimizer=own, config=settings(stage, gradient_allreduce_op=op))
            engine.backward(engine(batch(0, dist.get_rank())).square().mean())
            engine.step()
            both.append(float(engine.get_global_grad_norm()))
            engine.destroy()
        found.append((both[0], both[1]))
    return found


def test_every_step_is_a_boundary_where_accumulation_is_not_managed(ranks: Ranks) -> None:
    windows = [3, 1, 2]
    cases = [
        (windows, settings(stage, managed_gradient_accumulation=False, gradient_accumulation_steps=2), 1e-3, own)
        for stage in STAGES
        for own in (False, True)
    ]
    offloaded = settings(2, managed_gradient_accumulation=False, gradient_accumulation_steps=2)
    offloaded["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    expected = plain(windows, 2.0 * 2, 1e-3)
    for found, counts, _ in ranks.run(2, run_all, [*cases, (windows, offloaded, 1e-3, False)])[0]:
        assert apart(found, expected) < 2e-5
        assert counts == [3, 6 * 4 * 2, 0]


def test_master_weights_and_states_may_be_bf16(ranks: Ranks) -> None:
    block = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    cases = [([1, 1], settings(stage, bf16=block), 1e-2, False) for stage in STAGES]
    offloaded = settings(3, bf16=block)
    offloaded["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    expected = plain([1, 1], 2.0, 1e-2, torch.bfloat16)
    for found, _, dtypes in ranks.run(2, run_all, [*cases, ([1, 1], offloaded, 1e-2, False)])[0]:
        assert dtypes == ["torch.bfloat16"]
        assert apart(found, expected) < 1e-2  # half of a step: rounding decides the sign of gradients near zero


def test_sparse_embeddings_train_as_dense_ones(ranks: Ranks) -> None:
    cases = [([1, 1], settings(stage, sparse_gradients=True), 1e-3, False) for stage in STAGES]
    for found, *_ in ranks.run(2, run_all, cases)[0]:
        assert apart(found, plain([1, 1], 2.0, 1e-3)) < 2e-5


def calls_that_need_counted_boundaries() -> list[str]:
    config = settings(1, managed_gradient_accumulation=False, optimizer={"type": "Adam", "params": {}})
    engine, *_ = initialize(model=network(), config=config)
    found = []
    for act in (
        lambda: engine.set_gradient_accumulation_boundary(True),
        lambda: engine.coalesce_grad_reduction().__enter__(),
    ):
        try:
            act()
        except AssertionError as error:
            found.append(str(error))
    for block in ({"bf16_master_weights_and_grads": True}, {"bf16_optimizer_states": True}):
        try:
            initialize(model=network(), config=settings(1, bf16={"enabled": True, **block}))
        except ConfigError as error:
            found.append(str(error))
    return found


def test_what_contradicts_these_keys_is_refused(ranks: Ranks) -> None:
    found = ranks.run(1, calls_that_need_counted_boundaries)[0]
    assert len(found) == 4
    assert all("managed_gradient_accumulation" in one for one in found[:2])
    assert all("set both to true" in one for one in found[2:])
