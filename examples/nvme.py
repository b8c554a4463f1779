"""Train with all states on a disk (ZeRO-Infinity):  shardwell run -n 2 examples/nvme.py [FOLDER ON AN NVME DISK]"""

import sys
import tempfile

import torch
from torch import nn

import shardwell

STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 20
folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
place = {"device": "nvme", "nvme_path": folder}
config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": place, "offload_param": {**place, "max_in_cpu": 0}},
    "steps_per_print": 10,
}
with shardwell.zero.Init(config=config):  # parameters go to the disk as they are made
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)], nn.Linear(256, 1))
engine, *_ = shardwell.initialize(model=model, config=config)

torch.manual_seed(engine.global_rank)
for _ in range(STEPS):
    inputs = torch.randn(8, 256)
    loss = (engine(inputs) - inputs.sum(1, keepdim=True).to(engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
if engine.global_rank == 0:
    print(engine.offload)  # how many units and bytes are where
    print(engine.memory())
