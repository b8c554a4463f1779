"""What a stage takes of a micro-batch: the arguments of the model, and the labels for the loss.

A micro-batch is a pair of inputs and labels, as DeepSpeed has it, or a dictionary of the model's arguments, as
Transformers has it; anything else is the input of a model that needs no labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from shardwell.errors import ShardwellError
from shardwell.pipeline.messages import Signature
from shardwell.pipeline.passage import Hidden
from shardwell.runtime.pytree import map_tensors, tensors_in

_LABELS = "labels"
_OF_ALL_LAYERS = ("output_router_logits", "output_hidden_states", "output_attentions")  # Transformers' names


class BatchReader:
    """Calls a model's stages with micro-batches, and computes losses."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, *, is_chain: bool) -> None:
        self._loss_fn, self._is_chain = loss_fn, is_chain
        self._config = getattr(model, "config", None)
        names = inspect.signature(model.forward).parameters
        self._extra = {"use_cache": False} if "use_cache" in names else {}  # which training has no use for

    def arguments(self, batch: Any, received: Hidden, *, is_last: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments by which a stage calls the model.

        A model that is nothing but its layers gets the hidden state. Other models get the micro-batch on every stage,
        since masks and positions are computed from it; labels are for the last stage.
        """
        if received is not None or not is_last:  # there are several stages
            self._check_outputs(batch)
        if self._is_chain and received is not None:
            return (map_tensors(received, Tensor.detach),), {}
        if isinstance(batch, Mapping):
            computes_loss = is_last and self._loss_fn is None
            kept = {key: value for key, value in batch.items() if computes_loss or key != _LABELS}
            return (), {**self._extra, **kept}
        inputs = batch[0] if _is_pair(batch) else batch
        if self._is_chain or not isinstance(inputs, tuple | list):
            return (inputs,), dict(self._extra)
        return tuple(inputs), dict(self._extra)

    def _check_outputs(self, batch: Any) -> None:
        """Refuse outputs that are of all layers, of which the last stage has its own only; a loss may be of them."""
        for key in _OF_ALL_LAYERS:
            asked = batch.get(key) if isinstance(batch, Mapping) else None
            if getattr(self._config, key, False) if asked is None else asked:
                raise ShardwellError(
                    f"pipeline: {key} asks for values of all layers (a loss of routers is of them, too), and the last "
                    f"stage has those of its own layers only: set model.config.{key} = False"
                )

    def loss(self, output: Any, batch: Any, move: Callable[[Any], Any]) -> Tensor:
        """Return the loss of a micro-batch; `move` brings labels to the device."""
        if self._loss_fn is None:
            found = getattr(output, "loss", None)
            if found is None and isinstance(output, Mapping):
                found = output.get("loss")
            found = output if found is None else found
        elif isinstance(batch, Mapping):
            logits = getattr(output, "logits", output)
            found = self._loss_fn(logits, move(batch[_LABELS])) if _LABELS in batch else self._loss_fn(logits)
        else:
            found = self._loss_fn(output, move(batch[1])) if _is_pair(batch) else self._loss_fn(output)
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise ShardwellError(
                f"the last stage of the pipeline has no loss: it returned a {type(found).__name__}"
                f"{f' of shape {list(found.shape)}' if isinstance(found, Tensor) else ''}. Pass loss_fn to split or "
                "PipelineModule, or labels in the micro-batches of a model that computes its loss."
            )
        return found


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2


def signature_of(batch: Any, *, trains: bool) -> Signature:
    """Return the shapes and dtypes of a micro-batch, by which the shapes between stages are known."""
    return trains, *((tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors_in(batch))
