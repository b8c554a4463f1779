"""A forward on the tensor or sequence axis that is interrupted leaves nothing of the engine's checks behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import shardwell
from shardwell.runtime import token_mixing
from shardwell.sequence_parallel import binding
from tests.support import sequence_models, tensor_models
from tests.support.models import batches
from tests.support.ranks import Ranks
from tests.support.sequence_models import SequenceCase
from tests.support.tensor_models import TensorCase


def stop(*_: Any) -> None:
    raise KeyboardInterrupt("stopped")


def interrupted(kind: str) -> dict[str, Any]:
    """Interrupt the first forward where attention ends, tell what is left, and train a step."""
    torch.manual_seed(1)  # of what initialize does not seed
    if kind == "sequence":
        case = SequenceCase(model={"drop": 0.5})
        engine: Any = sequence_models.started(case, 1)
        batch = sequence_models.micro_batches(case)[0][0]
        layer = engine.module.blocks[0].out
    else:
        model, split = {"drop": 0.5}, {"sequence_parallel": kind == "tensor, split"}
        engine, decoder = tensor_models.started(TensorCase(model=model, tensor=split), 1)
        layer = decoder.blocks[0].attention.out

    def loss() -> torch.Tensor:
        if kind == "sequence":
            return sequence_models.loss_of(engine, batch, case)
        found: torch.Tensor = engine(batches(1, 2)[0])
        return found

    torch.manual_seed(7)
    left = interrupt(engine, layer, loss)
    engine.backward(loss())
    engine.step()
    engine.destroy(whole=False)
    return left


def interrupt(engine: shardwell.Engine, layer: nn.Module, run: Any) -> dict[str, Any]:
    """Interrupt a forward before a layer, and tell what is left of it."""
    handle = layer.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        run()
    handle.remove()
    return {
        "modes": len(_get_current_function_mode_stack()),
        "running": len(binding._running),
        "whole": token_mixing._num_whole,
        "drawn": torch.rand(2).tolist(),
    }


@pytest.mark.parametrize("kind", ["tensor", "tensor, split", "sequence"])
def test_an_interrupted_first_forward_leaves_nothing_behind(ranks: Ranks, kind: str) -> None:
    first, second = ranks.run(2, interrupted, kind)
    assert (first["modes"], first["running"], first["whole"]) == (0, 0, 0)
    assert first["drawn"] == second["drawn"]  # all ranks draw alike between forwards, as a shuffling loader needs
