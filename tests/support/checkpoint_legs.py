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
    parameters = dict(engine.module.named_parameters())
    mine = {}
    for name, parameter in parameters.items():
        mine[name] = safe_get_local_fp32_param(parameter)
        for key in KEYS if parameter.requires_grad else ():
            mine[f"{name} {key}"] = safe_get_local_optimizer_state(parameter, key)
    ranks: list[dict[str, Any]] = [{}] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(ranks) > 1:
        dist.all_gather_object(ranks, mine)
    else:
        ranks = [mine]
    for name in mine:
        parts = [one[name] for one in ranks if one[name] is not None]
        if parts:
            found[name] = _joined(parts, parameters[name.partition(" ")[0]])
    return found


def _joined(parts: list[Any], parameter: nn.Parameter) -> Any:
    """Return the whole of flat parts in the order of ranks, where several ranks may hold all of it or the same."""
    if not isinstance(parts[0], Tensor) or (parts[0].ndim == 0 and parameter.ndim > 0):
        return float(parts[0])
    flat = torch.cat([part.reshape(-1) for part in parts])[: parameter.numel()]
    assert flat.numel() == parameter.numel()
    return flat.view(parameter.shape)


def uninterrupted(leg: Leg, num_steps: int) -> Leg:
    return replace(leg, first=0, last=num_steps, loads=False, saves=False)
