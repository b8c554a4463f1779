"""Sequence parallelism between cut layers: hidden states are split along the sequence over the tensor axis.

The first block of a run splits its input, the last one joins its output, and norms and residual sums in between work
on a part of the sequence. So gradients of parameters in blocks that are not cut are parts, which the reduce-scatter
over data and tensor axis sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shardwell.errors import ShardwellError
from shardwell.runtime.token_mixing import TokenMixingCheck, enter_whole_sequences, leave_whole_sequences
from shardwell.sharding.tensor_part import mark_partial, part_of
from shardwell.sharding.wrap import repeated_blocks
from shardwell.tensor_parallel.region import CutRegion

_MIXES = (
    "tensor_parallel.sequence_parallel: {name} runs over {tokens} tokens between cut layers, where each rank has a "
    "part of the sequence and would not see the others: let the plan cut the layers around it, as the projections of "
    "attention, or leave sequence_parallel out"
)

_REFUSED = {
    "output_hidden_states": "the hidden states between blocks",
    "output_router_logits": "the logits of routers (and a loss of them)",
}


def blocks_in_plan(model: nn.Module, plan: Iterable[str]) -> tuple[str, ...]:
    """Return the repeated blocks of a model that have layers of a plan, in the order of the model.

    A stage of a pipeline may have one block of a list, beside modules that keep the places of the others.
    """
    repeated = repeated_blocks(model)
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        if is_list and any(getattr(child, "is_elsewhere", False) for child in module.children()):
            own = [inner for inner, child in module.named_children() if next(child.children(), None) is not None]
            repeated |= {f"{name}.{inner}" if name else inner for inner in own}
    named = list(plan)
    names = [name for name, _ in model.named_modules() if name in repeated]
    return tuple(name for name in names if any(one.startswith(f"{name}.") for one in named))


def split_sequences(model: nn.Module, blocks: Sequence[str], region: CutRegion) -> list[Any]:
    """Split sequences before and join them after each run of neighbouring blocks; return the hooks."""
    if not blocks:
        raise ShardwellError(
            "tensor_parallel.sequence_parallel: the model has no repeated blocks (a ModuleList of one class) with cut "
            "layers, between which sequences could be split; leave the key out"
        )
    modules = dict(model.named_modules())
    for name in blocks:
        for parameter in modules[name].parameters():
            if part_of(parameter) is None:
                mark_partial(parameter)
    hooks = [
        model.register_forward_pre_hook(_Begin(region), with_kwargs=True),
        model.register_forward_hook(lambda *_: region.check_joined()),
        *TokenMixingCheck(lambda: region.num_tokens, _MIXES, sees_sums=True).hook(model),
    ]
    for run in _runs(modules, blocks):
        first, last = modules[run[0]], modules[run[-1]]
        hooks += [
            first.register_forward_pre_hook(_Split(region, first), with_kwargs=True),
            last.register_forward_hook(_Join(region)),
        ]
    return hooks


def _runs(modules: Mapping[str, nn.Module], blocks: Sequence[str]) -> list[list[str]]:
    """Return the blocks that follow one another in the same container, with no other module between them.

    What stands between two runs, such as the block of another pipeline stage, gets whole sequences.
    """
    runs: list[list[str]] = []
    places: dict[str, list[str]] = {}
    for name in blocks:
        parent, _, child = name.rpartition(".")
        siblings = places.setdefault(parent, [inner for inner, _ in modules[parent].named_children()])
        before, _, last = runs[-1][-1].rpartition(".") if runs else ("", "", "")
        follows = bool(runs) and before == parent and siblings.index(child) == siblings.index(last) + 1
        if follows:
            runs[-1].append(name)
        else:
            runs.append([name])
    return runs


class _Begin:
    """A forward pre-hook of the model: nothing is split yet, and what is returned must not be."""

    def __init__(self, region: CutRegion) -> None:
        self._region = region

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._region.begin_forward()
        config = getattr(module, "config", None)
        for key, words in _REFUSED.items():
            if kwargs.get(key) or (kwargs.get(key) is None and getattr(config, key, False)):
                raise ShardwellError(
                    f"tensor_parallel.sequence_parallel: {key} asks for {words}, of which each rank has a part of the "
                    "sequence; leave sequence_parallel out, or do not ask for them"
                )


class _Split:
    """A forward pre-hook of the first block of a run."""

    def __init__(self, region: CutRegion, block: nn.Module) -> None:
        self._region, self._words = region, type(block).__name__

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor) or hidden.ndim < 3:
            raise ShardwellError(
                f"tensor_parallel.sequence_parallel: {self._words} takes no hidden states (rows, tokens, width) as its "
                "first argument, which could be split; leave sequence_parallel out"
            )
        part = self._region.split_sequence(hidden)
        return ((part, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": part})


class _Join:
    """A forward hook of the last block of a run."""

    def __init__(self, region: CutRegion) -> None:
        self._region = region

    def __call__(self, _: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return self._region.join_sequence(output)
        return type(output)([self._region.join_sequence(output[0]), *output[1:]])


def gather_before(name: str, module: nn.Module, region: CutRegion) -> list[Any]:
    """Let a module inside of a block, such as its attention, take whole sequences; return the hooks.

    Such modules reshape by the length of their input, so it does not suffice that the layers in them gather it.
    """

    def gather(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args and isinstance(args[0], Tensor):
            return (region.gather_sequence(args[0], name), *args[1:]), kwargs
        if isinstance(kwargs.get("hidden_states"), Tensor):
            return args, {**kwargs, "hidden_states": region.gather_sequence(kwargs["hidden_states"], name)}
        raise ShardwellError(f"tensor_parallel.sequence_parallel: '{name}' takes no hidden states as first argument")

    return [
        module.register_forward_pre_hook(lambda *_: enter_whole_sequences()),
        module.register_forward_pre_hook(gather, with_kwargs=True),
        module.register_forward_hook(lambda *_: leave_whole_sequences(), always_call=True),
    ]
