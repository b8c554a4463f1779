"""Train a small vision transformer on generated pictures:  shardwell run -n 2 examples/vision.py

The task: which quarter of a picture has the bright square? ZeRO stage 2, with a learning-rate schedule of torch's.
"""

import sys

import torch
from torch import Tensor, nn

import shardwell

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
SIZE, PATCH, WIDTH = 32, 8, 64


class Vit(nn.Module):
    """Patches, transformer blocks, and a head over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.position = nn.Parameter(torch.randn((SIZE // PATCH) ** 2, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.head = nn.Linear((SIZE // PATCH) ** 2 * WIDTH, 4)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1))


def pictures(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise with a bright square in one of its quarters, and the number of that quarter."""
    labels = torch.randint(4, (number,), generator=generator)
    noise = torch.randn(number, 1, SIZE, SIZE, generator=generator)
    half = SIZE // 2
    for picture, label in zip(noise, labels.tolist(), strict=True):
        top, left = half * (label // 2), half * (label % 2)
        picture[:, top + 4 : top + 12, left + 4 : left + 12] += 2.0
    return noise, labels


torch.manual_seed(0)
model = Vit()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
config = {"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 2}, "steps_per_print": 10}
engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)

generator = torch.Generator().manual_seed(engine.global_rank)  # every rank has pictures of its own
for _ in range(STEPS):
    batch, labels = pictures(16, generator)
    loss = nn.functional.cross_entropy(engine(batch), labels.to(engine.device))
    engine.backward(loss)
    engine.step()

engine.eval()
with torch.no_grad():
    batch, labels = pictures(64, torch.Generator().manual_seed(1000))
    right = (engine(batch).argmax(1).cpu() == labels).float().mean()
if engine.global_rank == 0:
    print(f"loss {loss.item():.3f}, right {right:.0%}")
