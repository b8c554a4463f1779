"""The check that outputs of layers which are cut as one block are not divided into several.

A weight that is packed of queries, keys and values and is cut as one block gives the first rank all queries and some
keys. A model that divides such an output by `chunk` gets three tensors of the right shape and of wrong values.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardwell.errors import ShardwellError
from shardwell.runtime.first_forwards import FirstForwards
from shardwell.sharding.tensor_part import part_of


class PackedUseCheck(FirstForwards):
    """Raises where the output of a layer that is cut as one block is divided into several."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._outputs = WeakTensorKeyDictionary()  # with the names of the weights

    def before(self, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """Look at an operation before it runs."""
        if name in ("chunk", "tensor_split") and isinstance(args[0], Tensor) and args[0] in self._outputs:
            number, dim = given.get("chunks", args[1] if len(args) > 1 else 1), given.get("dim", 0)
            dim = args[2] if len(args) > 2 else dim
            if isinstance(number, int) and number > 1 and dim in (-1, args[0].ndim - 1):
                weight = self._outputs[args[0]]
                raise ShardwellError(
                    f"tensor_parallel.plan: the output of '{weight}' is divided by {name} into {number} blocks, and "
                    f"colwise cuts its weight as one, so that ranks would have others: use packed_colwise:{number} for "
                    "it, or packed_colwise with the sizes of the blocks"
                )

    def after(self, name: str, args: tuple[Any, ...], found: Any) -> None:
        """Note what a layer that is cut as one block has returned."""
        if name == "linear" and isinstance(found, Tensor) and isinstance(args[1], nn.Parameter):
            part = part_of(args[1])
            if part is not None and part.dim == 0 and not part.blocks and id(args[1]) in self._names:
                self._outputs[found] = self._names[id(args[1])]
