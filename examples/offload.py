"""Train with optimizer state in host memory (ZeRO-Offload):  shardwell run -n 2 examples/offload.py

The host updates a unit while the device still computes the backward of others. `"offload_param": {"device": "cpu"}` at
stage 3 moves the parameters, too.
"""

import sys

import torch
from torch import nn

import shardwell

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "steps_per_print": 10,
}
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4)], nn.Linear(128, 1))
engine, *_ = shardwell.initialize(model=model, config=config)

torch.manual_seed(engine.global_rank)
inputs = torch.randn(8, 128)  # learnt by heart
for _ in range(STEPS):
    loss = (engine(inputs) - inputs.sum(1, keepdim=True).to(engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
if engine.global_rank == 0:
    print(engine.memory())  # which state is on which tier
