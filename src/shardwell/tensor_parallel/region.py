"""What the cut layers of one engine share: the axis, whether sequences are split between them, and random numbers."""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.parallel.model_axis import ModelAxis
from shardwell.runtime.randomness import RegionRandomness
from shardwell.tensor_parallel import functions, overlap

SEQUENCE_DIM = 1  # of hidden states: batch, sequence, width
_FLAT_DIM = 0  # of hidden states whose batch and sequence are one dimension


class CutRegion:
    """The part of a forward in which each rank computes with its own parts of tensors.

    It begins where a layer that is cut by columns takes its input, and ends where one that is cut by rows sums its
    output.
    """

    def __init__(
        self,
        axis: ModelAxis,
        *,
        splits_sequences: bool,
        draws: bool,
        overlaps: bool = False,
        around: CutRegion | None = None,
    ) -> None:
        """`draws`: random numbers (dropout) are drawn in some such regions.

        `overlaps`: gradients of inputs are summed beside the products of weight gradients.

        `around`: the region in which the module around the layers all-gathers the sequences.
        """
        self._axis: ModelAxis | None = axis
        self.overlaps = overlaps
        self.splits_sequences, self._is_gathered = splits_sequences, around is not None
        self.randomness = RegionRandomness(axis.rank) if draws else None
        # An input, and what layers got of it, until the region ends, or the input is gone: a recomputation that has all
        # it needs stops before the end, and its graph must not stay.
        self._input: weakref.ref[Tensor] | None = None
        self._found: Tensor | None = None
        # Of the parts of sequences, and of those of all rows together; recomputations may be of earlier ones.
        self._lengths: set[int] = set()
        self._flat_lengths: set[int] = set()
        self._dims: dict[str, int] = {} if around is None else around._dims  # gathered last, by module
        self.num_tokens: int | None = None  # of this rank's part, while sequences are split

    @property
    def axis(self) -> ModelAxis:
        """The ranks that hold the other parts."""
        if self._axis is None:
            raise ShardwellError(
                "the engine that cut this model over ranks was destroyed: pass the model to initialize"
            )
        return self._axis

    def close(self) -> None:
        """Forget the axis, whose process groups end."""
        self._axis = None
        self._forget()

    def begin(self, values: Tensor, name: str, *, ends: bool) -> Tensor:
        """Return the input of a layer that is cut by columns.

        `ends`: a layer that is cut by rows ends the region. Until then layers with the same input get the same tensor,
        so that its gradient is summed once, and random numbers are this rank's own.
        """
        if self._is_gathered:
            return values
        found = self._entered(values)
        if found is None:
            if self.splits_sequences:
                found = self.gather_sequence(values, name.rpartition(".")[0])
            elif values.requires_grad and torch.is_grad_enabled():
                begin = overlap.enter if self.overlaps else functions.enter
                found = begin(values, self.axis, f"TENSOR {name}")
            else:
                found = values
            self._forget()
            if ends and found is not values:
                self._input, self._found = weakref.ref(values, self._forget), found
        if ends and self.randomness is not None and not self.splits_sequences:
            self.randomness.begin(values.device)
        return found

    def _entered(self, values: Tensor) -> Tensor | None:
        """Return what the last layer got if it had the same input, under the same mode of autograd."""
        found = self._found
        if found is None or self._input is None or self._input() is not values:
            return None
        return found if found.requires_grad == (values.requires_grad and torch.is_grad_enabled()) else None

    def _forget(self, gone: weakref.ref[Tensor] | None = None) -> None:
        if gone is None or gone is self._input:
            self._input = self._found = None

    def end(self, values: Tensor, name: str) -> Tensor:
        """Return the sum over the ranks of the output of a layer that is cut by rows."""
        self._forget()
        if self.splits_sequences:
            return self.scatter_sequence(values, name)
        if self.randomness is not None:
            self.randomness.end()
        return functions.leave(values, self.axis, f"TENSOR {name}")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gather_sequence(self, values: Tensor, name: str) -> Tensor:
        """Return whole sequences, whose gradients the ranks compute in parts."""
        dim = self._dims[name] = self.dim_of_tokens(values, name)
        if self.overlaps and values.requires_grad and torch.is_grad_enabled():
            found: Tensor = overlap.gather(values, self.axis, dim, f"TENSOR {name}")
            return found
        return functions.gather(values, self.axis, dim, f"TENSOR {name}", sums=True)

    def dim_of_tokens(self, values: Tensor, name: str) -> int:
        """Return the dimension of hidden states along which ranks have parts: that of tokens, or of rows and tokens."""
        dim = SEQUENCE_DIM if values.ndim > 2 else _FLAT_DIM
        known = self._lengths if dim == SEQUENCE_DIM else self._flat_lengths
        if (length := values.shape[dim]) not in known:
            raise ShardwellError(
                f"tensor_parallel.sequence_parallel: '{name}' got hidden states of {length} tokens, which were not "
                "split over the ranks: blocks must be called as modules, one after another, beginning with the first "
                "of their list; leave sequence_parallel out if they are not"
            )
        return dim

    def scatter_sequence(self, values: Tensor, name: str) -> Tensor:
        """Return this rank's part of the sequences, along the dimension along which they were gathered."""
        around = name
        while around and around not in self._dims:
            around = around.rpartition(".")[0]
        dim = self._dims.get(around, SEQUENCE_DIM)
        if (values.ndim == 2) != (dim == _FLAT_DIM):
            raise ShardwellError(
                f"tensor_parallel.sequence_parallel: '{name}' puts out {values.ndim} dimensions, and '{around}' got "
                f"{3 if dim == SEQUENCE_DIM else 2}, so that it is not known which tokens are this rank's: leave "
                "sequence_parallel out"
            )
        return functions.scatter(values, self.axis, dim, f"TENSOR {name}", sums=True)

    def begin_forward(self) -> None:
        """Note that a forward of the model begins, with whole sequences."""
        self.num_tokens = None

    def check_joined(self) -> None:
        """Raise if a forward of the model has ended with split sequences."""
        if self.num_tokens is not None:
            raise ShardwellError(
                "tensor_parallel.sequence_parallel: the forward ended with sequences that are split over the ranks, "
                "because the last block of a list was not called; leave sequence_parallel out"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def split_sequence(self, values: Tensor) -> Tensor:
        """Return this rank's part of the sequences, before the first block."""
        if self.randomness is not None:
            self.randomness.begin(values.device)
        found = functions.scatter(values, self.axis, SEQUENCE_DIM, "TENSOR sequences", sums=False)
        self.num_tokens = found.shape[SEQUENCE_DIM]
        self._lengths.add(self.num_tokens)
        self._flat_lengths.add(found.shape[0] * self.num_tokens)
        return found

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def join_sequence(self, values: Tensor) -> Tensor:
        """Return whole sequences of all ranks' parts, after the last block."""
        if self.randomness is not None:
            self.randomness.end()
        self.num_tokens = None
        return functions.gather(values, self.axis, SEQUENCE_DIM, "TENSOR sequences", sums=False)

    def split_last(self, values: Tensor, name: str) -> Tensor:
        """Return this rank's part of the last dimension of values that all ranks have."""
        return functions.scatter(values, self.axis, -1, f"TENSOR {name} input", sums=False)

    def gather_last(self, values: Tensor, name: str, sizes: list[int]) -> Tensor:
        """Return the parts of all ranks along the last dimension, which have these sizes."""
        most = max(sizes)
        if min(sizes) == most:
            return functions.gather(values, self.axis, -1, f"TENSOR {name} output", sums=False)
        with torch._C.DisableTorchFunction():  # the values that are added here are taken away again
            padded = F.pad(values, (0, most - values.shape[-1]))
        found = functions.gather(padded, self.axis, -1, f"TENSOR {name} output", sums=False)
        parts = zip(found.split(most, -1), sizes, strict=True)
        return torch.cat([part.narrow(-1, 0, size) for part, size in parts], -1)
