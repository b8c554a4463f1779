"""Models that come cut by torch's `parallelize_module` or by Transformers: their parameters are DTensors.

Their layers compute with DTensors, and torch communicates between the ranks of the axis. An engine takes the local
tensors (`sharding/dtensor_parameters.py`); while a module that holds such parameters runs, it sees DTensors of them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwell.parallel import MeshRoles
from shardwell.runtime.first_forwards import generating_models
from shardwell.runtime.randomness import align_randomness
from shardwell.sharding import released
from shardwell.sharding.dtensor_parameters import Placed, is_dtensor, localise
from shardwell.sharding.tensor_part import mark_partial, part_of
from shardwell.tensor_parallel.inputs import InputCheck
from shardwell.tensor_parallel.plan import names_with_style


class DTensorForward:
    """The forward of a module while its parameters are local tensors: it finds DTensors in their places."""

    def __init__(self, module: nn.Module, placed: dict[str, Placed]) -> None:
        self._module, self._placed = module, placed
        self.own = module.__dict__.get("forward")  # that Transformers has put there
        self._inner = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        parameters = self._module._parameters
        mine = {name: one for name, one in self._placed.items() if parameters.get(name) is one.parameter}
        parameters.update((name, one.wrapped()) for name, one in mine.items())
        try:
            return self._inner(*args, **kwargs)
        finally:
            parameters.update((name, one.parameter) for name, one in mine.items())


@dataclass(frozen=True)
class DTensorModel:
    """A model whose parameters came as DTensors, until its engine ends."""

    placed: tuple[Placed, ...]
    forwards: dict[nn.Module, DTensorForward]
    removed: dict[nn.Module, Any]  # forwards that all-reduced gradients
    hooks: tuple[Any, ...]
    uncompilable = "its parameters came as DTensors, and graphs cannot hold what makes them DTensors in each forward"

    def undo(self) -> None:
        """Make the parameters DTensors again; they are plain tensors by now."""
        for one in self.placed:
            if not released.is_owned(one.parameter) and not is_dtensor(one.parameter):
                one.restore()

    def close(self) -> None:
        """Give modules their own forwards back, and parameters that no engine has their own kind."""
        for hook in self.hooks:
            hook.remove()
        for module, forward in self.forwards.items():
            if module.__dict__.get("forward") is forward:
                del module.__dict__["forward"]
                if forward.own is not None:
                    module.__dict__["forward"] = forward.own
        for module, own in self.removed.items():
            module.__dict__["forward"] = own
        self.undo()


def take_dtensors(model: nn.Module, roles: MeshRoles) -> DTensorModel:
    """Make the DTensor parameters of a model local ones. All ranks must call it."""
    hooks: tuple[Any, ...] = ()
    if roles.tensor is not None:
        align_randomness(roles.tensor)
        called = (model, *generating_models(model))
        hooks = tuple(one.register_forward_pre_hook(InputCheck(roles.tensor), with_kwargs=True) for one in called)
    _check_ties(model)
    known: dict[int, Placed] = {}
    forwards: dict[nn.Module, DTensorForward] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        placed: dict[str, Placed] = {}
        for name, parameter in module._parameters.items():
            if parameter is not None and (id(parameter) in known or is_dtensor(parameter)):
                if id(parameter) not in known:
                    known[id(parameter)] = localise(names[id(parameter)], parameter)
                placed[name] = known[id(parameter)]
        if placed:
            forwards[module] = DTensorForward(module, placed)
            module.forward = forwards[module]
    removed = _without_own_sums(model) if roles.tensor is not None else {}
    return DTensorModel(tuple(known.values()), forwards, removed, hooks)


def _without_own_sums(model: nn.Module) -> dict[nn.Module, Any]:
    """Let the engine sum gradients that Transformers would sum by hooks on parameters, which run after the engine's."""
    removed: dict[nn.Module, Any] = {}
    modules = dict(model.named_modules())
    for name in names_with_style(model, "replicated_with_grad_allreduce"):
        module = modules.get(name)
        if module is None or "forward" not in module.__dict__:
            continue
        removed[module] = module.__dict__.pop("forward")
        for parameter in module.parameters():
            if part_of(parameter) is None:
                mark_partial(parameter)
    return removed


def _check_ties(model: nn.Module) -> None:
    """Warn of an output layer that may have been tied to the embedding: `parallelize_module` unties without a word."""
    words = [(n, m.weight) for n, m in model.named_modules() if isinstance(m, nn.Embedding)]
    heads = [(n, m.weight) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    for name, embedding in words:
        for other, head in heads:
            if embedding is not head and embedding.shape == head.shape and _are_equal(embedding, head):
                logging.getLogger("shardwell").warning(
                    "'%s.weight' and '%s.weight' are two parameters with the same values: parallelize_module unties "
                    "weights that were one. If they were, tie them again after it (head.weight = embedding.weight).",
                    name,
                    other,
                )


def _are_equal(one: Tensor, other: Tensor) -> bool:
    mine, theirs = (value._local_tensor if is_dtensor(value) else value for value in (one, other))  # type: ignore[attr-defined]
    return not mine.is_meta and mine.shape == theirs.shape and bool((mine == theirs).all())
