"""Linear layers and embeddings of which each rank of the tensor axis holds a part, on plain tensors.

A layer of a model becomes one of these by a change of its class: it keeps its identity, its parameters and its hooks.
Where a region of the forward begins and ends is in `region.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from shardwell.errors import ShardwellError
from shardwell.tensor_parallel import overlap
from shardwell.tensor_parallel.functions import check_range, enter, leave
from shardwell.tensor_parallel.region import CutRegion


class CutLayer(nn.Module):
    """The base of layers that are cut."""

    region: CutRegion
    full_name: str
    kind: type[nn.Module]  # the class that the layer had
    sizes: list[int]  # of the parts of all ranks, along the dimension that is cut


def product(layer: Any, values: Tensor, bias: Tensor | None, *, transposed: bool = False) -> Tensor:
    """Return what a linear layer computes of its part; its weight's gradient may be computed late.

    That is so in a pipeline with the schedule zb-h1, and where the input's gradient is summed meanwhile (`overlap.py`).
    """
    late, weight = layer.__dict__.get("late_product"), layer.weight
    if late is None:
        return F.linear(values, weight.t() if transposed else weight, bias)
    if has_torch_function_unary(values):  # somebody looks, and must see what he would see of `F.linear`
        seen = values, weight.t() if transposed else weight, bias
        return handle_torch_function(linear, (values,), *seen, late, weight, transposed)
    return linear(values, weight, bias, late, weight, transposed)


def linear(
    values: Tensor, seen: Tensor, bias: Tensor | None, late: Any, weight: nn.Parameter, transposed: bool
) -> Tensor:
    """Return what `F.linear(values, seen, bias)` does, with a product whose weight's gradient may be computed late."""
    found: Tensor | None = late(values, weight, bias, transposed)
    return F.linear(values, weight.t() if transposed else weight, bias) if found is None else found


class ColumnLinear(CutLayer, nn.Linear):
    """A linear layer that computes some of the outputs: its weight is cut by rows of memory (dim 0)."""

    gathers: bool  # the outputs of all ranks are all-gathered
    ends: bool  # a layer that is cut by rows follows

    def forward(self, values: Tensor) -> Tensor:
        """Return this rank's outputs, or those of all ranks."""
        taken = self.region.begin(values, self.full_name, ends=self.ends)
        found = product(self, taken, self.bias)
        return self.region.gather_last(found, self.full_name, self.sizes) if self.gathers else found


class RowLinear(CutLayer, nn.Linear):
    """A linear layer that computes with some of the inputs: its weight is cut along dim 1, and outputs are summed."""

    splits_input: bool  # the input is whole

    def forward(self, values: Tensor) -> Tensor:
        """Return the outputs, which all ranks have alike, or this rank's part of the sequence."""
        if self.splits_input:
            values = self.region.split_last(values, self.full_name)
        found = self.region.end(product(self, values, None), self.full_name)
        return found if self.bias is None else found + self.bias


class InnerLinear(CutLayer, nn.Linear):
    """A whole linear layer whose output meets those of cut layers: a key projection of one head, which all heads share.

    Each rank computes a part of the gradients of its weight and of its input.
    """

    ends: bool  # a layer that is cut by rows follows

    def forward(self, values: Tensor) -> Tensor:
        """Return the outputs, which all ranks have alike."""
        return product(self, self.region.begin(values, self.full_name, ends=self.ends), self.bias)


class ColumnConv1D(CutLayer):
    """GPT-2's linear layer, whose weight is transposed, cut by outputs (dim 1)."""

    gathers: bool
    ends: bool
    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, values: Tensor) -> Tensor:
        """Return this rank's outputs, or those of all ranks."""
        taken = self.region.begin(values, self.full_name, ends=self.ends)
        found = product(self, taken, self.bias, transposed=True)
        return self.region.gather_last(found, self.full_name, self.sizes) if self.gathers else found


