"""A decoder as language models have it, from sizes alone: what presets and Hugging Face configurations are planned as.

It has the parameters and the activations of the architectures that it stands for, and is never trained.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwell import sequence_parallel
from shardwell.checkpointing import checkpoint
from shardwell.errors import ConfigError

_SHARED = {"gate": "colwise", "up": "colwise", "down": "rowwise"}


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes of a decoder: `gated` is Llama's form (RMSNorm, gated MLP, no biases), otherwise it is GPT's."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    mlp: int = 0  # 0: four times the hidden size
    kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: the hidden size over the heads
    positions: int = 0  # of learned position embeddings; 0: rotary ones, which are no parameters
    gated: bool = False
    tied: bool = False  # the last layer has the weights of the embedding
    qkv_bias: bool = False  # of a gated decoder, as Qwen2 has it
    out_bias: bool = False  # of the layer after attention, in a gated decoder
    mlp_bias: bool = False  # of a gated decoder
    head_norm: bool = False  # queries and keys of each head are normalised, as Qwen3 does
    width_norm: bool = False  # all queries and all keys of a token are normalised together, as OLMo 2 does
    embed_norm: bool = False  # what the embedding gives is normalised, as in BLOOM
    norms: str = "before"  # attention and MLP; "after" them, as in OLMo 2, or "around" them, as in Gemma 2
    experts: int = 0  # of each block of a gated decoder; 0: its MLP is one for all tokens
    experts_of_token: int = 0
    shared_mlp: int = 0  # the inner size of an expert that all tokens go to, as Qwen2-MoE has it

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocabulary"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a decoder with {name} = {getattr(self, name)}: expected 1 or more")
        if not self.head_dim and self.hidden % self.heads:
            raise ConfigError(f"a hidden size of {self.hidden} cannot be divided into {self.heads} heads")
        if self.heads % (self.kv_heads or self.heads):
            raise ConfigError(f"{self.heads} heads cannot share {self.kv_heads} heads of keys and values evenly")
        if self.experts and not (self.gated and 1 <= self.experts_of_token <= self.experts):
            raise ConfigError(f"a token cannot go to {self.experts_of_token} of {self.experts} experts")

    @property
    def expert_numels(self) -> tuple[int, int]:
        """The parameters of all experts, and of those that a token goes to."""
        each = self.layers * 3 * self.hidden * (self.mlp or 4 * self.hidden)
        return self.experts * each, self.experts_of_token * each


class Decoder(nn.Module):
    """Embedding, blocks, last norm and output layer; the forward returns the loss of next tokens."""

    _tp_plan: ClassVar[dict[str, str]] = {  # how tensor ranks share it: attention by heads, as Megatron does
        "embed": "embedding_rowwise",
        **{f"blocks.*.{name}": "colwise" for name in ("query", "key", "value", "gate", "up")},
        **{f"blocks.*.{name}": "rowwise" for name in ("out", "down")},
        **{f"blocks.*.mixture.shared.{name}": style for name, style in _SHARED.items()},
        "blocks.*.mixture.experts.gate_up": "packed_colwise",
        "blocks.*.mixture.experts.down": "rowwise",
        "blocks.*.mixture.experts": "moe_tp_experts",
        "head": "colwise_gather_output",
    }

    def __init__(self, sizes: DecoderSizes, *, recomputes: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.embed_norm = _norm(sizes) if sizes.embed_norm else None
        self.positions = nn.Embedding(sizes.positions, sizes.hidden) if sizes.positions else None
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.layers))
        self.norm = _norm(sizes)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.embed.weight
        self._recomputes = recomputes

    @contextlib.contextmanager
    def touched(self) -> Iterator[None]:
        """Let blocks read their parameters and make gradients of them, and compute nothing else.

        An engine allocates its states in such a step, and learns the order of units, as in any other.
        """
        for block in self.blocks:
            block.forward = functools.partial(_touch, block)
        try:
            yield
        finally:
            for block in self.blocks:
                del block.__dict__["forward"]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        for block in self.blocks:
            x = checkpoint(block, x) if self._recomputes else block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class _Touched(torch.autograd.Function):
    """Gives its last argument on; the others get gradients."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given[:-1])
        return given[-1].view_as(given[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return *(torch.empty_like(one) for one in ctx.saved_tensors), grad


def _touch(block: nn.Module, x: Tensor) -> Tensor:
    return cast(Tensor, _Touched.apply(*block.parameters(), x))  # type: ignore[no-untyped-call]


class _Block(nn.Module):
    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self._sizes, self._dim = sizes, sizes.head_dim or sizes.hidden // sizes.heads
        kv, inner, bias = sizes.kv_heads or sizes.heads, sizes.mlp or 4 * sizes.hidden, not sizes.gated
        self.first, self.second = _norm(sizes), _norm(sizes)
        self.query = nn.Linear(sizes.hidden, sizes.heads * self._dim, bias=bias or sizes.qkv_bias)
        self.key = nn.Linear(sizes.hidden, kv * self._dim, bias=bias or sizes.qkv_bias)
        self.value = nn.Linear(sizes.hidden, kv * self._dim, bias=bias or sizes.qkv_bias)
        self.attend = sequence_parallel.DistributedAttention()  # a fused kernel, over whole sequences
        self.out = nn.Linear(sizes.heads * self._dim, sizes.hidden, bias=bias or sizes.out_bias)
        self.head_norms = nn.ModuleList(nn.RMSNorm(self._dim) for _ in range(2)) if sizes.head_norm else None
        widths = (sizes.heads * self._dim, kv * self._dim)
        self.width_norms = nn.ModuleList(nn.RMSNorm(one) for one in widths) if sizes.width_norm else None
        self.after = nn.ModuleList(_norm(sizes) for _ in range(2)) if sizes.norms == "around" else None
        self.mixture = _Mixture(sizes) if sizes.experts else None
        if self.mixture is None:
            bias = bias or sizes.mlp_bias
            self.gate = nn.Linear(sizes.hidden, inner, bias=bias) if sizes.gated else None
            self.up, self.down = nn.Linear(sizes.hidden, inner, bias=bias), nn.Linear(inner, sizes.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        is_after = self._sizes.norms == "after"
        y = x if is_after else self.first(x)
        query, key = (self._by_head(self._by_width(layer(y), at)) for at, layer in enumerate((self.query, self.key)))
        value = self._by_head(self.value(y))
        if self.head_norms is not None:
            query, key = self.head_norms[0](query), self.head_norms[1](key)
        if not self._sizes.positions:
            query, key = _rotated(query), _rotated(key)
        mixed = self.attend(query, key, value, is_causal=True)
        x = x + self._ended(self.out(mixed.transpose(1, 2).flatten(2)), 0)
        y = x if is_after else self.second(x)
        if self.mixture is not None:
            return torch.add(x, self.mixture(y))
        inner = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return torch.add(x, self._ended(self.down(inner), 1))

    def _ended(self, x: Tensor, at: int) -> Tensor:
        """Normalise what attention (0) or the MLP (1) gives, in models that do."""
        if self.after is not None:
            x = self.after[at](x)
        elif self._sizes.norms == "after":
            x = (self.first, self.second)[at](x)
        return x

    def _by_width(self, x: Tensor, at: int) -> Tensor:
        if self.width_norms is None:
            return x
        if x.shape[-1] != next(self.width_norms[at].parameters()).numel():
            raise ConfigError(
                "tensor_parallel.autotp_size: this model normalises all queries of a token together, and no tensor "
                "axis can cut them; plan it without one, or with MODULE:FUNCTION"
            )
        found: Tensor = self.width_norms[at](x)
        return found

    def _by_head(self, x: Tensor) -> Tensor:
        if x.shape[-1] % self._dim:
            heads = self._sizes.kv_heads or self._sizes.heads
            raise ConfigError(
                f"tensor_parallel.autotp_size: ranks cannot share {heads} heads evenly; use a divisor of it"
            )
        return torch.unflatten(x, -1, (-1, self._dim)).transpose(1, 2)


class _Mixture(nn.Module):
    """A router, experts, and an expert for all tokens if there is one."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self._each = sizes.experts_of_token
        self.router = nn.Linear(sizes.hidden, sizes.experts, bias=False)
        self.experts = _Experts(sizes)
        self.shared = _Shared(sizes) if sizes.shared_mlp else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, index = F.softmax(self.router(rows), -1, dtype=torch.float32).topk(self._each)
        found: Tensor = self.experts(rows, index, weights.to(x.dtype))
        if self.shared is not None:
            found = found + self.shared(rows)
        return found.view_as(x)


class _Experts(nn.Module):
    """Packed experts of which each gets as many rows: a batched product has the sizes of a grouped one."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        inner = sizes.mlp or 4 * sizes.hidden
        self.gate_up = nn.Parameter(torch.empty(sizes.experts, 2 * inner, sizes.hidden))
        self.down = nn.Parameter(torch.empty(sizes.experts, sizes.hidden, inner))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        each, number = top_k_index.shape[1], self.gate_up.shape[0]
        order = top_k_index.flatten().argsort()
        rows = hidden_states[order // each]
        if left := -len(rows) % number:
            rows = F.pad(rows, (0, 0, 0, left))
        gate, up = torch.bmm(rows.unflatten(0, (number, -1)), self.gate_up.transpose(1, 2)).chunk(2, -1)
        found = torch.bmm(F.silu(gate) * up, self.down.transpose(1, 2)).flatten(0, 1)[: len(order)]
        weighed: Tensor = found[order.argsort()].unflatten(0, (-1, each)) * top_k_weights.unsqueeze(-1)
        return weighed.sum(1)


class _Shared(nn.Module):
    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        hidden, inner = sizes.hidden, sizes.shared_mlp
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down, self.weight = nn.Linear(inner, hidden, bias=False), nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return torch.sigmoid(self.weight(x)) * found


def _rotated(x: Tensor) -> Tensor:
    """Rotate pairs of a head's numbers, as rotary position embeddings do."""
    angle = torch.arange(x.shape[-2], device=x.device).unsqueeze(-1).to(x.dtype)
    one, other = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-other, one], -1) * angle.sin()


def _norm(sizes: DecoderSizes) -> nn.Module:
    return nn.RMSNorm(sizes.hidden) if sizes.gated else nn.LayerNorm(sizes.hidden)
