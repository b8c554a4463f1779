"""Outputs that no hook finds: a backward gets the parameters it needs, whatever became of what a module gave."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.support.ranks import Ranks
from tests.support.scenes import WIDTH, Scene, Stack, layer, play_plainly, play_sharded
from tests.support.training import distance


class Net(nn.Module):
    """Blocks that are units, and layers of the root before and after them."""

    block: type[nn.Module] = nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([type(self).block() for _ in range(3)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.side = layer(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class MaskedLogits(Scene):
    """A view is returned, by blocks and by the model, and the caller changes it in place."""

    def build(self) -> nn.Module:
        class Sliced(Inner):
            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x)[:, :WIDTH]

        class Model(Net):
            block = Sliced

            def forward(self, x: Tensor) -> Tensor:
                x = self.first(x)
                for block in self.blocks:
                    out = block(x)
                    out.masked_fill_(out < -0.5, 0.1)
                    x = x + out
                return self.last(x)[:, :4]

        return Model()

    def loss(self, model: Callable[..., Any], x: Tensor, step: int) -> Tensor:
        logits = model(x)
        logits[:, 1] = -1.0
        logits.mul_(0.5)
        return logits.square().mean()


class Own:
    """No container that anybody knows."""

    def __init__(self, x: Tensor) -> None:
        self._hidden = {"x": x}

    def get(self) -> Tensor:
        return self._hidden["x"]


class OwnObjects(Scene):
    """Outputs inside namespaces, deques, sets, distributions and objects of the user's."""

    def build(self) -> nn.Module:
        kinds: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = [
            (lambda x: SimpleNamespace(x=x), lambda out: out.x),
            (lambda x: deque([x]), lambda out: out[0]),
            (lambda x: {x}, lambda out: next(iter(out))),
            (lambda x: torch.distributions.Normal(x, 1.0), lambda out: out.mean),
            (Own, lambda out: out.get()),
        ]

        class Wrapped(Inner):
            def forward(self, x: Tensor, kind: int = 0) -> Any:
                return kinds[kind][0](super().forward(x))

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList([Wrapped() for _ in kinds])
                self.last = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Any:
                for kind, block in enumerate(self.blocks):
                    x = x + kinds[kind][1](block(x, kind))
                return Own(self.last(x))

        return Model()

    def loss(self, model: Callable[..., Any], x: Tensor, step: int) -> Tensor:
        out: Tensor = model(x).get()
        return out.square().mean()


class CallersList(Scene):
    """A block appends to a list of the caller's."""

    config = {"zero_optimization": {"stage3_prefetch_bucket_size": 0}}  # noqa: RUF012  # nothing is whole by luck

    def build(self) -> nn.Module:
        class Appends(Inner):
            def forward(self, x: Tensor, outs: list[Tensor]) -> Tensor:
                out = self.inner(x)
                outs.append(self.side(out))
                return out

        class Model(Net):
            block = Appends

            def forward(self, x: Tensor) -> Tensor:
                outs: list[Tensor] = []
                x = self.first(x)
                for block in self.blocks:
                    x = x + block(x, outs)
                return self.last(x) + torch.stack(outs).tanh().sum(0)

        return Model()


class FeatureHooks(Scene):
    """The user's own hooks take features, from inside units and of units, before and after shardwell's."""

    config = {"zero_optimization": {"stage3_prefetch_bucket_size": 0}}  # noqa: RUF012  # nothing is whole by luck

    def build(self) -> nn.Module:
        class Sides(Inner):
            def forward(self, x: Tensor) -> Tensor:
                out = self.inner(x)
                self.side(out)
                return out

        class Model(Net):
            block = Sides

        model = Model()
        self.watch(model)
        return model

    def watch(self, model: nn.Module) -> None:
        self.features: list[Tensor] = []
        for module in (*model.blocks, *(block.side for block in model.blocks), model.blocks[1].inner[0], model.first):
            module.register_forward_hook(lambda module, args, output: self.features.append(output))

    def loss(self, model: Callable[..., Any], x: Tensor, step: int) -> Tensor:
        self.features.clear()
        out = model(x)
        return out.square().mean() + sum((f.sin().mean() for f in self.features), torch.zeros(()))


class AuxiliaryHead(Scene):
    """Auxiliary outputs of the root and of blocks are kept on `self`, and used in the loss outside."""

    def build(self) -> nn.Module:
        class Keeps(Inner):
            def forward(self, x: Tensor) -> Tensor:
                out = self.inner(x)
                self.aux = self.side(out)  # after what is returned, so before that in backward
                return out

        class Model(Net):
            block = Keeps

            def __init__(self) -> None:
                super().__init__()
                self.head = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                out = super().forward(x)
                self.aux = self.head(out)
                return out

        return Model()

    def loss(self, model: Callable[..., Any], x: Tensor, step: int) -> Tensor:
        out = model(x)
        module = getattr(model, "module", model)
        extra = module.aux.square().mean() + sum(block.aux.sin().mean() for block in module.blocks)
        return out.square().mean() + 0.3 * extra


class OnlyAuxiliary(AuxiliaryHead):
    """The output itself is not used at all."""

    def loss(self, model: Callable[..., Any], x: Tensor, step: int) -> Tensor:
        model(x)
        module = getattr(model, "module", model)
        return module.aux.square().mean() + sum(block.aux.sin().mean() for block in module.blocks)


