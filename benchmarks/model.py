"""The decoder that every benchmark and example trains: small, plain PyTorch, and unaware of any engine.

Pre-RMSNorm blocks with rotary attention and a SwiGLU, an embedding and an untied head. It can be built on
the meta device, and it stays in the dtype of its parameters (bf16 parameters give bf16 activations).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder; ``mlp`` is the hidden width of the SwiGLU, ``seq`` the usual sequence length."""

    vocab: int
    width: int
    blocks: int
    heads: int
    mlp: int
    seq: int

    @property
    def num_parameters(self) -> int:
        """The exact parameter count, without building the model."""
        block = 4 * self.width**2 + 3 * self.width * self.mlp + 2 * self.width
        return self.blocks * block + 2 * self.vocab * self.width + self.width


TINY = DecoderConfig(vocab=256, width=64, blocks=2, heads=4, mlp=176, seq=32)
SMALL = DecoderConfig(vocab=8192, width=512, blocks=8, heads=8, mlp=1376, seq=128)  # 33.7M
MEDIUM = DecoderConfig(vocab=8192, width=512, blocks=12, heads=8, mlp=1376, seq=128)  # 46.3M
BASE = DecoderConfig(vocab=32000, width=1024, blocks=24, heads=16, mlp=2816, seq=1024)  # 0.37B
NARROW = DecoderConfig(vocab=8192, width=256, blocks=200, heads=4, mlp=704, seq=512)  # 165M in many small units
LARGE = DecoderConfig(vocab=32000, width=2048, blocks=24, heads=16, mlp=5504, seq=2048)  # 1.345B
XLARGE = DecoderConfig(vocab=32000, width=3072, blocks=26, heads=24, mlp=8192, seq=2048)  # 3.14B
SEVEN = DecoderConfig(vocab=32000, width=4096, blocks=32, heads=32, mlp=11008, seq=1024)  # 6.74B
HUGE = DecoderConfig(vocab=32000, width=5120, blocks=40, heads=40, mlp=13824, seq=1024)  # 13.0B
TALL = replace(HUGE, blocks=65)  # 20.95B
DEEP = replace(HUGE, blocks=78)  # 25.07B
DEEPEST = replace(HUGE, blocks=126)  # 40.30B
PRESETS = {
    "tiny": TINY,
    "small": SMALL,
    "medium": MEDIUM,
    "base": BASE,
    "narrow": NARROW,
    "large": LARGE,
    "xlarge": XLARGE,
    "huge": HUGE,
}


def rotary_table(seq: int, head_width: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of shape (seq, head_width / 2).

    The angles are computed in fp32 and rounded once, to the dtype of the activations: an fp32 table would
    promote everything after the first attention to fp32.
    """
    frequencies = 10000.0 ** (-torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(seq, device=device, dtype=torch.float32), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to (batch, heads, seq, head_width)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, seq, width))


class SwiGLU(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.mlp, bias=False)
        self.up = nn.Linear(config.width, config.mlp, bias=False)
        self.down = nn.Linear(config.mlp, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One pre-norm decoder block."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A decoder-only language model; ``forward`` returns the mean cross entropy.

    ``checkpoint=True`` recomputes each block in backward (non-reentrant activation checkpointing).
    """

    def __init__(self, config: DecoderConfig, checkpoint: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoint = checkpoint
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every parameter from the current seed; call it again after ``to_empty`` of a meta model."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        kind = x.device.type
        has_autocast = kind != "meta" and torch.is_autocast_enabled(kind)  # torch has none for meta tensors
        dtype = torch.get_autocast_dtype(kind) if has_autocast else x.dtype
        cos, sin = rotary_table(tokens.shape[1], self.config.width // self.config.heads, x.device, dtype)
        for block in self.blocks:
            if self.checkpoint and torch.is_grad_enabled():
                x = checkpointed(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        logits = self.head(self.norm(x)).float()  # a bf16 loss would resolve no better than 0.03
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
