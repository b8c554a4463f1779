"""Parameters that come as DTensors: each becomes its local tensor while an engine has it, with the same identity.

This is the one file that knows what is in a DTensor. Everything else of the engine sees an ordinary parameter that is a
part of a larger tensor (`tensor_part.py`). `wrapped` makes a DTensor of it again for code that computes with one, and
gradients flow through that to the parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.errors import ShardwellError
from shardwell.sharding.tensor_part import TensorPart, mark_part


class _DTensorSlots(Tensor):
    """The memory layout of a DTensor: a parameter changes its class, which needs the same slots."""

    __slots__ = ("_local_tensor", "_spec")


class LocalParameter(_DTensorSlots, nn.Parameter):
    """A parameter that was a DTensor, and is its local tensor now."""


@dataclass(frozen=True)
class Placed:
    """A parameter that came as a DTensor, and where its values belong."""

    parameter: nn.Parameter
    mesh: Any  # DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size  # of the whole tensor
    stride: tuple[int, ...]

    def wrapped(self) -> Any:
        """Return the parameter as a DTensor, whose gradient arrives in the parameter."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            self.parameter, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def restore(self) -> None:
        """Make the parameter a DTensor again, with the values that it has now."""
        needs_grad, attributes = self.parameter.requires_grad, dict(self.parameter.__dict__)
        with torch.no_grad():
            plain = nn.Parameter(self.parameter.detach(), requires_grad=False)
            whole = nn.Parameter(replace_values(self, plain).wrapped(), requires_grad=needs_grad)
        torch.utils.swap_tensors(self.parameter, whole)
        self.parameter.__dict__.update(attributes)
        mark_part(self.parameter, None)


def replace_values(placed: Placed, parameter: nn.Parameter) -> Placed:
    """Return the same place of another parameter."""
    return Placed(parameter, placed.mesh, placed.placements, placed.shape, placed.stride)


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor, without the import of its module."""
    return any(kind.__name__ == "DTensor" for kind in type(value).__mro__)


def check_dtensor(name: str, parameter: Any) -> None:
    """Refuse a DTensor that is no part over one axis of ranks."""
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.ndim != 1:
        raise ShardwellError(
            f"parameter '{name}' is a DTensor over a mesh of shape {tuple(mesh.shape)}, and one dimension is expected, "
            "that of tensor parallelism: parallelize over mesh['tp'], and leave out fully_shard and replicate, which "
            "the engine does itself"
        )
    if placements[0].is_partial():
        raise ShardwellError(f"parameter '{name}' is a DTensor with placement {placements[0]}, which cannot be trained")


def line_of_dtensors(model: nn.Module) -> tuple[int, ...]:
    """Return the ranks that the DTensor parameters of a model are cut over, in order; none if there are none."""
    found: dict[tuple[int, ...], str] = {}
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            whole: Any = parameter
            found.setdefault(tuple(whole.device_mesh.mesh.flatten().tolist()), name)
    if len(found) > 1:
        (line, name), (other_line, other) = list(found.items())[:2]
        raise ShardwellError(
            f"parameters '{name}' and '{other}' are DTensors over ranks {list(line)} and {list(other_line)}: a model "
            "is cut over one tensor axis"
        )
    return next(iter(found), ())


def localise(name: str, parameter: nn.Parameter) -> Placed:
    """Make a DTensor parameter its local tensor, and record of which tensor it is a part."""
    whole: Any = parameter
    placed = Placed(parameter, whole.device_mesh, tuple(whole.placements), whole.shape, whole.stride())
    part = _part(name, placed)
    attributes, gradient = dict(parameter.__dict__), whole.grad
    local = whole._local_tensor.detach()
    if part is not None and tuple(local.shape) != part.shape_of(part.index):
        raise ShardwellError(
            f"parameter '{name}' is a DTensor {tuple(placed.shape)} with placement {placed.placements[0]}, and its "
            f"local tensor has shape {tuple(local.shape)} where {part.shape_of(part.index)} is expected"
        )
    plain: Any = Tensor._make_subclass(LocalParameter, local, parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, plain)
    except RuntimeError as error:
        raise ShardwellError(
            f"parameter '{name}' is a DTensor that something else refers to, such as the graph of a forward that has "
            f"not ended ({error}): hand the model over before it runs"
        ) from error
    parameter.__dict__.update(attributes)
    if gradient is not None:
        parameter.grad = gradient.to_local() if is_dtensor(gradient) else gradient
    if part is not None:
        mark_part(parameter, part)
    return placed


def _part(name: str, placed: Placed) -> TensorPart | None:
    """Return which part of the tensor this rank has; None if it has all of it."""
    placement: Any = placed.placements[0]
    if placement.is_replicate() or placed.mesh.size() == 1:
        return None
    dim = placement.dim % len(placed.shape)
    pieces = getattr(placement, "split_factor", 1)
    size = placed.shape[dim]
    if size % pieces:
        raise ShardwellError(f"parameter '{name}': {size} elements cannot be packed of {pieces} blocks of one size")
    blocks = (size // pieces,) * pieces if pieces > 1 else ()
    (index,) = placed.mesh.get_coordinate()  # it needs no process group: the mesh may be torch's copy, of an older one
    return TensorPart(tuple(placed.shape), dim, placed.mesh.size(), index, blocks)
