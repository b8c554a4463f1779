"""Random models as plain data: a `Case` says what to build and how to train it, plainly and sharded alike.

A tree is the name of a leaf, or a pair of a container's name and the trees inside. Whatever is chosen by a number
(a block, a parameter, a module) is counted modulo how many there are, and whatever is given per step or micro-step
starts again when it is used up. So every case is a valid one, also while it is made smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import shardwell
from tests.support.models import whole_parameters

NUM_RANKS, ROWS = 2, 3
Tree = Any  # str | tuple[str, tuple[Tree, ...]]


@dataclass(frozen=True)
class Case:
    """A model, and how to train it."""

    stage: int = 3
    blocks: tuple[Tree, ...] = ("linear",)
    outside: tuple[str, ...] = ()  # leaves of the root, called before the blocks
    width: int = 2
    shared: tuple[tuple[int, int, bool], ...] = ()  # the second leaf uses the first one's parameters, or is the first
    orders: tuple[tuple[int, ...], ...] = ((0,),)  # for each micro-step, the blocks to call
    frozen: tuple[tuple[int, ...], ...] = ((),)  # for each step, the parameters that do not train
    penalised: tuple[int, ...] = ()  # parameters that the loss itself reads
    recompute: tuple[str, ...] = ("",)  # for each block
    num_losses: int = 1  # backwards through one forward
    steps: int = 3
    accumulation: int = 1
    clip: float = 0.0
    groups: str = "one"  # of parameters
    born_sharded: bool = False
    leaf: tuple[str, int] | None = None  # a module to name as one unit
    limits: tuple[tuple[str, int], ...] = ()  # of stage 3
    synced: bool = True  # off: micro-steps before the boundary run in no_sync
    between: str = ""  # what happens between steps

    @property
    def tolerance(self) -> float:
        """fp32 parameters are added up in another order."""
        return 1e-5 if {"narrow", "blend"} & {*self.outside, *_leaves_of(("", self.blocks))} else 1e-9


def _leaves_of(tree: Tree) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    else:
        for inner in tree[1]:
            yield from _leaves_of(inner)


# ---------------------------------------------------------------------------------------------------------- leaves


def empty(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype))


class Bare(nn.Module):
    """Parameters of its own, and a function of them and the input."""

    def __init__(self, use: Callable[..., Tensor], **parameters: nn.Parameter) -> None:
        super().__init__()
        self._use = use
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self._use(x, *self._parameters.values())


class Several(nn.Module):
    """Its parameters are in a list, which is a module that nobody calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.several = nn.ParameterList([empty(width), empty(width, width), empty(1)])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.several[1] * self.several[0] + self.several[2]


class Lookup(nn.Embedding):
    """Its input needs no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.arange(len(x)) % self.num_embeddings)


class Convolution(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unsqueeze(1)).squeeze(1)


class Attention(nn.MultiheadAttention):
    """Uses the weight of a module inside without calling that module."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        rows = x.unsqueeze(0)
        return super().forward(rows, rows, rows, need_weights=False)[0].squeeze(0)


class Recurrent(nn.GRU):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.unsqueeze(0))[0].squeeze(0)


def _weight_norm(width: int) -> nn.Module:
    linear = nn.Linear(width, width)
    with shardwell.zero.GatheredParameters(linear.weight):  # it may be born sharded
        return parametrizations.weight_norm(linear)


