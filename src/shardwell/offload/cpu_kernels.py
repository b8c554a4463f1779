"""The torch optimizers that `shardwell.kernels` can step on the host, with the state that torch's own keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwell import kernels
from shardwell.errors import ShardwellError
from shardwell.optim.elementwise import kind_by_step
from shardwell.optim.lion import Lion

Options = dict[str, Any]  # hyperparameters of a parameter group
InitialState = Callable[[Tensor, Options], dict[str, Any]]
RuleOf = Callable[[Options, dict[str, Any]], kernels.Rule]

_NOT_THERE = ("amsgrad", "maximize", "differentiable")


@dataclass(frozen=True)
class HostKernel:
    """The host kernel of one type of optimizer."""

    keys: tuple[str, ...]  # of the state, in the order that the rule takes
    rule: RuleOf  # of the next step
    make_state: InitialState  # returns the state before the first step
    threads: int = 1
    eight_bits: bool = False  # Adam's moments are 8-bit
    beside_gpu: bool = False  # there is a GPU, on which torch rounds differently from the CPU

    def initial_state(self, master: Tensor, options: Options) -> dict[str, Any]:
        """Return the state before the first step."""
        if not self.eight_bits:
            return self.make_state(master, options)
        zeros = {key: kernels.Moment8bit.zeros_like(master, is_second=key == _MOMENTS[1]) for key in _MOMENTS}
        return {"step": torch.tensor(0.0, device="cpu"), **zeros}

    def pack_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Convert state from torch's format to the format that is kept here."""
        if not self.eight_bits:
            return state
        kept = {
            key: kernels.Moment8bit.of(state[key], is_second=key == _MOMENTS[1])
            for key in _MOMENTS
            if isinstance(state.get(key), Tensor)
        }
        return {**state, **kept}

    def step(
        self,
        master: Tensor | kernels.SplitMaster,
        gradient: Tensor,
        state: dict[str, Any],
        target: UpdateTarget,
        span: slice = slice(None),
    ) -> None:
        """Compute one step over a slice of master weights, or a span of it; `advance` counts the step."""
        rule, spare, out = self._rule(target.options, state), target.new, target.out[span]
        if isinstance(master, kernels.SplitMaster):  # the bf16 part is the parameter
            halves = kernels.SplitMaster(master.high[span], master.low[span])
            kept, seed = self._kept(state, span), _seed(state, span)
            kernels.update(
                rule, kernels.UpdateArgs(gradient[span], halves, kept, target.factor, None, seed), self.threads
            )
            return
        narrow = out if out.dtype.itemsize == 2 else None
        new = kernels.OutOfPlaceState(spare.master[span], self._kept(spare.state, span)) if spare is not None else None
        kept, seed = self._kept(state, span), _seed(state, span)
        args = kernels.UpdateArgs(gradient[span], master[span], kept, target.factor, narrow, seed, new)
        kernels.update(rule, args, self.threads)
        stepped = (master if spare is None else spare.master)[span]
        if narrow is None and out.data_ptr() != stepped.data_ptr():
            out.copy_(stepped)

    def _rule(self, options: Options, state: dict[str, Any]) -> kernels.Rule:
        """Return the rule that gives the bits that torch's optimizer would give on the device."""
        rule = self.rule(options, state)
        if not isinstance(rule, kernels.AdamRule) or not self.beside_gpu:
            return rule
        return replace(rule, like="cuda_fused" if options.get("fused") else "cuda")

    def _kept(self, state: dict[str, Any], span: slice) -> tuple[Tensor, ...] | kernels.Moments8bitArgs:
        kept = [state[key] for key in self.keys if state.get(key) is not None]
        if not self.eight_bits:
            return tuple(value[span] for value in kept)
        (codes1, exponents1), (codes2, exponents2) = (moment.parts(span) for moment in kept)
        return kernels.Moments8bitArgs((codes1, codes2), (exponents1, exponents2))

    @staticmethod
    def advance(state: dict[str, Any]) -> None:
        """Count a step that was taken."""
        state.pop("first", None)
        if "step" in state:
            state["step"] += 1


