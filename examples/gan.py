"""Train a GAN, two engines in turn:  shardwell run -n 2 examples/gan.py

A generator learns to draw numbers from a normal distribution around 3. Each engine has an optimizer of its own.
"""

import sys

import torch
from torch import nn

import shardwell

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
BATCH = 64


def config(rate: float) -> dict:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": rate, "betas": [0.5, 0.9]}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }


torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
critic = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 1))
draws, *_ = shardwell.initialize(model=generator, config=config(2e-3))
judges, *_ = shardwell.initialize(model=critic, config=config(4e-3))

torch.manual_seed(1 + draws.global_rank)
loss_fn = nn.BCEWithLogitsLoss()
real_label, fake_label = torch.ones(BATCH, 1, device=draws.device), torch.zeros(BATCH, 1, device=draws.device)
for step in range(STEPS):
    real = 3 + 0.5 * torch.randn(BATCH, 1, device=draws.device)
    fake = draws(torch.randn(BATCH, 4))
    judged = loss_fn(judges(real), real_label) + loss_fn(judges(fake.detach()), fake_label)
    judges.backward(judged)
    judges.step()
    drawn = loss_fn(judges(fake), real_label)
    draws.backward(drawn)  # goes through the critic, too,
    draws.step()
    judges.zero_grad()  # whose gradients of this are dropped
    if step % 50 == 0 and draws.global_rank == 0:
        print(f"step {step:4}  critic {judged.item():.3f}  generator {drawn.item():.3f}  mean {fake.mean().item():.2f}")

with torch.no_grad():
    mean = draws(torch.randn(1000, 4)).mean().item()
if draws.global_rank == 0:
    print(f"mean of what is drawn: {mean:.2f} (3 is real)")
