"""What a plain step makes one read: the package's functions and files that it enters, and how deep they nest."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import shardwell
from tests.support import leaks

_HOME = os.path.dirname(shardwell.__file__) + os.sep


class Block(nn.Module):
    """Two linears around an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def footprint(stage: int) -> dict[str, Any]:
    """Train three steps, nothing offloaded or quantised, and look at the third."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 8))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = shardwell.initialize(model=model, config=config)
    entered: set[tuple[str, str]] = set()
    deepest: list[str] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal deepest
        if event != "call" or not frame.f_code.co_filename.startswith(_HOME):
            return
        chain: list[str] = []
        outer: FrameType | None = frame
        while outer is not None:
            if outer.f_code is leaks.look.__code__:
                return  # what tests look at after each step is no part of it
            if outer.f_code.co_filename.startswith(_HOME):
                chain.append(outer.f_code.co_qualname)
            outer = outer.f_back
        entered.add((frame.f_code.co_filename.removeprefix(_HOME), frame.f_code.co_qualname))
        deepest = max(deepest, chain[::-1], key=len)

    for step in range(3):
        if step == 2:
            sys.setprofile(look)
            threading.setprofile(look)
        try:
            engine.backward(engine(torch.randn(4, 64)).square().mean())
            engine.step()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return {"functions": sorted(entered), "files": sorted({file for file, _ in entered}), "deepest": deepest}
