"""The demo's model, a small GPT over bytes, and its text, which every machine with Python has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwell.errors import ShardwellError

VOCABULARY = 256  # bytes
_MOST_TEXT = 4 << 20


class TransformerBlock(nn.Module):
    """A block of causal attention and an MLP, each added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, time, 3, -1, self.head_width)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, -1))
        changed: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + changed


class ByteGpt(nn.Module):
    """A model that returns the mean loss of predicting each byte from those before it."""

    def __init__(self, width: int = 128, num_blocks: int = 6, num_heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for embedding in (self.embed, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the logits of the byte after each one of the input."""
        x = self.embed(inputs) + self.position(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def forward(self, text: Tensor) -> Tensor:
        """Return the loss of `text`, (batch, at most context + 1) bytes as int64."""
        inputs, targets = text[:, :-1], text[:, 1:]
        return F.cross_entropy(self.logits(inputs).flatten(0, 1).float(), targets.flatten())


class ByteLogits(ByteGpt):
    """The same model without its loss, which the last stage of a pipeline computes."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of the byte after each one of the input."""
        return self.logits(inputs)


def standard_library_text() -> Tensor:
    """Return the sources of Python's standard library, in alphabetical order, as 1D uint8; a few MB."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _MOST_TEXT:
            break
    if len(text) < 1 << 16:
        raise ShardwellError(f"the demo reads Python's own sources, and there are hardly any in {folder}")
    return torch.frombuffer(text[:_MOST_TEXT], dtype=torch.uint8)


def rows_of_step(text: Tensor, step: int, num_rows: int, length: int) -> Tensor:
    """Return `num_rows` random pieces of the text as int64, the same on all ranks and at all stages of a step."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length, (num_rows, 1), generator=generator)
    return text[starts + torch.arange(length)].long()
