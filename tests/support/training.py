"""The same training run twice: plainly in one process, and sharded over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from tests.support.models import Gpt, batches, share, whole_parameters, zero

ROWS = 48  # divides by every world size and accumulation in the tests


@dataclass(frozen=True)
class Case:
    """One training run.

    Four steps are enough where no other number is given: the first records the order of units, the second prefetches by
    it, and from the third on steps are alike, in memory that was used before and with moments of several steps. Two
    blocks are: one is gathered while the other computes.
    """

    steps: int = 4
    accumulation: int = 1
    clip: float = 0.0
    groups: bool = False
    born_sharded: bool = False
    dtype: torch.dtype = torch.float64
    optimizer: str = "AdamW"
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2, "weight_decay": 0.1})
    model: dict[str, Any] = field(default_factory=lambda: {"blocks": 2})
    config: dict[str, Any] = field(default_factory=dict)
    plain_backward: bool = False

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            return Gpt(**self.model)
        finally:
            torch.set_default_dtype(before)

    def parameters(self, model: nn.Module) -> list[Any]:
        """One parameter group, or two with different learning rates and decay."""
        if not self.groups:
            return list(model.parameters())
        decay = [p for p in model.parameters() if p.ndim >= 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        return [{"params": decay, "lr": 2e-2}, {"params": rest, "weight_decay": 0.0}]

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.optimizer)(self.parameters(model), **self.options)


_known: dict[str, tuple[dict[str, Tensor], dict[str, float]]] = {}


def plainly(case: Case) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Plain PyTorch on the concatenated batch; also the largest gradient that each parameter ever had."""
    key = repr(replace(case, born_sharded=False, plain_backward=False, config={}))  # these are not for plain runs
    if key not in _known:
        _known[key] = _plainly(case)
    parameters, largest = _known[key]
    return {name: values.clone() for name, values in parameters.items()}, dict(largest)


def _plainly(case: Case) -> tuple[dict[str, Tensor], dict[str, float]]:
    model = case.build()
    optimizer = case.make_optimizer(model)
    largest = dict.fromkeys((name for name, _ in model.named_parameters()), 0.0)
    for batch in batches(case.steps, ROWS):
        optimizer.zero_grad()
        for micro in batch.chunk(case.accumulation):
            (model(micro) / case.accumulation).backward()
        for name, parameter in model.named_parameters():
            largest[name] = max(largest[name], float(parameter.grad.abs().max()))
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, largest


def sharded(case: Case, stage: int) -> dict[str, Tensor]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    config = zero(
        stage,
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=case.accumulation,
        gradient_clipping=case.clip,
        **{"shardwell": {"shard_at_world_one": True}, **case.config},
    )
    with shardwell.zero.Init(config_dict_or_path=config, enabled=case.born_sharded):
        model = case.build()
    engine, *_ = shardwell.initialize(model=model, optimizer=case.make_optimizer(model), config=config)
    for batch in batches(case.steps, ROWS):
        for micro in range(case.accumulation):
            loss = engine(share(batch, rank, num_ranks, micro, case.accumulation))
            if case.plain_backward:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
    found = whole_parameters(model)
    engine.destroy(whole=False)  # many of them in one job would have many threads of gloo's, which wake up now and then
    return found


def all_sharded(cases: list[Case], stage: int) -> list[dict[str, Tensor]]:
    return [sharded(case, stage) for case in cases]


def distance(
    found: dict[str, Any], expected: dict[str, Tensor], leave_out: set[str] = frozenset()
) -> tuple[float, str]:  # type: ignore[assignment]
    """The largest relative difference of any tensor, by norm, and which tensor it is."""
    worst = (0.0, "")
    for name, reference in expected.items():
        if name not in leave_out:
            there = torch.as_tensor(found[name]).double()
            difference = (there - reference.double()).norm() / reference.double().norm().clamp(min=1e-30)
            size = float(difference) if torch.isfinite(difference) else float("inf")  # NaN compares as nothing
            worst = max(worst, (size, name))
    return worst
