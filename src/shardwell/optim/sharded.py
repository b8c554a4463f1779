"""The optimizer that the user holds: a torch optimizer over this rank's shards, with norm, clipping and a veto.

It steps a few units at a time, so that the fp32 masters that exist only during a step stay small, and so that what
was updated can be sent to the other ranks while the next units are stepped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwell.errors import NonFiniteError
from shardwell.memory import Account, State, Tier
from shardwell.memory.device import Later
from shardwell.optim.ahead import Ahead, Shard
from shardwell.optim.build import Recipe
from shardwell.unit import Context, Unit

_CHUNK = 1 << 22  # elements stepped in one call, at least, if there are so many


class ShardedOptimizer(Optimizer):
    """Steps the shards that this rank owns. Its `param_groups` are those of the optimizer inside: schedulers attach."""

    inner: Optimizer

    def __init__(
        self,
        recipe: Recipe,
        units: Sequence[Unit],
        context: Context,
        *,
        clip: float,
        raise_on_nonfinite: bool,
        before_step: Callable[[], None],
        after_update: Callable[[Unit], None],
    ) -> None:
        self._units = [unit for unit in units if unit.trainable]
        self._context = context
        self._clip = clip
        self._raise_on_nonfinite = raise_on_nonfinite
        self._before_step, self._after_update = before_step, after_update
        self._shards = {unit.index: list(_shards_of(unit)) for unit in self._units}
        num_labels = 1 + max(recipe.labels.values(), default=0)
        by_label: list[list[Tensor]] = [[] for _ in range(num_labels)]
        for shard in self._all_shards():
            if shard.label >= 0:
                by_label[shard.label].append(shard.tensor)
        self.inner = recipe.make(by_label)
        super().__init__([torch.zeros(0)], {})
        self.defaults, self.param_groups, self.state = self.inner.defaults, self.inner.param_groups, self.inner.state
        self._norm: Tensor | None = None
        self._verdict: Later | None = None
        self._num_states = -1
        self._ahead = Ahead(self.state, self._shards, lambda unit, factor: self._update([unit], factor))
        self._on_device = all(g.row.optimizer.tier is Tier.DEVICE for unit in self._units for g in unit.trainable)
        self.overflow = False
        self.skipped_steps = 0

    def _all_shards(self) -> Iterator[Shard]:
        for unit in self._units:
            yield from self._shards[unit.index]

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer inside."""
        return self.inner

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients of this boundary, and start sending what changed to the other ranks."""
        assert closure is None, "sharded optimizers take no closure"
        self._before_step()
        for unit in self._units:
            for group in unit.trainable:
                group.gradients.settle()
        try:
            self._hear_verdict()
            self._norm = norm = self._global_norm()
            try:
                may_step = self._may_step(norm)
            except NonFiniteError:
                self._ahead.take_back()
                raise
            factor = self._clip_factor(norm)
            done = self._ahead.commit(may_step, factor)
            if may_step:
                for chunk in self._chunks():
                    self._update([unit for unit in chunk if unit.index not in done], factor)
                    for unit in chunk:
                        self._after_update(unit)
        finally:
            self.zero_grad()
        self._enter_states(self._context.account)

    def gradients_complete(self, unit: Unit) -> None:
        """A unit's gradients of this boundary are reduced: rows that do not wait for the norm are updated now."""
        self._ahead.update(unit)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this boundary."""
        for unit in self._units:
            for group in unit.trainable:
                group.gradients.clear()

    def global_norm(self) -> Tensor | None:
        """The norm of the whole averaged gradient at the last step, before clipping."""
        return self._norm

    # -------------------------------------------------------------------------------------------- norm and veto

    def _global_norm(self) -> Tensor:
        split: list[Tensor] = []
        whole: list[Tensor] = []
        for shard in self._all_shards():
            gradient = shard.gradient()
            if gradient is not None:
                wide = torch.promote_types(gradient.dtype, torch.float32)
                norm = torch.linalg.vector_norm(gradient, dtype=wide)
                (whole if shard.group.row.gradients.over is None else split).append(norm)
        total = self._sum_of_squares(split)
        self._context.world.sum_scalar(total, "NORM")
        return (total + self._sum_of_squares(whole)).sqrt()

    def _sum_of_squares(self, norms: list[Tensor]) -> Tensor:
        if not norms:
            return self._context.device.scalar(0.0, torch.float64)
        return torch.stack([norm.double() for norm in norms]).square().sum()

    def _clip_factor(self, norm: Tensor) -> Tensor | None:
        """What to multiply gradients by; None if nothing has to be clipped and the host can know that for free."""
        if self._clip <= 0:
            return None
        factor = (self._clip / (norm + 1e-6)).clamp(max=1.0)
        return None if factor.device.type == "cpu" and float(factor) == 1.0 else factor

    def _may_step(self, norm: Tensor) -> bool:
        """Whether to update at all. Where the kernels can be told on the device, the host does not wait to know.

        It hears the verdict at the next step: a fixed place, so that all ranks act on it alike.
        """
        device = self._context.device
        if device.is_virtual:
            return True
        self._verdict = device.read_later(norm)
        if device.is_cuda and self._on_device and self.inner.defaults.get("fused"):
            self.inner.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
            return True
        return self._hear_verdict(self._first_nonfinite)

    def _hear_verdict(self, where: Callable[[], str] = str) -> bool:
        """Learn whether the norm that was last asked about is finite; raises or counts a skipped step if not."""
        if self._verdict is None:
            return True
        norm, self._verdict = float(self._verdict.get()), None
        self.overflow = not math.isfinite(norm)
        if not self.overflow:
            return True
        self.skipped_steps += 1
        if self._raise_on_nonfinite:
            raise NonFiniteError(
                f"the gradients are not finite (their global norm is {norm}){where()}; the step was not applied and "
                "parameters and optimizer state are as before. Check the loss and the learning rate, or set "
                '"shardwell": {"nonfinite": "skip"} to leave such steps out.'
            )
        return False

    def _first_nonfinite(self) -> str:
        for unit in self._units:
            for shard in self._shards[unit.index]:
                gradient = shard.gradient()
                if gradient is not None and not bool(torch.isfinite(gradient).all()):
                    return f", first in unit '{unit.name}'"
        return ""

    # ------------------------------------------------------------------------------------------------ the update

    def _chunks(self) -> Iterator[list[Unit]]:
        chunk: list[Unit] = []
        size = 0
        for unit in self._units:
            chunk.append(unit)
            size += sum(shard.tensor.numel() for shard in self._shards[unit.index])
            if size >= _CHUNK:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

    def _update(self, units: list[Unit], factor: Tensor | None) -> None:
        if not units:
            return
        groups = [group for unit in units for group in unit.trainable if group.gradients.result is not None]
        for group in groups:
            group.open_master()
        every = [group["params"] for group in self.param_groups]
        shards = [shard for unit in units for shard in self._shards[unit.index]]
        for label, param_group in enumerate(self.param_groups):
            param_group["params"] = [s.tensor for s in shards if s.label == label and self._prepare(s, factor)]
        try:
            self.inner.step()
        finally:
            for param_group, tensors in zip(self.param_groups, every, strict=True):
                param_group["params"] = tensors
            for shard in shards:
                shard.tensor.grad = None
        for group in groups:
            group.close_master()

    def _prepare(self, shard: Shard, factor: Tensor | None) -> bool:
        """Hang the gradient on its shard, in the master dtype and clipped; false if there is none."""
        gradient = shard.gradient()
        if gradient is None:
            return False
        gradient = gradient.to(shard.tensor)
        if factor is not None:
            gradient.mul_(factor.to(gradient))
        shard.tensor.grad = gradient
        return True

    def _enter_states(self, account: Account) -> None:
        """Measure the optimizer's state when it has grown (torch makes it at the first step)."""
        if len(self.state) == self._num_states:
            return
        self._num_states = len(self.state)
        for unit in self._units:
            sizes: Counter[Tier] = Counter()
            for group in unit.groups:
                sizes.update(group.master_bytes())
            for shard in self._shards[unit.index]:
                for value in self.state.get(shard.tensor, {}).values():
                    if isinstance(value, Tensor):
                        sizes[shard.group.row.optimizer.tier] += value.untyped_storage().nbytes()
            for tier, size in sizes.items():
                account.set(State.OPTIMIZER, unit.name, tier, size)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, as the torch optimizer inside gives it."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of the same rank, world and stage gave."""
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


def _shards_of(unit: Unit) -> Iterator[Shard]:
    for group in unit.trainable:
        for run, tensor in group.runs:
            yield Shard(group, run.label, run.start, tensor)
