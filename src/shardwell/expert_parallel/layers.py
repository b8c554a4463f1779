"""Experts of which each rank of the expert axis holds some: a class that is put before the class of a module.

A module of experts is called with tokens, the experts of each, and their weights. It holds its experts in parameters
whose first dimension is the number of experts (packed), or in a list of modules (listed).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.errors import ShardwellError
from shardwell.expert_parallel.dispatch import balanced_rows, dispatch
from shardwell.parallel.model_axis import ModelAxis

# the second and third argument of a module of experts, by the names that models have for them
_ARGUMENTS = (
    ("top_k_index", "top_k_weights"),
    ("router_indices", "routing_weights"),
    ("selected_experts", "routing_weights"),
)


@dataclass(eq=False)
class ExpertShare:
    """A record of what a module of experts knows of the other ranks."""

    name: str
    num_experts: int  # on all ranks
    axis: ModelAxis | None  # None once the engine has ended
    listed: nn.ModuleList | None = None  # the experts, if they are listed
    calls_all: bool = False  # the module's own forward calls also those listed experts that no token has chosen


class ParallelExperts(nn.Module):
    """The forward of a module whose experts are on several ranks; the class that it was is a base class as well."""

    share: ExpertShare

    def forward(self, hidden_states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums of what the experts of each token compute of it."""
        share, width = self.share, hidden_states.shape[-1]
        if share.axis is None:
            raise ShardwellError(
                f"the engine that shared the experts of '{share.name}' over ranks was destroyed: pass the model to "
                "initialize"
            )
        index, tokens = experts.reshape(-1, experts.shape[-1]), hidden_states.reshape(-1, width)
        found = dispatch(
            share.axis, tokens, index, weights.reshape(index.shape), share.num_experts, self._computed, share.name
        )
        return found.view(hidden_states.shape)

    def _computed(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Return what this rank's experts compute, which has a gradient on all ranks alike, also without any rows."""
        compute = self._compute_packed if self.share.listed is None else self._compute_listed
        found = compute(rows, experts) if len(rows) or self.share.calls_all else self._untouched(rows)
        if found.requires_grad or not torch.is_grad_enabled():
            return found
        is_trained = any(parameter.requires_grad for parameter in self.parameters())
        return found.detach().requires_grad_() if is_trained else found

    def _untouched(self, rows: Tensor) -> Tensor:
        """Return no rows; the packed experts get a gradient of zero by them, as experts of one tensor always do."""
        if self.share.listed is None:
            for parameter in self.parameters(recurse=False):
                rows = rows + parameter.flatten()[:0].sum().to(rows.dtype)
        return rows

    def _compute_packed(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Call the module's own forward with its own experts, each row with one of them and a weight of one."""
        ones = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
        found: Tensor = super().forward(rows, experts.unsqueeze(-1), ones)
        return found

    def _compute_listed(self, rows: Tensor, experts: Tensor) -> Tensor:
        share = self.share
        assert share.axis is not None
        assert share.listed is not None
        per_rank = share.num_experts // share.axis.size
        parts, places = [], []
        for number in range(per_rank):
            at = _places(experts, number, per_rank)
            if len(at) or share.calls_all:
                parts.append(share.listed[share.axis.rank * per_rank + number](rows[at]))
                places.append(at)
        if not parts:
            return torch.zeros_like(rows)
        where = torch.empty_like(experts)
        where[torch.cat(places)] = torch.arange(len(experts), device=experts.device)
        return torch.cat(parts)[where]


def _places(experts: Tensor, number: int, num_experts: int) -> Tensor:
    """Return which rows are of an expert; on the meta device, as many as others get."""
    if experts.is_meta:
        return experts.new_empty(balanced_rows(len(experts), num_experts)[number])
    return (experts == number).nonzero().flatten()


def takes_experts(module: nn.Module) -> bool:
    """Return whether a module's forward takes tokens, the experts of each, and their weights."""
    names = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
    return tuple(names[1:3]) in _ARGUMENTS


def listed_experts(module: nn.Module) -> nn.ModuleList | None:
    """Return the list of experts of a module that has no parameters but theirs, or None."""
    if any(True for _ in module.parameters(recurse=False)):
        return None
    if isinstance(module, nn.ModuleList):
        return module
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
    others = [child for child in module.children() if any(True for _ in child.parameters())]
    return lists[0] if len(lists) == 1 and others == lists else None


class _Called(nn.Module):
    """Stands for an expert, and notes that it is called."""

    was_called = False

    def forward(self, rows: Tensor) -> Tensor:
        self.was_called = True
        return rows


@torch.no_grad()
def calls_all(module: nn.Module, listed: nn.ModuleList) -> bool:
    """Return whether the forward of a module calls also those of its listed experts that no token has chosen.

    They have gradients of zero then, by which an optimizer with momentum or weight decay changes them; otherwise they
    have none. The forward is tried with one token and without the experts themselves.
    """
    experts, buffers = dict(listed._modules), {one: one.clone() for one in module.buffers()}
    width = next((one.shape[-1] for one in listed.parameters() if one.ndim), 1)
    stand_ins = {name: _Called() for name in experts}
    token, expert = torch.zeros(1, width), torch.zeros(1, 1, dtype=torch.int64)
    try:
        listed._modules.update(stand_ins)
        with torch.random.fork_rng(devices=[]):
            type(module).forward(module, token, expert, torch.ones(1, 1))
    except Exception:  # it needs other tokens, or more of its experts than their calls
        return False
    finally:
        listed._modules.update(experts)
        for buffer, before in buffers.items():
            buffer.copy_(before)
    return all(one.was_called for one in stand_ins.values())


def become(module: nn.Module, share: ExpertShare) -> None:
    """Let a module send its tokens to the ranks of their experts."""
    kind = type(module)
    layer: Any = module
    layer.__class__ = type(f"Parallel{kind.__name__}", (ParallelExperts, kind), {"__module__": kind.__module__})
    layer.__dict__["share"] = share


def restore(module: nn.Module) -> None:
    """Let a module be what it was before."""
    layer: Any = module
    layer.__class__ = type(module).__mro__[2]
    del layer.__dict__["share"]
