"""The small model that programs use, and the ways to call it: what it gives back, and what the caller does with that.

A way is what a user writes. It is the same code for a plain module and for an engine: `call` is what is called,
`module` is the user's own module. It returns two losses of one forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 3  # odd, so that shards cut through parameters


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH + 1)
        self.down = nn.Linear(WIDTH + 1, WIDTH, bias=False)
        self.kept: Any = None

    def forward(self, x: Tensor, way: str = "tensor", bag: Any = None) -> Any:
        hidden = torch.tanh(self.up(x))
        if way == "fails":
            raise LookupError("the forward failed on purpose")
        if isinstance(bag, list):
            bag.append(hidden)
        elif isinstance(bag, dict):
            bag["hidden"] = hidden
        if way == "kept side":
            self.kept = self.down(hidden * 0.5)
        elif way == "kept weight":
            self.kept = self.down.weight.t()
        out = x + self.down(hidden)
        return out.view(-1) if way == "view" else PACKED[way](out) if way in PACKED else out


@dataclass
class Answer:
    """An output that is no pytree."""

    out: Tensor


class Net(nn.Module):
    """Two blocks, a head, a scale of the root's own, and a side head that most forwards leave alone.

    What a way says of outputs, it says of the model's and of the last block's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH)
        self.side = nn.Linear(WIDTH, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.kept: Any = None

    def forward(self, x: Tensor, way: str = "tensor", bag: Any = None) -> Any:
        features = self.blocks[0](x)
        features = self.blocks[1](features, way, bag)
        if way in PACKED:
            features = UNPACKED[way](features)
        if way == "view":
            features[0] = 0.0
            features = features.mul_(0.5).view(x.shape)
        if isinstance(bag, dict):
            bag["features"] = features
        if way in ("side", "kept side"):
            self.kept = self.side(features)
        elif way == "kept weight":
            self.kept = self.side.weight.t()
        elif way == "no_grad part":
            with torch.no_grad():
                features = features + self.blocks[0](features)
        elif way == "recursive" and bag:
            return self(features, way, bag - 1)
        out = self.head(features) * self.scale
        if way == "view":
            return out.view(-1)
        return PACKED[way](out) if way in PACKED else (out, self.kept) if way == "side" else out


PACKED: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda out: {"logits": out},
    "namespace": lambda out: SimpleNamespace(out=out),
    "dataclass": Answer,
    "deque": lambda out: deque([out]),
    "distribution": lambda out: torch.distributions.Normal(out, torch.ones_like(out)),
}
UNPACKED: dict[str, Callable[[Any], Tensor]] = {
    "dict": lambda found: found["logits"],
    "namespace": lambda found: found.out,
    "dataclass": lambda found: found.out,
    "deque": lambda found: found[0],
    "distribution": lambda found: found.mean,
}
Call = Callable[..., Any]
Losses = tuple[Tensor, Tensor]


def losses_of(out: Tensor) -> Losses:
    if out.dtype == torch.bfloat16:
        out = out.float()
    return out.square().mean(), out.sin().mean()


def _list(call: Call, module: nn.Module, x: Tensor) -> Losses:
    bag: list[Tensor] = []
    out = call(x, bag=bag)
    return losses_of(out * bag[0].sum())


def _dict(call: Call, module: nn.Module, x: Tensor) -> Losses:
    bag: dict[str, Tensor] = {}
    out = call(x, bag=bag)
    return losses_of(out + bag["features"] * bag["hidden"].sum())


def _kept_side(call: Call, module: Any, x: Tensor) -> Losses:
    out = call(x, "kept side")
    return losses_of(out * module.blocks[1].kept + module.kept.sum())


def _side(call: Call, module: Any, x: Tensor) -> Losses:
    out, side = call(x, "side")
    return losses_of(out + side.sum())


def _kept_weight(call: Call, module: Any, x: Tensor) -> Losses:
    out = call(x, "kept weight")
    return losses_of(out @ module.kept @ module.blocks[1].kept[:2])


def _view_in_place(call: Call, module: nn.Module, x: Tensor) -> Losses:
    out = call(x, "view")
    out[0] = 0.0
    return losses_of(out.mul_(0.5))


def _block_in_place(call: Call, module: Any, x: Tensor) -> Losses:
    features = module.blocks[0](x.to(module.blocks[0].up.weight.dtype))
    features.clamp_(-0.5, 0.5)
    return losses_of(features)


def _hook(call: Call, module: Any, x: Tensor) -> Losses:
    found: list[Tensor] = []
    handle = module.blocks[1].register_forward_hook(lambda _, inputs, output: found.append(output))
    try:
        out = call(x)
    finally:
        handle.remove()
    return losses_of(out * found[0])


def _part(call: Call, module: Any, x: Tensor) -> Losses:
    features = module.blocks[1](x.to(module.blocks[1].up.weight.dtype))
    return losses_of(module.head(features))


def _twice(call: Call, module: nn.Module, x: Tensor) -> Losses:
    return losses_of(call(x) * call(x.flip(0)))


def _penalty(call: Call, module: Any, x: Tensor) -> Losses:
    first, second = losses_of(call(x))
    return first + 0.1 * module.blocks[0].down.weight.float().square().sum().to(first.dtype), second


def _recomputed(call: Call, module: nn.Module, x: Tensor) -> Losses:
    return losses_of(checkpoint(call, x, use_reentrant=False))


WAYS: dict[str, Callable[[Call, nn.Module, Tensor], Losses]] = {
    "tensor": lambda call, module, x: losses_of(call(x)),
    **{
        way: lambda call, module, x, way=way: losses_of(UNPACKED[way](call(x, way)))  # type: ignore[misc]
        for way in PACKED
    },
    "caller's list": _list,
    "caller's dict": _dict,
    "side": _side,
    "kept side": _kept_side,
    "kept weight": _kept_weight,
    "changed view": _view_in_place,
    "changed block output": _block_in_place,
    "hook": _hook,
    "part alone": _part,
    "no_grad part": lambda call, module, x: losses_of(call(x, "no_grad part")),
    "recursive": lambda call, module, x: losses_of(call(x, "recursive", 1)),
    "twice": _twice,
    "penalty": _penalty,
    "recomputed": _recomputed,
}
