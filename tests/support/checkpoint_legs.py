"""Training in legs: each goes on from a checkpoint, at its own stage, precision and number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.checkpoint import checksums
from shardwell.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state
from tests.support.internals import place_of_part
from tests.support.models import batches, share, zero
from tests.support.training import ROWS, Case

KEYS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Leg:
    """Some steps of a training run."""

    stage: int
    first: int  # step
    last: int  # not included
    case: Case = Case()  # noqa: RUF009
    config: dict[str, Any] = field(default_factory=dict)
    loads: bool = True
    saves: bool = True
    options: dict[str, Any] = field(default_factory=dict)  # of save_checkpoint

    def engine(self) -> shardwell.Engine:
        config = zero(
            self.stage,
            train_micro_batch_size_per_gpu=1,
            gradient_accumulation_steps=self.case.accumulation,
            gradient_clipping=self.case.clip,
            **{"shardwell": {"shard_at_world_one": True}, **self.config},
        )
        model = self.case.build()
        if self.loads:
            scramble(model)
        return shardwell.initialize(model=model, optimizer=self.case.make_optimizer(model), config=config).engine


def scramble(model: nn.Module) -> None:
    """Nothing of what is loaded may be there before."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.3)
        for buffer in model.buffers():
            buffer.fill_(7.0)


def train(engine: shardwell.Engine, leg: Leg) -> list[float]:
    """The losses of this rank, a number for each micro-step."""
    losses = []
    for batch in batches(leg.last, ROWS)[leg.first :]:
        for micro in range(leg.case.accumulation):
            loss = engine(share(batch, dist.get_rank(), dist.get_world_size(), micro, leg.case.accumulation))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


def run_leg(leg: Leg, root: str) -> dict[str, Any]:
    engine = leg.engine()
    path = engine.load_checkpoint(root)[0] if leg.loads else None
    loaded = everything(engine) if leg.loads else {}
    losses = train(engine, leg)
    if leg.saves:
        engine.save_checkpoint(root, **leg.options)
    engine.finish_saving()
    return {"path": path, "losses": losses, "steps": engine.global_steps, "loaded": loaded, "ended": everything(engine)}


def run_leg_in_blocks(leg: Leg, root: str, block: int) -> dict[str, Any]:
    """As `run_leg`; each `block` bytes that are saved have a checksum of their own."""
    before, checksums.BLOCK = checksums.BLOCK, block
    try:
        return run_leg(leg, root)
    finally:
        checksums.BLOCK = before


def everything(engine: shardwell.Engine) -> dict[str, Tensor | float]:
    """Masters, optimizer state and buffers, whole: put together from all ranks' parts, by one collective of torch's."""
    found: dict[str, Any] = {f"buffer {name}": buffer.clone() for name, buffer in engine.module.named_buffers()}
    mine: dict[str, Any] = {}
    whole: dict[str, tuple[torch.Size, tuple[int, ...]]] = {}
    for name, parameter in engine.module.named_parameters():
        values = {name: safe_get_local_fp32_param(parameter)}
        for key in KEYS if parameter.requires_grad else ():
            values[f"{name} {key}"] = safe_get_local_optimizer_state(parameter, key)
        begin, stride = place_of_part(parameter)
        mine.update({key: None if value is None else (begin, value) for key, value in values.items()})
        whole.update(dict.fromkeys(values, (parameter.shape, stride)))
    ranks = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        ranks = [mine] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
    for key, (shape, stride) in whole.items():
        if parts := [part for one in ranks if (part := one[key]) is not None]:
            found[key] = _joined(parts, shape, stride)
    return found


def _joined(parts: list[tuple[int, Any]], shape: torch.Size, stride: tuple[int, ...]) -> Any:
    """Return the whole of flat parts in the parameter's own memory order; several ranks may hold the same."""
    first = parts[0][1]
    if not isinstance(first, Tensor) or (first.ndim == 0 and len(shape) > 0):
        return float(first)
    flat, is_there = first.new_empty(shape.numel()), torch.zeros(shape.numel(), dtype=torch.bool)
    for begin, part in parts:
        flat[begin : begin + part.numel()] = part.reshape(-1)
        is_there[begin : begin + part.numel()] = True
    assert is_there.all()
    return flat.as_strided(shape, stride)


def uninterrupted(leg: Leg, num_steps: int) -> Leg:
    return replace(leg, first=0, last=num_steps, loads=False, saves=False)
