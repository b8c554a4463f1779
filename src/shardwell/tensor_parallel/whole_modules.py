"""Modules inside of split blocks that need other tokens than a rank's own: attention that a plan leaves whole, experts.

Attention that is not cut runs on whole sequences on every rank, as without sequence parallelism: its input is
all-gathered, and each rank keeps its tokens of the output. Experts get the tokens of all ranks with their routing, and
the sums of what the ranks computed are reduce-scattered; the router before them sees the tokens of its rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shardwell.errors import ConfigError, ShardwellError
from shardwell.runtime.randomness import draws_in
from shardwell.runtime.token_mixing import enter_whole_sequences, leave_whole_sequences
from shardwell.tensor_parallel import functions
from shardwell.tensor_parallel.region import SEQUENCE_DIM, CutRegion

_MIXER = re.compile("attn|attention|mixer|mamba|shortconv|short_conv|rglru|recurrent|delta", re.IGNORECASE)


def uncut_mixers(modules: Mapping[str, nn.Module], blocks: Sequence[str], plan: Mapping[str, str]) -> list[str]:
    """Return the modules inside of blocks, without layers of the plan, whose names say that they mix tokens."""

    def inside(name: str) -> Iterator[str]:
        for child, module in modules[name].named_children():
            full = f"{name}.{child}"
            has_cut = full in plan or any(other.startswith(f"{full}.") for other in plan)
            says_so = _MIXER.search(child) or _MIXER.search(type(module).__name__)
            if says_so and not has_cut and next(module.children(), None) is not None:
                yield full
            elif full not in plan:
                yield from inside(full)

    return [name for block in blocks for name in inside(block)]


def run_on_whole_sequences(name: str, module: nn.Module, region: CutRegion) -> list[Any]:
    """Let a module that is not cut run on whole sequences, alike on all ranks; return the hooks."""
    if draws_in(module):
        raise ConfigError(
            f"tensor_parallel.sequence_parallel: '{name}' is not cut, runs on whole sequences therefore, and "
            "drops values at random, which would have to be the same on all ranks: set its dropout to 0, cut its "
            "projections, or leave sequence_parallel out"
        )
    token = f"TENSOR {name}"

    def join(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor) or hidden.ndim != 3:
            raise ShardwellError(
                f"tensor_parallel.sequence_parallel: '{name}' takes no hidden states (rows, tokens, width) as first "
                "argument, which could be gathered; leave sequence_parallel out"
            )
        found = functions.gather(hidden, region.axis, region.dim_of_tokens(hidden, name), token, sums=False)
        own = [found if one is hidden else one for one in args]
        return tuple(own), {key: found if one is hidden else one for key, one in kwargs.items()}

    def split(_: nn.Module, __: Any, output: Any) -> Any:
        first = output if isinstance(output, Tensor) else output[0]
        part = functions.scatter(first, region.axis, SEQUENCE_DIM, token, sums=False)
        return part if isinstance(output, Tensor) else type(output)([part, *output[1:]])

    return [
        module.register_forward_pre_hook(lambda *_: enter_whole_sequences()),
        module.register_forward_pre_hook(join, with_kwargs=True),
        module.register_forward_hook(split),
        module.register_forward_hook(lambda *_: leave_whole_sequences(), always_call=True),
    ]


def gather_around(module: nn.Module, region: CutRegion, name: str) -> list[Any]:
    """Let a module of packed experts, which are cut, have the tokens of all ranks; return the hooks.

    Its arguments are hidden states and the routing of each token. Gradients of routing weights are summed, too: they
    meet only a part of the experts' outputs.
    """
    token, dims = f"TENSOR {name}", [0]

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        if not found:
            raise ShardwellError(f"tensor_parallel.sequence_parallel: '{name}' takes no hidden states")
        dim = dims[0] = region.dim_of_tokens(found[0], name)
        if len(found) < 2 or any(one.shape[: dim + 1] != found[0].shape[: dim + 1] for one in found):
            shapes = ", ".join(str(tuple(one.shape)) for one in found)
            raise ShardwellError(
                f"tensor_parallel.sequence_parallel: experts '{name}' got tensors of shapes {shapes}; expected hidden "
                "states and routing with one row for each token: leave sequence_parallel out"
            )

        def gathered(value: Any) -> Any:
            is_tensor = isinstance(value, Tensor)
            return functions.gather(value, region.axis, dim, token, sums=True) if is_tensor else value

        return tuple(map(gathered, args)), {key: gathered(value) for key, value in kwargs.items()}

    def end(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return functions.scatter(output, region.axis, dims[0], token, sums=True)

    return [module.register_forward_pre_hook(begin, with_kwargs=True), module.register_forward_hook(end)]
