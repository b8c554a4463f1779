"""Train a small GPT over bytes at ZeRO stage 3:  shardwell run -n 2 examples/train_gpt.py [TEXT FILE]"""

import logging
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import shardwell

CONFIG = Path(__file__).with_name("zero3.json")
CONTEXT, WIDTH, BLOCKS = 64, 128, 4


class Gpt(nn.Module):
    """Every block of the ModuleList is gathered when it runs and released after."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(BLOCKS)]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text[:, :-1]) + self.position(torch.arange(CONTEXT, device=text.device))
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=text.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


class Pieces(Dataset):
    """A file, cut into pieces of one context and the byte after it."""

    def __init__(self, path: Path) -> None:
        self.text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * CONTEXT : (index + 1) * CONTEXT + 1]


logging.basicConfig(level=logging.INFO, format="%(message)s")  # rank 0 says at the start where bytes rest
text = Path(sys.argv[1] if len(sys.argv) > 1 else nn.functional.__file__)  # any text will do, such as torch's source
with shardwell.zero.Init(config=CONFIG):
    model = Gpt()
engine, optimizer, loader, scheduler = shardwell.initialize(model=model, config=CONFIG, training_data=Pieces(text))

for step, batch in enumerate(loader):
    loss = engine(batch)
    engine.backward(loss)
    engine.step()
    if step % 20 == 0 and engine.global_rank == 0:
        print(f"step {step:4}  loss {loss.item():.3f}  gradient norm {engine.get_global_grad_norm():.2f}", flush=True)

if engine.global_rank == 0:
    print(engine.traffic())  # every block is gathered twice in a step
