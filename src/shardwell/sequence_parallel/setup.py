"""Give a model the sequence axis of its engine: its attention, its random numbers, and checks of its inputs."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.errors import ShardwellError
from shardwell.parallel import MeshRoles, TrafficKind
from shardwell.parallel.consistency import check_alike
from shardwell.parallel.model_axis import ModelAxis
from shardwell.runtime.aborted_forwards import AbortHook
from shardwell.runtime.pytree import tensors_in
from shardwell.runtime.randomness import RegionRandomness, draws_in
from shardwell.runtime.token_mixing import TokenMixingCheck
from shardwell.sequence_parallel.attention import DistributedAttention
from shardwell.sequence_parallel.binding import SequenceBinding, bind, shares_sequences
from shardwell.sequence_parallel.transformers_models import bind_transformers

_FORWARDS = 2  # whose values are compared
_MOST_SHAPES = 1024
_SHAPES = "input (the ranks of the sequence axis take parts of the same length, see shardwell.sequence_parallel)"

_MIXES = (
    "sequence_parallel_size: {name} runs over {tokens} tokens, which are this rank's part of the sequence, and would "
    "not see the others: call shardwell.sequence_parallel.scaled_dot_product_attention or DistributedAttention in its "
    "place; other layers that pass values along the sequence need sequence_parallel_size 1"
)


def bind_sequences(model: nn.Module, roles: MeshRoles, *, in_eval: bool = True) -> SequenceBinding:
    """Let the ranks of the sequence axis train on parts of the same sequences. All ranks must call it.

    `in_eval`: they share sequences in evaluation as well.
    """
    assert roles.sequence is not None
    binding = SequenceBinding(model, ModelAxis(roles.sequence, TrafficKind.SEQUENCE), roles.averaged, in_eval=in_eval)
    parts = _PartCheck(binding)
    mixing = TokenMixingCheck(lambda: parts.num_tokens, _MIXES)
    checks = [model.register_forward_pre_hook(parts, with_kwargs=True), *mixing.hook(model)]
    binding.undo += [check.remove for check in checks]
    bind(binding)
    if draws_in(model):
        _separate_randomness(binding)
    bind_transformers(binding)
    for module in model.modules():
        if isinstance(module, DistributedAttention):
            _give(module, binding)
    hook = model.register_forward_hook(_ExchangeCheck(binding))
    binding.undo.append(hook.remove)
    return binding


def _give(module: DistributedAttention, binding: SequenceBinding) -> None:
    module.binding = binding
    binding.undo.append(lambda: setattr(module, "binding", None))


def _separate_randomness(binding: SequenceBinding) -> None:
    """Let each rank of the axis draw random numbers of its own in a forward: it has other tokens and other heads."""
    randomness, device = RegionRandomness(binding.axis.rank), binding.axis.comm.device.torch_device
    begin = binding.model.register_forward_pre_hook(lambda *_: randomness.begin(device))
    end = binding.model.register_forward_hook(lambda *_: randomness.end(), always_call=True)
    binding.undo += [begin.remove, end.remove, AbortHook(binding.model, randomness.end).remove]


class _PartCheck:
    """A forward pre-hook: parts have the same shape on all ranks of the axis, and are not all the same part."""

    def __init__(self, binding: SequenceBinding) -> None:
        self._binding, self._comm = binding, binding.axis.comm
        self._num_forwards = 0
        self._shapes: set[tuple[Any, ...]] = set()
        self.num_tokens: int | None = None  # of this rank, in the forward that runs; None if sequences are whole

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._comm.device.is_meta or not shares_sequences(self._binding, module, kwargs):
            self.num_tokens = None
            return
        found = [one for one in tensors_in((args, kwargs)) if one.ndim]
        self.num_tokens = next((one.shape[1] for one in found if one.ndim > 1), None)
        shapes = tuple((str(one.dtype), *one.shape) for one in found)
        if shapes not in self._shapes:
            if len(self._shapes) >= _MOST_SHAPES:  # on all ranks together
                self._shapes.clear()
            self._shapes.add(shapes)
            words = {f"tensor {number}": f"{shape[0]} {list(shape[1:])}" for number, shape in enumerate(shapes)}
            check_alike(self._comm, "forward", {_SHAPES: words})
        if self._num_forwards < _FORWARDS:
            self._num_forwards += 1
            self._compare_values(found)

    @torch.no_grad()
    def _compare_values(self, found: list[Tensor]) -> None:
        """Refuse the same values on all ranks, unless they are the same number everywhere."""
        digest = hashlib.blake2b(digest_size=16)
        for one in found:
            digest.update(one.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        mine = digest.digest()
        same = len(set(self._comm.tell_all(mine, "SEQUENCE values"))) == 1
        if same and any(one.numel() > 1 and bool((one != one.flatten()[0]).any()) for one in found):
            raise ShardwellError(
                f"all {self._comm.rank_group.size} ranks of the sequence axis got the same inputs, and each must get "
                "its part of the sequences: cut a batch with shardwell.sequence_parallel.shard_batch(batch, engine)"
            )


class _ExchangeCheck:
    """A forward hook: a model whose attention exchanges nothing sees a part of the sequence only."""

    def __init__(self, binding: SequenceBinding) -> None:
        self._binding = binding

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._binding.num_attended == 0:
            raise ShardwellError(
                f"sequence_parallel_size: the forward of {type(module).__name__} called no attention that is exchanged "
                "over the sequence axis, so that each rank sees its own part of the sequence only. Call "
                "shardwell.sequence_parallel.scaled_dot_product_attention or DistributedAttention, or use a model of "
                "Transformers."
            )
