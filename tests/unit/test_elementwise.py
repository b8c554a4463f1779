"""Optimizers that need whole tensors are refused; what is elementwise is stepped, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import shardwell
from tests.support.models import zero


class Signs(Optimizer):
    """Elementwise, with a state and options of each group."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 0.1)
                    parameter.mul_(1 - group["decay"]).sub_(mean.sign(), alpha=group["lr"])


class Ratio(Optimizer):
    """Layer-wise: a step as long as the tensor."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                ratio = parameter.norm() / (parameter.grad.norm() + 1e-6)
                parameter.sub_(parameter.grad * ratio, alpha=group["lr"])


class OnlyMatricesDecay(SGD):
    """It looks at shapes, inside the step of an optimizer that is known."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim > 1:
                    parameter.mul_(0.99)
        super().step()


class Rows(SGD):
    """Row-wise: every row of a matrix has its own size."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim == 2:
                    parameter.grad = parameter.grad / (parameter.grad.norm(dim=1, keepdim=True) + 1e-6)
        super().step()


class ClippedLate(SGD):
    """Clips each tensor's gradient, but only if it is large, and after some steps."""

    num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for parameter in self.param_groups[0]["params"] if self.num_steps > 5 else ():
            nn.utils.clip_grad_norm_([parameter], 1.0)
        super().step()


class Lookahead:
    """A wrapper that is no optimizer."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    def step(self) -> None:
        self.inner.step()


def model_and_start(make: Callable[[nn.Module], Any], stage: int = 2) -> tuple[shardwell.Engine, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    engine, *_ = shardwell.initialize(model=model, optimizer=make(model), config=zero(stage))
    return engine, model


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *((kind, way) for kind in (Ratio, OnlyMatricesDecay, Rows, ClippedLate) for way in ("an object", "a factory")),
        (Ratio, "a class"),
    ],
)
def test_a_rule_that_is_not_elementwise_is_refused(kind: type[Optimizer], way: str) -> None:
    makes: dict[str, Callable[[nn.Module], Any]] = {
        "an object": lambda model: kind(model.parameters(), lr=0.1),  # type: ignore[call-arg]
        "a class": lambda model: kind,
        "a factory": lambda model: lambda params: kind(params, lr=0.1),  # type: ignore[call-arg]
    }
    with pytest.raises(shardwell.ShardwellError, match=f"{kind.__name__} is not elementwise"):
        model_and_start(makes[way])


def test_a_rule_of_the_users_own_that_is_elementwise_trains_as_in_plain_pytorch() -> None:
    def groups(model: nn.Module) -> Signs:
        first, *others = model.parameters()
        return Signs([{"params": [first], "decay": 0.2}, {"params": others, "lr": 0.01}])

    made: list[Signs] = []
    engine, model = model_and_start(lambda model: made.append(groups(model)) or made[0])
    assert made[0].num_steps == 0  # what was tried was another one
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = groups(plain)
    inputs = torch.randn(5, 4)
    for _ in range(3):
        engine.backward(engine(inputs).square().mean())
        engine.step()
        plain(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_trying_an_optimizer_leaves_random_numbers_and_its_hooks_alone() -> None:
    torch.manual_seed(3)
    model = nn.Linear(4, 4)
    optimizer = Signs(model.parameters())
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *args: calls.append(1))
    before = torch.random.get_rng_state()
    shardwell.initialize(model=model, optimizer=optimizer, config=zero(1))
    assert torch.equal(before, torch.random.get_rng_state())
    assert not calls
    assert not optimizer.state


def test_a_user_who_knows_better_says_so() -> None:
    class Mine(Ratio):
        elementwise = True

    engine, _ = model_and_start(lambda model: Mine(model.parameters()))
    assert isinstance(engine.optimizer.inner, Mine)  # type: ignore[union-attr]


def test_an_optimizer_that_cannot_be_tried_is_refused_with_its_reason() -> None:
    class WithClosure(SGD):
        def step(self, closure: Any = None) -> Tensor:  # type: ignore[override]
            return closure()

    with pytest.raises(shardwell.ShardwellError, match=r"not known whether WithClosure is elementwise.*NoneType"):
        model_and_start(lambda model: WithClosure(model.parameters(), lr=0.1))


def test_a_wrapper_that_is_no_optimizer_is_named() -> None:
    with pytest.raises(shardwell.ShardwellError, match="the optimizer is a Lookahead, which is neither"):
        model_and_start(lambda model: Lookahead(AdamW(model.parameters())))