LEAVES: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda w: nn.Linear(w, w),
    "norm": nn.LayerNorm,
    "embedding": lambda w: Lookup(2, w),
    "conv": lambda w: Convolution(1, 1, 3, padding=1),
    "vector": lambda w: Bare(torch.mul, p=empty(w)),
    "scalar": lambda w: Bare(torch.mul, p=empty()),
    "single": lambda w: Bare(torch.add, p=empty(1)),
    "nothing": lambda w: Bare(lambda x, p: x + p.sum(), p=empty(0, w)),
    "transposed": lambda w: Bare(lambda x, p, q: x @ p @ q, p=nn.Parameter(torch.empty(5, w).t()), q=empty(5, w)),
    "permuted": lambda w: Bare(
        lambda x, p: x * p.sum((0, 2)), p=nn.Parameter(torch.empty(2, 3, w, 1).permute(0, 2, 1, 3).squeeze(3))
    ),
    "narrow": lambda w: Bare(lambda x, p: x * p.double(), p=empty(w, dtype=torch.float32)),
    "blend": lambda w: Bare(
        lambda x, p, q, r: (x @ p.double() * q).float().mul(r).double(),
        p=empty(w, w, dtype=torch.float32), q=empty(w), r=empty(1, dtype=torch.float32),
    ),
    "numbers": lambda w: Bare(
        lambda x, p, q: x[:, p] * q, p=nn.Parameter(torch.arange(w).flip(0), requires_grad=False), q=empty(w)
    ),
    "idle": lambda w: Bare(lambda x, p: x, p=empty(w + 1)),
    "half idle": lambda w: Bare(lambda x, p, q: x * q, p=empty(3, w), q=empty(w)),
    "several": Several,
    "weight norm": _weight_norm,
    "attention": lambda w: Attention(w, 1, batch_first=True),
    "recurrent": lambda w: Recurrent(w, w, batch_first=True),
}  # fmt: skip
KINDS = tuple(type(make(1)) for make in LEAVES.values())


# ------------------------------------------------------------------------------------------------------ containers


class Chain(nn.Module):
    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = _beside(part, x)
        return x


