"""Sequence parallelism between cut layers: hidden states are split along the sequence over the tensor axis.

The first block splits its input, the last one joins its output, and norms and residual sums in between work on a part
of the sequence. So gradients of parameters in blocks that are not cut are parts, which the reduce-scatter over data and
tensor axis sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from shardwell.errors import ShardwellError
from shardwell.sharding.tensor_part import mark_partial, part_of
from shardwell.tensor_parallel.region import CutRegion


def split_sequences(blocks: Sequence[tuple[str, nn.Module]], region: CutRegion) -> list[Any]:
    """Split sequences before the first block and join them after the last; return the hooks."""
    if not blocks:
        raise ShardwellError(
            "tensor_parallel.sequence_parallel: the model has no repeated blocks (a ModuleList of one class) with cut "
            "layers, between which sequences could be split; leave the key out"
        )
    for _, block in blocks:
        for parameter in block.parameters():
            if part_of(parameter) is None:
                mark_partial(parameter)
    (_, first), (_, last) = blocks[0], blocks[-1]

    def split(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args and isinstance(args[0], Tensor):
            return (region.split_sequence(args[0]), *args[1:]), kwargs
        if isinstance(kwargs.get("hidden_states"), Tensor):
            return args, {**kwargs, "hidden_states": region.split_sequence(kwargs["hidden_states"])}
        raise ShardwellError(
            f"tensor_parallel.sequence_parallel: {type(first).__name__} takes no hidden states as first argument"
        )

    def join(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return region.join_sequence(output)
        return type(output)([region.join_sequence(output[0]), *output[1:]])

    return [first.register_forward_pre_hook(split, with_kwargs=True), last.register_forward_hook(join)]


def gather_before(name: str, module: nn.Module, region: CutRegion) -> Any:
    """Let a module inside of a block, such as its attention, take whole sequences; return the hook.

    Such modules reshape by the length of their input, so it does not suffice that the layers in them gather it.
    """

    def gather(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args and isinstance(args[0], Tensor):
            return (region.gather_sequence(args[0], name), *args[1:]), kwargs
        if isinstance(kwargs.get("hidden_states"), Tensor):
            return args, {**kwargs, "hidden_states": region.gather_sequence(kwargs["hidden_states"], name)}
        raise ShardwellError(f"tensor_parallel.sequence_parallel: '{name}' takes no hidden states as first argument")

    return module.register_forward_pre_hook(gather, with_kwargs=True)