def _seed(state: dict[str, Any], span: slice) -> int:
    """Return the seed of the rounding: a different one for each step and each part of a slice."""
    return int(state.get("step", 0)) + (span.start or 0)


@dataclass(frozen=True)
class SpareState:
    """Memory like that of a slice of master weights and of its state."""

    master: Tensor
    state: dict[str, Any]


@dataclass(frozen=True)
class UpdateTarget:
    """The hyperparameters of a step, and where its results are written."""

    options: Options
    factor: float  # of the gradient
    out: Tensor  # new parameters, in the compute dtype
    new: SpareState | None = None  # new master weights and state; None: in place


def kernel_for(
    inner: Optimizer, threads: int, *, eight_bits: bool = False, beside_gpu: bool = False
) -> HostKernel | None:
    """Return the kernel that steps on the host what `inner` steps; None if there is none."""
    if eight_bits and not isinstance(inner, torch.optim.Adam):
        raise ShardwellError(
            f'shardwell.moments "8bit" is for Adam and AdamW; the optimizer is {type(inner).__name__}: use "fp32"'
        )
    if any(group.get(name) for group in inner.param_groups for name in _NOT_THERE):
        return None
    known = _KERNELS.get(kind_by_step(type(inner)))
    return None if known is None else HostKernel(*known, threads, eight_bits, beside_gpu)


def _adam(decoupled: bool) -> RuleOf:
    def rule(options: Options, state: dict[str, Any]) -> kernels.Rule:
        apart = decoupled or bool(options.get("decoupled_weight_decay"))
        return kernels.AdamRule(
            float(options["lr"]),
            int(state["step"]) + 1,
            _pair(options["betas"]),
            options["eps"],
            options["weight_decay"],
            apart,
            "cpu",
        )

    return rule


def _zeros(*keys: str, counts: bool) -> InitialState:
    def make_state(master: Tensor, options: Options) -> dict[str, Any]:
        count = {"step": torch.tensor(0.0, device="cpu")} if counts else {}
        return {**count, **{key: torch.zeros_like(master) for key in keys}}

    return make_state


def _sgd(options: Options, state: dict[str, Any]) -> kernels.Rule:
    first = bool(state.get("first", False))
    return kernels.SgdRule(
        float(options["lr"]),
        options["momentum"],
        options["dampening"],
        options["weight_decay"],
        options["nesterov"],
        first,
    )


def _sgd_state(master: Tensor, options: Options) -> dict[str, Any]:
    return {"momentum_buffer": torch.zeros_like(master), "first": True} if options["momentum"] else {}


def _adagrad(options: Options, state: dict[str, Any]) -> kernels.Rule:
    return kernels.AdagradRule(
        float(options["lr"]), int(state["step"]) + 1, options["lr_decay"], options["eps"], options["weight_decay"]
    )


def _adagrad_state(master: Tensor, options: Options) -> dict[str, Any]:
    return {
        "step": torch.tensor(0.0, device="cpu"),
        "sum": torch.full_like(master, options["initial_accumulator_value"]),
    }


def _lion(options: Options, state: dict[str, Any]) -> kernels.Rule:
    return kernels.LionRule(float(options["lr"]), _pair(options["betas"]), options["weight_decay"])


def _pair(betas: Any) -> tuple[float, float]:
    first, second = betas
    return float(first), float(second)


_MOMENTS = ("exp_avg", "exp_avg_sq")
_KERNELS: dict[type[Optimizer], tuple[tuple[str, ...], RuleOf, InitialState]] = {
    torch.optim.Adam: (_MOMENTS, _adam(False), _zeros(*_MOMENTS, counts=True)),
    torch.optim.AdamW: (_MOMENTS, _adam(True), _zeros(*_MOMENTS, counts=True)),
    torch.optim.SGD: (("momentum_buffer",), _sgd, _sgd_state),
    torch.optim.Adagrad: (("sum",), _adagrad, _adagrad_state),
    Lion: (("exp_avg",), _lion, _zeros("exp_avg", counts=False)),
}
