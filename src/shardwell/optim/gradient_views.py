"""When `p.grad` stands for a gradient that the engine holds, and what users did to it meanwhile.

Autograd leaves a gradient in `p.grad`, the engine moves it into a flat buffer, and a `ShardedGradient` takes its place.
It hangs there until the step, or until somebody takes it away: `p.grad = None` drops the gradient, another tensor
replaces it. Nothing tells of either, so they are looked for where the engine is entered next.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from shardwell.errors import ShardwellError
from shardwell.optim.sharded_gradient import HeldGradient, ShardedGradient
from shardwell.sharding import EngineContext, ShardedGroup, Unit
from shardwell.sharding.gradients import GradState

_KEPT = (
    "the gradients of the last step were not dropped by zero_grad() before they were needed again. Plain PyTorch adds "
    "to them; a shardwell engine does not keep them beyond the step. Call zero_grad() after each step. This is said "
    "once."
)


@dataclass(eq=False)
class GradientView:
    """What stands for the gradient of one parameter."""

    unit: Unit
    group: ShardedGroup
    index: int  # of the parameter, in the group
    parameter: nn.Parameter
    held: HeldGradient
    gradient: ShardedGradient
    hangs: bool = False  # since the last backward; the user may have taken it away
    leftover: Tensor | None = None  # a gradient from before the engine


class GradientHolder(Protocol):
    """Who holds the gradients."""

    def sums_may_wait(self) -> bool:
        """Whether some rank may have gradients that are not averaged yet; the same answer on all ranks."""

    def set_gradient(self, unit: Unit, group: ShardedGroup, index: int, grad: Tensor) -> None:
        """Take in a gradient of this rank that the user set."""

    def drop_gradients(self) -> None:
        """Forget all gradients, as `zero_grad` does."""


class GradientViews:
    """`p.grad` of all parameters that one engine trains."""

    def __init__(self, context: EngineContext, holder: GradientHolder) -> None:
        self._context, self._holder = context, holder
        self._views: dict[ShardedGroup, list[GradientView]] = {}
        self._all: list[GradientView] = []
        self._parameters: list[nn.Parameter] = []  # of all views, in their order: they are asked before every forward
        self._norms: dict[float, dict[HeldGradient, Tensor]] = {}  # by order
        self._hangs = False  # one of them, at least
        self._has_leftovers = False
        self._said: set[str] = set()
        self._has_told = False  # of parameters without gradients

    def say_once(self, words: str) -> None:
        if words not in self._said:
            self._said.add(words)
            warnings.warn(words, stacklevel=2)

    def take(self, units: Sequence[Unit]) -> None:
        """Stand for the gradients of these units from now on."""
        before, self._views = self._views, {}
        for unit in units:
            for group in unit.trainable:
                self._views[group] = before.pop(group, []) or [
                    self._made(unit, group, index) for index in range(len(group.parameters))
                ]
        self._remove(view for views in before.values() for view in views)
        self._all = [view for views in self._views.values() for view in views]
        self._parameters = [view.parameter for view in self._all]
        self._has_leftovers = any(view.leftover is not None for view in self._all)

    def _made(self, unit: Unit, group: ShardedGroup, index: int) -> GradientView:
        parameter = group.parameters[index]
        held = HeldGradient(self, parameter)
        with torch._C.DisableTorchFunctionSubclass():
            gradient = ShardedGradient(held, parameter)
            return GradientView(unit, group, index, parameter, held, gradient, leftover=parameter.grad)

    # ---------------------------------------------------------------------------------------- coming and going

    def take_incoming(self, group: ShardedGroup, index: int, grad: Tensor) -> Tensor | None:
        """What autograd has just added to `p.grad`, of what is there now."""
        view = self._views[group][index]
        held = view.held
        incoming, held.incoming = held.incoming, None
        view.leftover = held.gathered = None
        if held.is_spent:
            self._end(view, grad is view.gradient)
        if type(grad) is ShardedGradient:
            return incoming
        if incoming is not None:  # autograd made another tensor of both
            return incoming
        if view.hangs:  # the user took the gradient away, and autograd began a new one
            self._forget(view)
        return grad

    def hang_one(self, group: ShardedGroup, index: int) -> None:
        """The engine has taken a gradient in."""
        view = self._views[group][index]
        parameter = view.parameter
        if type(parameter) is nn.Parameter:  # no need to go by the guard
            parameter.grad = view.gradient
        else:
            with torch._C.DisableTorchFunctionSubclass():
                parameter.grad = view.gradient
        view.hangs = self._hangs = True

    def hang(self) -> None:
        """A backward has ended: the gradients that the engine holds are those of the parameters."""
        several = self._context.world.mesh.size > 1
        with torch._C.DisableTorchFunctionSubclass():
            for group, views in self._views.items():
                gradients = group.gradients
                # Which parameters of a unit got a gradient on other ranks is not known yet.
                all_hang = several and gradients.state in (GradState.REDUCING, GradState.REDUCED)
                if all_hang and not self._has_told and not all(gradients.seen):
                    self._tell_of_unseen(views, gradients.seen)
                for view, seen in zip(views, gradients.seen, strict=True):
                    if not view.hangs and (seen or all_hang) and view.parameter.grad is None:
                        view.parameter.grad = view.gradient
                        view.hangs = self._hangs = True
        optimizer = next((view.unit.optimizer for view in self._all), None)
        if self._hangs and optimizer is not None:
            optimizer.shards.hang_no_gradients(True)
        self.note_change()

    def _tell_of_unseen(self, views: list[GradientView], seen: Sequence[bool]) -> None:
        if views[0].unit.is_named:
            return  # the user knows
        self._has_told = True
        names = [view.group.layout.slots[view.index].name for view, was in zip(views, seen, strict=True) if not was]
        some = ", ".join(f"'{name}'" for name in names[:3]) + (" and others" if len(names) > 3 else "")
        logging.getLogger("shardwell").warning(
            "%s got no gradient in a backward of this rank, but may have got one on another rank. So `p.grad` of "
            "parameters without a gradient is not None here: it stands for the average over the ranks, which is zeros "
            "if none has one. A step leaves parameters alone that got none on any rank. This is said once.",
            some,
        )

    def unhang(self, *, has_begun: bool) -> None:
        """A backward begins: autograd need not add to what stands for gradients, the engine will.

        If it has begun already, a tensor in the place of what hung there says nothing yet: it is looked at when
        autograd has added to it.
        """
        if not has_begun:
            self.take_edits()
        for view in self._all if self._hangs else ():
            if not view.hangs:
                continue
            with torch._C.DisableTorchFunctionSubclass():
                grad = view.parameter.grad
            if view.held.is_spent:
                self._end(view, grad is view.gradient)
            elif grad is None:
                self._forget(view)
            elif grad is view.gradient:
                view.held.write_back()
                view.hangs = False
                with torch._C.DisableTorchFunctionSubclass():
                    view.parameter.grad = None
        self._hangs = any(view.hangs for view in self._all)

    def clear(self) -> None:
        """The engine holds no gradients any more."""
        self._remove(self._all)
        self._hangs = self._has_leftovers = False
        self.note_change()

    def zero(self) -> None:
        """Set the gradients to zero: a step then steps zeros, as torch's optimizers do."""
        self.take_edits()
        for view in self._all:
            if view.hangs:
                view.gradient.zero_()

    def spend(self) -> None:
        """A step of the user's own optimizer has used the gradients up. They hang there until somebody drops them.

        Who does not, adds to them in plain PyTorch, and is told.
        """
        for view in self._all:
            view.held.forget_whole()
            view.held.is_spent = view.hangs
            view.leftover = None
        self.note_change()

    def _end(self, view: GradientView, is_kept: bool) -> None:
        """A new pass has come to a gradient that was used up; `is_kept`: and nobody has dropped it before."""
        view.held.is_spent = view.hangs = False
        if is_kept:
            with torch._C.DisableTorchFunctionSubclass():
                view.parameter.grad = None
            self.say_once(_KEPT)

    def _remove(self, views: Iterable[GradientView]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for view in views:
                view.parameter.grad = view.leftover = None
                if view.hangs:
                    view.hangs = view.held.is_spent = False
                    view.held.gathered = None

    # ------------------------------------------------------------------------------------------------- changes

    def sums_may_wait(self) -> bool:
        return self._holder.sums_may_wait()

    def note_change(self) -> None:
        """Norms are others now."""
        self._norms.clear()

    def take_edits(self, *, at_step: bool = False) -> None:
        """Do what the user did to `p.grad`: what was taken away is dropped, what was set counts.

        `at_step`: no backward will come and add to gradients from before the engine, so they count as they are.
        """
        with torch._C.DisableTorchFunctionSubclass():
            grads = [parameter.grad for parameter in self._parameters]
        if not self._hangs and all(grad is None for grad in grads):
            return
        if any(view.held.is_spent for view in self._all):
            self._end_spent(grads, at_step=at_step)
        now = list(zip(self._all, grads, strict=True))
        if self._hangs and all(grad is None for view, grad in now if view.hangs):
            for view, _ in now:
                view.hangs = False
                view.held.forget_whole()
            self._hangs = False
            self.note_change()
            self._holder.drop_gradients()
        for view, grad in now:
            if grad is view.gradient:
                if view.held.gathered is not None:
                    view.held.write_back()
            elif grad is None:
                if view.hangs:
                    self._forget(view)
            elif at_step or grad is not view.leftover:
                self._replace(view, grad)

    def _end_spent(self, grads: list[Tensor | None], *, at_step: bool) -> None:
        """Gradients that a step has used up are gone where somebody dropped or replaced them, and at another step."""
        is_kept = [view.held.is_spent and grad is view.gradient for view, grad in zip(self._all, grads, strict=True)]
        has_new = any(grad is not None and not kept for kept, grad in zip(is_kept, grads, strict=True))
        if at_step and any(is_kept) and not has_new:
            raise ShardwellError(
                "the optimizer was stepped again without a backward in between, and the engine holds the gradients of "
                "the last step no more. Call zero_grad() after each step, and backward before the next."
            )
        for number, (view, grad) in enumerate(zip(self._all, grads, strict=True)):
            if view.held.is_spent and (at_step or grad is not view.gradient):
                self._end(view, grad is view.gradient)
                grads[number] = None if grad is view.gradient else grad
        self._hangs = any(view.hangs for view in self._all)

    def _forget(self, view: GradientView) -> None:
        if view.unit.optimizer is not None:
            view.unit.optimizer.gradients_change(view.unit)
        view.group.gradients.forget(view.index)
        view.hangs = False
        view.held.forget_whole()
        self.note_change()

    def _replace(self, view: GradientView, grad: Tensor) -> None:
        if view.hangs:
            self._forget(view)
        if isinstance(grad, ShardedGradient):  # of another parameter, or of this one in another guise
            grad = grad.held.whole()
        self._holder.set_gradient(view.unit, view.group, view.index, grad.detach())
        view.leftover = None
        with torch._C.DisableTorchFunctionSubclass():
            view.parameter.grad = view.gradient
        view.hangs = self._hangs = True
        self.note_change()

    # --------------------------------------------------------------------------------------------------- norms

    def norm(self, held: HeldGradient, order: float, dtype: torch.dtype | None) -> Tensor:
        """The norm of one gradient. Norms of all are taken at once, because who asks for one asks for the next."""
        held.check_there()
        if order not in self._norms:
            for view in self._all:
                view.held.write_back()
            self._norms[order] = self._all_norms(order)
        found = self._norms[order].get(held)
        if found is None:
            whole: Tensor = torch.linalg.vector_norm(held.whole(), order, dtype=dtype)
            return whole
        return found.to(dtype or torch.promote_types(held.parameter.dtype, torch.float32))

    def _all_norms(self, order: float) -> dict[HeldGradient, Tensor]:
        if order < 0:
            return {}
        device, asks = self._context.device, self.sums_may_wait()
        views, parts, is_whole = list(self._all), [], []
        for view in views:
            access = view.held.access
            part = access.gradient_part(asks=asks)
            parts.append(
                device.scalar(0.0, torch.float64)
                if part is None
                else _norm(part, order, access.loss_scale, device.torch_device)
            )
            is_whole.append(view.group.row.gradients.axis is None)
        if not parts:
            return {}
        mine = torch.stack(parts)
        total = self._over_ranks(mine, order)
        whole = torch.tensor(is_whole, device=mine.device)
        return dict(zip((view.held for view in views), torch.where(whole, mine, total).unbind(), strict=True))

    def _over_ranks(self, mine: Tensor, order: float) -> Tensor:
        """Norms of whole gradients from the norms of the ranks' parts."""
        world = self._context.world
        if world.mesh.size == 1:
            return mine
        if order == float("inf"):
            rows = mine.new_zeros(world.mesh.size, mine.numel())
            rows[world.mesh.rank] = mine
            world.all_reduce_sum(rows, "GRADIENT NORMS")
            return rows.amax(0)
        total = mine.clone() if order == 0 else mine**order
        world.all_reduce_sum(total, "GRADIENT NORMS")
        return total if order == 0 else total ** (1 / order)


def _norm(part: Tensor, order: float, loss_scale: float, device: torch.device) -> Tensor:
    wide = torch.promote_types(part.dtype, torch.float32)
    found: Tensor = torch.linalg.vector_norm(part, order, dtype=wide).double()
    found = found if order == 0 else found / loss_scale
    return found.to(device)