class Recursion(Scene):
    """A unit calls itself, before and after it has used its own weights."""

    def build(self) -> nn.Module:
        class Calls(Inner):
            def forward(self, x: Tensor, depth: int = 3) -> Tensor:
                x = torch.tanh(self.side(x))
                if depth:
                    x = x + self(x * 0.5, depth - 1)
                return x + self.inner(x)

        class Model(Net):
            block = Calls

        return Model()


class CachedView(Scene):
    """A view of a weight is made in the first forward and used in all."""

    def build(self) -> nn.Module:
        class Caches(Inner):
            cache: Tensor | None = None

            def forward(self, x: Tensor) -> Tensor:
                if self.cache is None:
                    self.cache = self.side.weight.t()
                return self.inner(x) + x @ self.cache

        class Model(Net):
            block = Caches

        return Model()


class CachedForOthers(Scene):
    """A view of a unit's weight is used by the caller after the unit is released, in the same step."""

    def build(self) -> nn.Module:
        class Shows(Inner):
            def forward(self, x: Tensor) -> Tensor:
                self.shown = self.side.weight.t()
                return self.inner(x)

        class Model(Net):
            block = Shows

            def forward(self, x: Tensor) -> Tensor:
                out = super().forward(x)
                return out + sum(x @ block.shown for block in self.blocks)

        return Model()

    def loss(self, model: Callable[..., Any], x: Tensor, step: int) -> Tensor:
        out = model(x)
        module = getattr(model, "module", model)
        return out.square().mean() + (x @ module.blocks[0].shown).sin().mean()


class ComputedWeights(Scene):
    """Weights that are computed from parameters in each forward."""

    def build(self) -> nn.Module:
        class Normed(Inner):
            def __init__(self) -> None:
                super().__init__()
                parametrizations.weight_norm(self.side)
                parametrizations.weight_norm(self.inner[0])

            def forward(self, x: Tensor) -> Tensor:
                self.aux = self.side(x)
                return self.inner(x) + self.aux

        class Model(Net):
            block = Normed

        return Model()


class Recomputed(Scene):
    """Activation checkpointing around blocks and inside them, with outputs that are hidden."""

    def build(self) -> nn.Module:
        class Inside(Inner):
            def forward(self, x: Tensor) -> SimpleNamespace:
                return SimpleNamespace(x=checkpoint(self.inner, x, use_reentrant=False), y=self.side(x))

        class Model(Net):
            block = Inside

            def forward(self, x: Tensor) -> Tensor:
                x = self.first(x)
                for index, block in enumerate(self.blocks):
                    out = checkpoint(block, x, use_reentrant=False) if index else block(x)
                    x = x + out.x + out.y
                return self.last(x)

        return Model()


class SavedOnHost(MaskedLogits):
    """Other saved-tensor hooks are on: torch's, or the user's own."""

    def loss(self, model: Callable[..., Any], x: Tensor, step: int) -> Tensor:
        hooks = saved_tensors_hooks(lambda t: t.detach(), lambda t: t) if step % 2 else save_on_cpu()
        with hooks:
            return super().loss(model, x, step)


class HiddenPenalty(Scene):
    """Double backward, and a graph that is gone through twice, from outputs that are hidden."""

    def build(self) -> nn.Module:
        return OwnObjects().build()

    def loss(self, model: Callable[..., Any], x: Tensor, step: int) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x).get()
        (grad,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(out.cos().sum(), x, retain_graph=True)
        return out.square().mean() + (grad.norm(dim=1) - 1).square().mean() + (again * out).mean()


class ModelRecomputed(Scene):
    """All of the engine inside a checkpoint."""

    reentrant = False

    def build(self) -> nn.Module:
        return Stack()

    def loss(self, model: Callable[..., Any], x: Tensor, step: int) -> Tensor:
        out: Tensor = checkpoint(model, x.clone().requires_grad_(), use_reentrant=self.reentrant)
        return out.square().mean()


class ModelRecomputedReentrantly(ModelRecomputed):
    reentrant = True


SCENES = [
    MaskedLogits, OwnObjects, CallersList, FeatureHooks, AuxiliaryHead, OnlyAuxiliary, Recursion, CachedView,
    CachedForOthers, ComputedWeights, Recomputed, SavedOnHost, HiddenPenalty, ModelRecomputed,
    ModelRecomputedReentrantly,
]  # fmt: skip


def play(scenes: list[type[Scene]], stages: tuple[int, ...]) -> list[list[dict[str, Tensor]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of views that are kept
        return [[play_sharded(kind(), stage) for stage in stages] for kind in scenes]


@pytest.mark.parametrize("kind", SCENES, ids=lambda kind: kind.__name__)
def test_parameters_follow_plain_pytorch(ranks: Ranks, kind: type[Scene]) -> None:
    """At stage 3, where units are resharded, and at one of the others."""
    expected, stages = play_plainly(kind(), 2), (SCENES.index(kind) % 3, 3)
    for stage, found in zip(stages, ranks.run(2, play, [kind], stages)[0][0], strict=True):
        difference, name = distance(found, expected)
        assert difference < 1e-10, f"stage {stage}: {name} differs by {difference}"