class Fan(nn.Module):
    """All parts see the same input."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({f"part{index}": part for index, part in enumerate(parts)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.stack([part(x) for part in self.parts.values()]).sum(0))


CONTAINERS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    "sequence": lambda parts: nn.Sequential(*parts),
    "chain": Chain,
    "fan": Fan,
}


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.recompute = case.recompute
        for index, name in enumerate(case.outside):
            self.add_module(f"outside{index}", LEAVES[name](case.width))
        self.blocks = nn.ModuleList([_grow(tree, case.width) for tree in case.blocks])

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        if "reentrant" in self.recompute:  # such a checkpoint gives gradients only if its input needs one
            x = x.clone().requires_grad_()
        for name, module in self.named_children():
            if name != "blocks":
                x = _beside(module, x)
        for index in order:
            index %= len(self.blocks)
            how = self.recompute[index % len(self.recompute)]
            block = partial(_beside, self.blocks[index])
            x = checkpoint(block, x, use_reentrant=how == "reentrant") if how else block(x)
        return x


def _beside(module: nn.Module, x: Tensor) -> Tensor:
    return x + torch.tanh(module(x))


def _grow(tree: Tree, width: int) -> nn.Module:
    if isinstance(tree, str):
        return LEAVES[tree](width)
    return CONTAINERS[tree[0]]([_grow(inner, width) for inner in tree[1]])


def build(case: Case) -> Model:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = Model(case)
    finally:
        torch.set_default_dtype(before)
    for first, second, whole in case.shared:
        _share(model, first, second, whole)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in _floating(model):
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.5 * values + 0.25)
    return model


def _share(model: Model, first: int, second: int, whole: bool) -> None:
    places = [
        (parent, name, module)
        for parent in list(model.modules())
        for name, module in parent.named_children()
        if isinstance(module, KINDS) and not isinstance(parent, KINDS)
    ]
    (_, _, source), (parent, name, target) = places[first % len(places)], places[second % len(places)]
    if whole:
        parent._modules[name] = source
        return
    for key, parameter in source._parameters.items():
        other = target._parameters.get(key)
        if parameter is not None and other is not None and _kind(other) == _kind(parameter):
            setattr(target, key, parameter)


def _kind(parameter: nn.Parameter) -> tuple[Any, ...]:
    return parameter.shape, parameter.dtype


# -------------------------------------------------------------------------------------------------------- training


def _floating(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.is_floating_point()]


def _freeze(model: nn.Module, case: Case, step: int) -> None:
    parameters = _floating(model)
    chosen = {index % len(parameters) for index in case.frozen[step % len(case.frozen)]}
    for index, parameter in enumerate(parameters):
        parameter.requires_grad_(index not in chosen)


def _optimizer(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    """AdamW with an epsilon that keeps gradients of rounding noise from becoming steps."""
    parameters: list[Any] = list(model.parameters())
    if case.groups == "two":
        parameters = [{"params": parameters[::2], "lr": 2e-2}, {"params": parameters[1::2], "weight_decay": 0.0}]
    elif case.groups == "some":
        parameters = parameters[: (len(parameters) + 1) // 2]
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-3)


def _losses(model: Callable[..., Tensor], module: nn.Module, case: Case, x: Tensor, micro: int) -> Iterator[Tensor]:
    out = model(x, case.orders[micro % len(case.orders)])
    parameters = _floating(module)
    penalty = sum(parameters[index % len(parameters)].double().square().sum() for index in case.penalised)
    yield out.square().mean() + 0.1 * penalty
    for _ in range(case.num_losses - 1):
        yield out.sin().mean()


def _rows(case: Case) -> Tensor:
    """(step, micro-step, rank, row, width)"""
    shape = (case.steps, case.accumulation, NUM_RANKS, ROWS, case.width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


@dataclass
class Run:
    losses: list[float]  # by micro-step, the mean over ranks
    norms: list[float]
    parameters: dict[str, Any]


def train_plainly(case: Case) -> Run:
    """One process, one rank's rows after the other's."""
    model = build(case)
    _freeze(model, case, 0)
    optimizer = _optimizer(model, case)
    losses, norms = [], []
    for step, micro_steps in enumerate(_rows(case)):
        _freeze(model, case, step)
        model.zero_grad()
        for micro, ranks in enumerate(micro_steps, step * case.accumulation):
            losses.append(0.0)
            for own in ranks:
                for index, loss in enumerate(_losses(model, model, case, own, micro)):
                    losses[-1] += loss.item() / NUM_RANKS
                    if loss.requires_grad:
                        more = index + 1 < case.num_losses
                        (loss / (NUM_RANKS * case.accumulation)).backward(retain_graph=more)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip or float("inf"))))
        optimizer.step()
    return Run(losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()})


def config_of(case: Case) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": case.stage, "stage3_param_persistence_threshold": 0, **dict(case.limits)}
    if case.leaf is not None:
        how, number = case.leaf
        modules = list(build(case).named_modules())[1:]
        name, module = modules[number % len(modules)]
        zero["leaf_module"] = {"names": [name]} if how == "name" else {"classes": [type(module).__name__]}
    return {
        "zero_optimization": zero,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip,
        "shardwell": {"divergence_timeout": 20.0},
    }


def train_sharded(case: Case) -> dict[str, Any]:
    config = config_of(case)
    with shardwell.zero.Init(config_dict_or_path=config, enabled=case.born_sharded):
        model = build(case)
    _freeze(model, case, 0)
    engine, *_ = shardwell.initialize(model=model, optimizer=_optimizer(model, case), config=config)
    losses, norms = [], []
    for step, micro_steps in enumerate(_rows(case)):
        _freeze(model, case, step)
        for micro, ranks in enumerate(micro_steps, step * case.accumulation):
            keeps = not case.synced and not engine.is_gradient_accumulation_boundary()
            with engine.no_sync() if keeps else torch.enable_grad():
                losses.append(_micro_step(engine, case, ranks[dist.get_rank()], micro))
            engine.step()
        norms.append(engine.get_global_grad_norm())
        if case.between == "evaluate":
            with torch.no_grad():
                engine(micro_steps[0, 0], case.orders[0])
        elif case.between == "drop":
            engine(micro_steps[0, 0], case.orders[-1])
    found = whole_parameters(model)
    engine.destroy(whole=False)
    return {"losses": losses, "norms": norms, "parameters": found}


def _micro_step(engine: shardwell.Engine, case: Case, x: Tensor, micro: int) -> float:
    total = 0.0
    for index, loss in enumerate(_losses(engine, engine.module, case, x, micro)):
        total += loss.item()
        if loss.requires_grad:
            more = index + 1 < case.num_losses
            if micro % 2:
                loss.backward(retain_graph=more)
            else:
                engine.backward(loss, retain_graph=more)
    return total
