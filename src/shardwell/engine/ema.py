"""An exponential moving average of the parameters, sharded like the master weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.engine.engine import Engine
from shardwell.engine.full_state import part_of_value, whole_value
from shardwell.errors import ShardwellError
from shardwell.optim.param_access import ParamAccess
from shardwell.sharding import ShardedGroup
from shardwell.sharding.tensor_part import part_of


class ExponentialMovingAverage:
    """The exponential moving average of the trained parameters of an engine.

    It averages the fp32 master weights, with the result of `torch.optim.swa_utils.AveragedModel` with
    `get_ema_multi_avg_fn(decay)` on a model that is not sharded. Call `update` after each `engine.step()`; the first
    call copies the parameters. Each rank holds the average of its shard, on the tier of the master weights or on
    `device` ("cpu" for host memory). Buffers are not averaged.
    """

    def __init__(self, engine: Engine, decay: float = 0.999, device: torch.device | str | None = None) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ShardwellError(f"decay={decay}: expected a number from 0 to 1")
        self.decay = decay
        self.num_updates = 0
        self._engine = engine
        self._device = None if device is None else torch.device(device)
        self._is_swapped = False
        self._averages = {group: self._copy_of(group) for group in self._groups()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the current parameters, without any collective."""
        self._check("update")
        for group, average in self._averages.items():
            with group.storage.open():
                master = group.master.to(average.device)
                if self.num_updates:
                    average.lerp_(master, 1.0 - self.decay)
                else:
                    average.copy_(master)
        self.num_updates += 1

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Return a context in which the engine's parameters are the averages, to evaluate, save or export.

        All ranks must enter it. Training continues outside: a step inside raises an error at the end of the context.
        """
        self._check("swapped")
        steps = self._engine.global_steps
        self._swap()
        self._is_swapped = True
        try:
            yield
        finally:
            self._is_swapped = False
            self._swap()
        if self._engine.global_steps != steps:
            raise ShardwellError(
                "engine.step() was called inside of ExponentialMovingAverage.swapped(): the averages were trained, and "
                "the parameters were not. Leave it before training goes on."
            )

    @torch.no_grad()
    def state_dict(self, rank0_only: bool = False) -> dict[str, Any]:
        """Return the unsharded averages by name in host memory, with decay and count. All ranks must call it.

        The result may be a part of the `client_state` of a checkpoint, and be loaded at any stage and number of ranks.
        In a pipeline it has the parameters of this rank's layers.
        """
        self._check("state_dict")
        whole: dict[str, Tensor] = {}
        keeps = not rank0_only or self._engine.global_rank == 0
        for group, average in self._averages.items():
            for slot, parameter in zip(group.layout.slots, group.parameters, strict=True):
                found = whole_value(ParamAccess(parameter).assembled(average), parameter, group)
                if keeps:
                    whole[slot.name] = found.to("cpu", copy=True)
        return {"decay": self.decay, "num_updates": self.num_updates, "parameters": whole}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Each rank takes its own part, so all ranks must pass the same state."""
        self._check("load_state_dict")
        given: Mapping[str, Tensor] = state["parameters"]
        mine, shapes = dict[str, nn.Parameter](), dict[str, tuple[int, ...]]()
        for group in self._averages:
            for slot, parameter in zip(group.layout.slots, group.parameters, strict=True):
                part = part_of(parameter)
                mine[slot.name], shapes[slot.name] = parameter, tuple(slot.shape) if part is None else part.shape
        if given.keys() != shapes.keys() or any(tuple(given[n].shape) != shape for n, shape in shapes.items()):
            wrong = sorted(given.keys() ^ shapes.keys()) or [n for n in shapes if tuple(given[n].shape) != shapes[n]]
            raise ShardwellError(
                f"the averages are those of another model: '{wrong[0]}' (of {len(wrong)}) does not fit"
            )
        for group, average in self._averages.items():
            for run in group.spans:
                for piece in run.pieces:
                    flat = torch.empty(piece.slot.numel, dtype=average.dtype)
                    name = piece.slot.name
                    value = part_of_value(given[name], mine[name], name)
                    flat.as_strided(piece.slot.shape, piece.slot.stride).copy_(value)
                    kept = flat[piece.in_parameter : piece.in_parameter + piece.numel]
                    average[piece.in_shard : piece.in_shard + piece.numel].copy_(kept)
        self.decay, self.num_updates = float(state["decay"]), int(state["num_updates"])

    # --------------------------------------------------------------------------------------------------- details

    def _groups(self) -> list[ShardedGroup]:
        return [group for unit in self._engine._scheduler.units for group in unit.trainable]

    def _copy_of(self, group: ShardedGroup) -> Tensor:
        with group.storage.open():
            return group.master.detach().to(self._device or group.master.device, copy=True)

    def _check(self, what: str) -> None:
        """Raise unless the averages fit the engine's parameters, and wait for its updates."""
        if self._is_swapped:
            raise ShardwellError(f"{what}: the averages are the engine's parameters now; leave swapped() first")
        self._engine.fit_to_model()
        if set(self._averages) != set(self._groups()):
            raise ShardwellError(
                f"{what}: parameters of the model were added, removed, thawed or resized since the averages were made. "
                "Call state_dict() before such a change, and give it to a new ExponentialMovingAverage afterwards."
            )
        for unit in self._engine._scheduler.units:
            unit.wait_local_update()

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap averages and master weights. All ranks must call it."""
        engine = self._engine
        if engine.optimizer is not None:
            engine.optimizer.settle()
        with engine._context.roles.agreement.failing_together("swapped"):
            for unit in engine._scheduler.units:
                if unit.use.num_contexts or unit.updates.is_early:
                    raise ShardwellError(
                        f"unit '{unit.name or '(root)'}' is in use: leave GatheredParameters, and call engine.step() "
                        "or engine.zero_grad(), before the parameters are exchanged for their averages"
                    )
                unit.wait()
            for group, average in self._averages.items():

                def fill(master: Tensor, average: Tensor = average) -> None:
                    before = master.to(average.device, copy=True)
                    master.copy_(average)
                    average.copy_(before)

                group.replace_master(fill)
