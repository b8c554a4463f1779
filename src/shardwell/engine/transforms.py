"""Units inside transforms of torch.func: what the engine does for itself is no part of the function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from shardwell.errors import ShardwellError


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """What runs inside is not transformed: a gather writes to memory that the function does not know."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


@contextlib.contextmanager
def named_refusals() -> Iterator[None]:
    """Torch allows no saved-tensor hooks inside of grad and vjp: say what that means here."""
    try:
        yield
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise ShardwellError(
            "a module uses torch.func (grad, vjp, jacrev) in its own forward, and torch allows that no saved-tensor "
            "hooks, which released parameters need. Use torch.autograd.grad(..., create_graph=True) there, or keep the "
            "model's parameters whole: stages 0 to 2, or a zero_optimization.stage3_param_persistence_threshold above "
            f"their sizes. Torch says: {error}"
        ) from error
