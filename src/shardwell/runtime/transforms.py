"""Units inside transforms of torch.func and torch.jit.trace: the engine's operations are no part of the function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from shardwell.errors import ShardwellError
from shardwell.sharding import Unit

in_transform: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """Return a context whose operations are not transformed: an all-gather writes to memory unknown to the function.

    Callers ask `in_transform` first.
    """
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


@contextlib.contextmanager
def outside_trace(unit: Unit) -> Iterator[None]:
    """Return a context whose operations torch.jit.trace does not record.

    A trace keeps the memory of parameters, so a unit that can be released raises.
    """
    if unit.resharding_groups:
        raise ShardwellError(
            f"torch.jit.trace met unit '{unit.name or '(root)'}', whose parameters are unsharded only while it runs: "
            "the trace would keep memory that is freed. Trace a plain copy of the model with the values of "
            "engine.state_dict(), or use engine.compile()."
        )
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def refusal_of(error: RuntimeError) -> ShardwellError | None:
    """Return an explanation of torch's error that grad and vjp allow no saved-tensor hooks; None for other errors."""
    if "saved tensor hooks" not in str(error):
        return None
    return ShardwellError(
        "a module uses torch.func (grad, vjp, jacrev) in its own forward, and torch allows that no saved-tensor "
        "hooks, which released parameters need. Use torch.autograd.grad(..., create_graph=True) there, or keep the "
        "model's parameters unsharded: stages 0 to 2, or a zero_optimization.stage3_param_persistence_threshold above "
        f"their sizes. Torch says: {error}"
    )
