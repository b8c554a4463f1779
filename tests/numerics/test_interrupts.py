"""A forward that is interrupted, as in a notebook: nothing of the engine stays behind, and it trains on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwell
from tests.support.models import Gpt, batches, zero


def plain_gradient() -> Tensor:
    """Return what torch.func gives, which refuses to work where hooks for saved tensors are on."""
    layer, x = nn.Linear(3, 3), torch.ones(2, 3)
    values = {name: value.detach() for name, value in layer.named_parameters()}
    found = torch.func.grad(lambda v: torch.func.functional_call(layer, v, (x,)).sum())(values)
    return found["weight"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_a_forward_that_is_interrupted_leaves_nothing_behind(kind: type[BaseException]) -> None:
    def train(interrupts: bool) -> list[float]:
        torch.manual_seed(0)
        model: Any = Gpt()
        config = zero(3, shardwell={"shard_at_world_one": True})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
        losses = []
        for number, tokens in enumerate(batches(3, rows=2)):
            if interrupts and number == 1:
                interrupt(engine, tokens)
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        engine.destroy(whole=False)
        return losses

    def interrupt(engine: shardwell.Engine, tokens: Tensor) -> None:
        def stop(*_: Any) -> None:
            raise kind("stopped")

        blocks: Any = engine.module.blocks
        handle = blocks[1].register_forward_pre_hook(stop)
        with pytest.raises(kind):
            engine(tokens)
        handle.remove()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert plain_gradient().eq(2).all()

    assert train(interrupts=True) == train(interrupts=False)
