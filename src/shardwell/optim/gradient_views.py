"""The `p.grad` tensors that stand for gradients in the engine, and the user's changes of them.

Autograd leaves a gradient in `p.grad`, the engine moves it into a flat buffer, and a `ShardedGradient` replaces it. It
stays there until the step, or until the user removes it: `p.grad = None` drops the gradient, another tensor replaces
it. Neither is reported by torch, so the engine checks for both when it is called next.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from shardwell.errors import ShardwellError
from shardwell.optim.sharded_gradient import HeldGradient, ShardedGradient
from shardwell.optim.unit_optimizer import optimizer_of
from shardwell.sharding import EngineContext, ShardedGroup, Unit
from shardwell.sharding.gradients import GradState

_KEPT = (
    "the gradients of the last step were not dropped by zero_grad() before they were needed again. Plain PyTorch adds "
    "to them; a shardwell engine does not keep them beyond the step. Call zero_grad() after each step. This is said "
    "once."
)


@dataclass(eq=False)
class GradientView:
    """The tensor that stands for the gradient of one parameter, and its state."""

    unit: Unit
    group: ShardedGroup
    index: int  # of the parameter, in the group
    parameter: nn.Parameter
    held: HeldGradient
    gradient: ShardedGradient
    is_attached: bool = False  # since the last backward; the user may have removed it
    leftover: Tensor | None = None  # a gradient from before the engine


class GradientHolder(Protocol):
    """The object that holds the gradients."""

    def sums_may_wait(self) -> bool:
        """Return whether some rank may have gradients that are not averaged yet; the same answer on all ranks."""

    def set_gradient(self, unit: Unit, group: ShardedGroup, index: int, grad: Tensor) -> None:
        """Take over a gradient of this rank that the user set, and set `p.grad` as for any other gradient."""

    def drop_gradients(self) -> None:
        """Drop all gradients, as `zero_grad` does."""


class NoGradientViews:
    """Leaves `p.grad` empty: gradients of a simulation, on the meta device, have no values to show."""

    def take(self, units: Sequence[Unit]) -> None:
        """Do nothing."""

    def take_incoming(self, group: ShardedGroup, index: int, grad: Tensor) -> Tensor | None:
        """Return the gradient that autograd has just set."""
        return grad

    def attach_one(self, group: ShardedGroup, index: int) -> None:
        """Remove a gradient that the engine has taken over."""
        group.parameters[index].grad = None

    def attach(self) -> None:
        """Do nothing."""

    def detach(self, *, has_begun: bool = False) -> None:
        """Do nothing."""

    def hidden(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()

    def clear(self) -> None:
        """Do nothing."""

    def spend(self) -> None:
        """Do nothing."""

    def zero(self) -> bool:
        """Return false: there is nothing to set to zero."""
        return False

    def take_edits(self, *, at_step: bool = False) -> None:
        """Do nothing."""


class GradientViews:
    """The `p.grad` tensors of all parameters that one engine trains."""

    def __init__(self, context: EngineContext, holder: GradientHolder) -> None:
        self._context, self._holder = context, holder
        self._has_peers = context.roles.all.rank_group.size > 1
        self._views: dict[ShardedGroup, list[GradientView]] = {}
        self._all: list[GradientView] = []
        self._parameters: list[nn.Parameter] = []  # of all views, in their order: they are read before every forward
        self._norms: dict[float, dict[HeldGradient, Tensor]] = {}  # by order of the norm
        self._is_attached = False  # at least one view is in its `p.grad`
        self._is_spent = False  # a step of the user's own optimizer used some of them
        self._said: set[str] = set()
        self._has_told = False  # about parameters without gradients

    def say_once(self, words: str) -> None:
        """Warn with this text if it was not given yet."""
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
        self._all = [view for views in before.values() for view in views]
        self.clear()  # those of units that are gone
        self._all = [view for views in self._views.values() for view in views]
        self._parameters = [view.parameter for view in self._all]
        self._is_attached = any(view.is_attached for view in self._all)
        self._is_spent = any(view.held.is_spent for view in self._all)

    def _made(self, unit: Unit, group: ShardedGroup, index: int) -> GradientView:
        parameter = group.parameters[index]
        held = HeldGradient(self, parameter)
        with torch._C.DisableTorchFunctionSubclass():
            gradient = ShardedGradient(held, parameter)
            return GradientView(unit, group, index, parameter, held, gradient, leftover=parameter.grad)

    # --------------------------------------------------------------------------------- attaching and detaching

    def take_incoming(self, group: ShardedGroup, index: int, grad: Tensor) -> Tensor | None:
        """Return what autograd has just added to `p.grad`, given its present value."""
        view = self._views[group][index]
        held = view.held
        incoming, held.incoming = held.incoming, None
        view.leftover = held.gathered = None
        if held.is_spent:
            self._end(view, grad is view.gradient)
        if type(grad) is ShardedGradient:
            return incoming
        if incoming is not None:  # autograd made a new tensor of both
            return incoming
        if view.is_attached:  # the user removed the gradient, and autograd began a new one
            self._forget(view)
        return grad

    def attach_one(self, group: ShardedGroup, index: int) -> None:
        """Set `p.grad` after the engine has taken a gradient over."""
        view = self._views[group][index]
        parameter = view.parameter
        if type(parameter) is nn.Parameter:  # no need to bypass `__torch_function__`
            parameter.grad = view.gradient
        else:
            with torch._C.DisableTorchFunctionSubclass():
                parameter.grad = view.gradient
        view.is_attached = self._is_attached = True

    def attach(self) -> None:
        """Set `p.grad` of all parameters whose gradients the engine holds, at the end of a backward."""
        with torch._C.DisableTorchFunctionSubclass():
            for group, views in self._views.items():
                gradients = group.gradients
                # It is not known yet which parameters of a unit got a gradient on other ranks.
                all_hang = self._has_peers and gradients.state in (GradState.REDUCING, GradState.REDUCED)
                if all_hang and not self._has_told and not all(gradients.has_gradient):
                    self._tell_of_unseen(views, gradients.has_gradient)
                for view, seen in zip(views, gradients.has_gradient, strict=True):
                    if not view.is_attached and (seen or all_hang) and view.parameter.grad is None:
                        view.parameter.grad = view.gradient
                        view.is_attached = self._is_attached = True
        owner = self._all[0].unit.owner if self._all else None
        if self._is_attached and owner is not None and owner.optimizer is not None:
            owner.optimizer.hide_slice_gradients()
        self._norms.clear()

    def _tell_of_unseen(self, views: list[GradientView], seen: Sequence[bool]) -> None:
        if views[0].unit.spec.is_user_unit:
            return  # the user expects it
        slots = [view.group.layout.slots[view.index] for view, was in zip(views, seen, strict=True) if not was]
        names = [slot.name for slot in slots if slot.numel]  # experts of other ranks are empty
        if not names:
            return
        self._has_told = True
        some = ", ".join(f"'{name}'" for name in names[:3]) + (" and others" if len(names) > 3 else "")
        logging.getLogger("shardwell").warning(
            "%s got no gradient in a backward of this rank, but may have got one on another rank. So `p.grad` of "
            "parameters without a gradient is not None here: it stands for the average over the ranks, which is zeros "
            "if none has one. A step leaves parameters alone that got none on any rank. This is said once.",
            some,
        )

    @torch.no_grad()
    def detach(self, *, has_begun: bool = False) -> None:
        """Remove the views when a backward begins: the engine adds up gradients, and autograd need not.

        If the backward has already begun, a tensor in place of a view means nothing yet: it is checked after autograd
        has added to it.
        """
        if not has_begun:
            self.take_edits()
        if not self._is_attached:
            return
        is_attached = False
        for view in self._all:
            if not view.is_attached:
                continue
            with torch._C.DisableTorchFunctionSubclass():
                grad = view.parameter.grad
            if view.held.is_spent:
                self._end(view, grad is view.gradient)
            elif grad is None:
                self._forget(view)
            elif grad is view.gradient:
                view.held.write_back()
                view.is_attached = False
                with torch._C.DisableTorchFunctionSubclass():
                    view.parameter.grad = None
            is_attached = is_attached or view.is_attached
        self._is_attached = is_attached

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Empty `p.grad` inside: Dynamo describes the gradients of parameters, and cannot describe these."""
        with torch._C.DisableTorchFunctionSubclass():
            away = [view for view in self._all if view.is_attached and view.parameter.grad is view.gradient]
            for view in away:
                view.parameter.grad = None
        try:
            yield
        finally:
            with torch._C.DisableTorchFunctionSubclass():
                for view in away:
                    if view.parameter.grad is None:
                        view.parameter.grad = view.gradient

    def clear(self) -> None:
        """Remove all views, because the engine holds no gradients any more."""
        with torch._C.DisableTorchFunctionSubclass():
            for view in self._all:
                view.parameter.grad = view.leftover = None
                if view.is_attached:
                    view.is_attached = view.held.is_spent = False
                    view.held.gathered = None
        self._is_attached = self._is_spent = False
        self._norms.clear()

    @torch.no_grad()
    def zero(self) -> bool:
        """Set the gradients to zero, and return true: a step then uses zeros, as torch's optimizers do."""
        self.take_edits()
        for view in self._all:
            if view.is_attached:
                view.gradient.zero_()
        return True

    def spend(self) -> None:
        """Mark the gradients as used by a step of the user's own optimizer; they stay until they are dropped.

        In plain PyTorch, the next backward would add to gradients that are not dropped. The user gets a warning then.
        """
        for view in self._all:
            view.held.forget_whole()
            view.held.is_spent = view.is_attached
            view.leftover = None
        self._is_spent = True
        self._norms.clear()

    def _end(self, view: GradientView, is_kept: bool) -> None:
        """End a gradient that a step has used, when a new pass reaches it; `is_kept`: it was not dropped before."""
        view.held.is_spent = view.is_attached = False
        if is_kept:
            with torch._C.DisableTorchFunctionSubclass():
                view.parameter.grad = None
            self.say_once(_KEPT)

    # ------------------------------------------------------------------------------------------------- changes

    def sums_may_wait(self) -> bool:
        """Return whether some rank may have gradients that are not averaged yet; the same answer on all ranks."""
        return self._holder.sums_may_wait()

    def note_change(self) -> None:
        """Drop the cached norms after a change of gradients."""
        self._norms.clear()

    def take_edits(self, *, at_step: bool = False) -> None:
        """Take over the user's changes of `p.grad`: removed gradients are dropped, and new ones are used.

        `at_step`: no backward will add to gradients from before the engine, so they are used as they are.
        """
        grads, has_any = [], self._is_attached
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._parameters:
                grad = parameter.grad
                grads.append(grad)
                if grad is not None:
                    has_any = True
        if has_any:
            with torch.inference_mode(False), torch.no_grad():  # a later backward adds to tensors that are made here
                self._compare(grads, at_step=at_step)

    def _compare(self, grads: list[Tensor | None], *, at_step: bool) -> None:
        """Take over changes, given what `p.grad` of each parameter is now."""
        if self._is_spent:
            self._end_spent(grads, at_step=at_step)
        were_dropped = self._is_attached
        for view, grad in zip(self._all, grads, strict=True):
            if view.is_attached and grad is not None:
                were_dropped = False
        if were_dropped:
            self._drop_all()
        for view, grad in zip(self._all, grads, strict=True):
            if grad is view.gradient:
                if view.held.gathered is not None:
                    view.held.write_back()
            elif grad is None:
                if view.is_attached:
                    self._forget(view)
            elif at_step or grad is not view.leftover:
                self._replace(view, grad)

    def _drop_all(self) -> None:
        """Drop all gradients, because the user has removed all of them."""
        for view in self._all:
            view.is_attached = False
            view.held.forget_whole()
        self._is_attached = False
        self._norms.clear()
        self._holder.drop_gradients()

    def _end_spent(self, grads: list[Tensor | None], *, at_step: bool) -> None:
        """End used gradients that were dropped or replaced, and all of them at another step."""
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
        self._is_attached = any(view.is_attached for view in self._all)
        self._is_spent = any(view.held.is_spent for view in self._all)

    def _forget(self, view: GradientView) -> None:
        if view.unit.optimizer is not None:
            optimizer_of(view.unit).executor.gradients_change(view.unit)
        view.group.gradients.forget(view.index)
        view.is_attached = False
        view.held.forget_whole()
        self._norms.clear()

    def _replace(self, view: GradientView, grad: Tensor) -> None:
        if view.is_attached:
            self._forget(view)
        if isinstance(grad, ShardedGradient):  # of another parameter, or an alias of this one
            grad = grad.held.whole()
        self._holder.set_gradient(view.unit, view.group, view.index, grad.detach())
        view.leftover = None
        self._norms.clear()

    # --------------------------------------------------------------------------------------------------- norms

    def norm(self, held: HeldGradient, order: float, dtype: torch.dtype | None) -> Tensor:
        """Return the norm of one gradient; the norms of all are computed together, as callers ask for all of them."""
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
            is_whole.append(view.group.spec.gradients.axis is None)
        if not parts:
            return {}
        mine = torch.stack(parts)
        total = self._over_ranks(mine, order)
        whole = torch.tensor(is_whole, device=mine.device)
        return dict(zip((view.held for view in views), torch.where(whole, mine, total).unbind(), strict=True))

    def _over_ranks(self, mine: Tensor, order: float) -> Tensor:
        """Return the norms of full gradients from the norms of the parts of all ranks."""
        shard = self._context.roles.shard
        if shard.rank_group.size == 1:
            return mine
        if order == float("inf"):
            rows = mine.new_zeros(shard.rank_group.size, mine.numel())
            rows[shard.rank_group.rank] = mine
            shard.all_reduce_sum(rows, "GRADIENT NORMS")
            return rows.amax(0)
        total = mine.clone() if order == 0 else mine**order
        shard.all_reduce_sum(total, "GRADIENT NORMS")
        return total if order == 0 else total ** (1 / order)


def _norm(part: Tensor, order: float, loss_scale: float, device: torch.device) -> Tensor:
    wide = torch.promote_types(part.dtype, torch.float32)
    found: Tensor = torch.linalg.vector_norm(part, order, dtype=wide).double()
    found = found if order == 0 else found / loss_scale
    return found.to(device)