class RowConv1D(CutLayer):
    """GPT-2's linear layer, whose weight is transposed, cut by inputs (dim 0)."""

    splits_input: bool
    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, values: Tensor) -> Tensor:
        """Return the outputs, which all ranks have alike, or this rank's part of the sequence."""
        if self.splits_input:
            values = self.region.split_last(values, self.full_name)
        return self.region.end(product(self, values, None, transposed=True), self.full_name) + self.bias


class VocabularyEmbedding(CutLayer, nn.Embedding):
    """An embedding of some words of the vocabulary: words of other ranks are zeros here, and the ranks sum."""

    first: int  # this rank's first word

    def forward(self, words: Tensor) -> Tensor:
        """Return the embeddings of all words, on all ranks alike."""
        check_range(words, sum(self.sizes), f"{self.full_name}: word")
        own = words - self.first
        is_away = (own < 0) | (own >= self.weight.shape[0])
        if self.weight.shape[0] == 0:
            found = self.weight.new_zeros(*words.shape, self.weight.shape[1])
            return self._sum(found + self.weight.sum())  # the gradient of no element
        found = F.embedding(own.masked_fill(is_away, 0), self.weight, self._padding)
        return self._sum(found.masked_fill(is_away.unsqueeze(-1), 0.0))

    def _sum(self, found: Tensor) -> Tensor:
        return leave(found, self.region.axis, f"TENSOR {self.full_name}")

    @property
    def _padding(self) -> int | None:
        """The padding word, whose gradient is zero, if it is one of this rank's."""
        if self.padding_idx is None:
            return None
        own = self.padding_idx - self.first
        return own if 0 <= own < self.weight.shape[0] else None


class WidthEmbedding(CutLayer, nn.Embedding):
    """An embedding of all words in some of the dimensions: the ranks' dimensions are all-gathered."""

    def forward(self, words: Tensor) -> Tensor:
        """Return the embeddings of all words in all dimensions, on all ranks alike."""
        found = F.embedding(words, self.weight, self.padding_idx)
        return self.region.gather_last(found, self.full_name, self.sizes)


def sum_around(module: nn.Module, region: CutRegion, name: str) -> list[Any]:
    """Let a module with cut parameters of its own, as packed experts are, begin and end a region; return the hooks.

    Gradients of all floating inputs are summed: routing weights, too, meet only a part of the experts' outputs.
    """

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def entered(value: Any) -> Any:
            if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
                return enter(value, region.axis, f"TENSOR {name}")
            return value

        return tuple(map(entered, args)), {key: entered(value) for key, value in kwargs.items()}

    def end(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return leave(output, region.axis, f"TENSOR {name}")

    return [module.register_forward_pre_hook(begin, with_kwargs=True), module.register_forward_hook(end)]


def enter_rope(module: nn.Module, attention: nn.Module, region: CutRegion) -> Any:
    """Let the last outputs of a projection, the keys that all heads share (MLA), enter a region; return the hook.

    The other outputs enter where the layer that expands them, which is cut by columns, takes its input.
    """
    owners = (attention, getattr(attention, "config", None))
    sizes = [size for owner in owners if isinstance(size := getattr(owner, "qk_rope_head_dim", None), int)]
    if not sizes:
        raise ShardwellError(
            f"tensor_parallel.plan: mla_kv_a_proj needs qk_rope_head_dim of {type(attention).__name__} or of its config"
        )

    def enter_last(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        if not (output.requires_grad and torch.is_grad_enabled()):
            return output
        latent, rope = output[..., : -sizes[0]], output[..., -sizes[0] :]
        return torch.cat((latent, enter(rope, region.axis, "TENSOR keys of all heads")), -1)

    return module.register_forward_hook(enter_last)


def restore(layer: nn.Module) -> None:
    """Give a layer that was cut its former class back; its parameters are whole again."""
    kind = vars(layer)["kind"]
    layer.__class__ = kind
    if vars(layer).get("late_product") is overlap.product:
        del layer.late_product
    for name in ("kind", "region", "full_name", "sizes", "gathers", "ends", "splits_input", "first"):
        vars(layer).pop(name, None)
