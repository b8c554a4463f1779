"""Train on pipeline, data and tensor axes at once (3D):  shardwell run -n 8 examples/three_axes.py

Two pipeline stages, each cut over two ranks of the tensor axis; the other ranks are data parallel, at ZeRO stage 1.
"""

import sys

import torch
from torch import nn

import shardwell

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20


class Block(nn.Module):
    """A block of a decoder without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the block computes."""
        return x + self.down(nn.functional.gelu(self.up(x)))


config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,  # micro-batches of a step
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 1},
    "tensor_parallel": {"autotp_size": 2, "plan": {"*.up": "colwise", "*.down": "rowwise"}},
    "pipeline": {"stages": 2, "schedule": "1f1b"},
}
torch.manual_seed(0)
model = nn.Sequential(*[Block(32) for _ in range(4)], nn.Linear(32, 8))
split = shardwell.pipeline.split(model, loss_fn=nn.functional.cross_entropy)
engine, *_ = shardwell.initialize(model=split, config=config)


def micro_batches():  # type: ignore[no-untyped-def]
    """Yield rows; all ranks that train on the same ones read the same."""
    generator = torch.Generator().manual_seed(engine.data_rank)
    while True:
        inputs = torch.randn(4, 32, generator=generator)
        yield inputs, inputs[:, :8].argmax(1)


batches = micro_batches()
for step in range(1, STEPS + 1):
    loss = engine.train_batch(batches)
    if engine.global_rank == 0 and step % 5 == 0:
        print(f"step {step}  loss {loss:.3f}  bubble {engine.bubble():.0%}")
