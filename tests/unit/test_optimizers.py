"""Lion and LAMB against their definitions, and what all optimizers here have in common."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwell.errors import ConfigError
from shardwell.optim.full_tensors import LocalFullTensors, SlicePosition
from shardwell.optim.lamb import Lamb
from shardwell.optim.lion import Lion
from shardwell.optim.muon import Muon
from tests.support.optimizer_steps import Groups, close, equal, members, reference, run, two_groups, values

# ------------------------------------------------------------------------------------------------------------- Lion


def lion(p: Tensor, g: Tensor, state: Any, *, lr: float, betas: Any, weight_decay: float, **_: Any) -> Tensor:
    m = state.get("m", torch.zeros_like(p))
    direction = torch.sign(betas[0] * m + (1 - betas[0]) * g)
    state["m"] = betas[1] * m + (1 - betas[1]) * g
    return p - lr * weight_decay * p - lr * direction


def test_lion_follows_its_definition() -> None:
    first = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    second = {"lr": 0.003, "betas": (0.5, 0.8), "weight_decay": 0.0}
    wanted = reference(two_groups(first, second), lion)
    groups = two_groups(first, second)
    optimizer = Lion(groups)
    close(run(optimizer, members(groups)), wanted)
    assert all(set(state) == {"exp_avg"} for state in optimizer.state.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lion_steps_by_lr_in_any_dtype(dtype: torch.dtype) -> None:
    tensor = torch.zeros(9, dtype=dtype)
    run(Lion([tensor], lr=0.5), [tensor], 1)
    assert tensor.dtype == dtype
    assert torch.equal(tensor.abs(), torch.full((9,), 0.5, dtype=dtype))


# ------------------------------------------------------------------------------------------------------------- LAMB

LAMB = {"betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True, "max_coeff": 10.0, "min_coeff": 0.01}


def lamb(p: Tensor, g: Tensor, state: dict[str, Any], **options: Any) -> Tensor:
    beta1, beta2 = options["betas"]
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    v = state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
    if options["bias_correction"]:
        m, v = m / (1 - beta1**t), v / (1 - beta2**t)
    update = m / (v.sqrt() + options["eps"]) + options["weight_decay"] * p
    size, length = math.sqrt(float((p * p).sum())), math.sqrt(float((update * update).sum()))
    ratio = min(max(size / length, options["min_coeff"]), options["max_coeff"]) if size and length else 1.0
    return p - options["lr"] * ratio * update


def test_lamb_follows_its_definition() -> None:
    first = LAMB | {"lr": 0.01, "weight_decay": 0.1}
    second = LAMB | {"lr": 0.1, "weight_decay": 0.0, "betas": (0.8, 0.9), "eps": 0.1, "bias_correction": False}
    wanted = reference(two_groups(first, second), lamb)
    groups = two_groups(first, second)
    optimizer = Lamb(groups)
    close(run(optimizer, members(groups)), wanted)
    assert all(set(state) == {"exp_avg", "exp_avg_sq", "step"} for state in optimizer.state.values())


@pytest.mark.parametrize(("scale", "ratio"), [(1e-9, 0.25), (1e9, 4.0), (3.0, 3.0)])
def test_lamb_clamps_the_trust_ratio(scale: float, ratio: float) -> None:
    tensor = torch.full((4,), scale, dtype=torch.float64)
    tensor.grad = torch.ones(4, dtype=torch.float64)
    Lamb([tensor], lr=1.0, eps=0.0, min_coeff=0.25, max_coeff=4.0).step()  # the update is 1 everywhere
    close([tensor], [torch.full((4,), scale - ratio, dtype=torch.float64)])


def test_lamb_has_ratio_one_where_a_norm_is_zero() -> None:
    zero, still = torch.zeros(3, dtype=torch.float64), torch.full((3,), 5.0, dtype=torch.float64)
    zero.grad, still.grad = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    Lamb([zero, still], lr=0.5, eps=1e-30, max_coeff=0.125, min_coeff=0.0).step()  # the clamp is for ratios
    close([zero, still], [torch.full_like(zero, -0.5), torch.full_like(still, 5.0)])


def test_lamb_takes_norms_of_16_bit_tensors_in_fp32() -> None:
    tensor = torch.full((1 << 16,), 300.0, dtype=torch.float16)  # the squares overflow fp16
    tensor.grad = torch.ones_like(tensor)
    Lamb([tensor], lr=1.0, eps=1e-3).step()
    assert torch.equal(tensor, torch.full_like(tensor, 290.0))


# ------------------------------------------------------------------------------------------------------ all of them

MAKERS: list[Callable[..., Any]] = [Lion, Lamb, Muon]


@pytest.mark.parametrize("make", MAKERS)
def test_state_goes_through_a_state_dict(make: Callable[..., Any]) -> None:
    shapes = [(4, 6), (6, 4)]
    groups: Groups = [{"params": values(shapes)[:1]}, {"params": values(shapes)[1:]}]
    if make is Muon:
        groups[1]["use_muon"] = False
    one = make(groups, lr=0.02)
    run(one, members(groups), 3)
    copies = copy.deepcopy(groups)
    other = make(copies)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert equal(run(one, members(groups), 3), run(other, members(copies), 3))


@pytest.mark.parametrize("make", MAKERS)
def test_a_closure_is_called_with_gradients_enabled(make: Callable[..., Any]) -> None:
    parameter = nn.Parameter(torch.ones(2, 3))

    def closure() -> Tensor:
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert make([parameter]).step(closure).item() == 6.0
    assert not torch.equal(parameter, torch.ones(2, 3))


@pytest.mark.parametrize("make", MAKERS)
def test_without_a_gradient_nothing_moves(make: Callable[..., Any]) -> None:
    tensors = values([(2, 3)])
    optimizer = make([{"params": tensors}, {"params": []}])
    optimizer.step()
    assert equal(tensors, values([(2, 3)]))
    assert not optimizer.state


@pytest.mark.parametrize("make", MAKERS)
def test_the_host_reads_nothing_from_the_device(make: Callable[..., Any]) -> None:
    tensors = [torch.empty(3, 4, device="meta"), torch.empty(4, 3, device="meta")]  # reading one would raise
    groups: Groups = [{"params": [tensor]} for tensor in tensors]
    if make is Muon:
        groups[1]["use_muon"] = False
    run(make(groups, weight_decay=0.1), tensors, 2)


def test_alone_numbers_tensors() -> None:
    alone, (first, second) = LocalFullTensors(), values([(2, 3), (4,)])
    assert [alone.place(tensor) for tensor in (first, second, first)] == [
        SlicePosition(0, (2, 3)),
        SlicePosition(1, (4,)),
        SlicePosition(0, (2, 3)),
    ]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Lion, {"lr": -1.0}, "Lion: lr is -1.0"),
        (Lion, {"betas": (0.9, 1.0)}, "betas"),
        (Lion, {"betas": (0.9,)}, "betas"),
        (Lion, {"weight_decay": -0.1}, "weight_decay"),
        (Lamb, {"lr": float("nan")}, "lr is nan"),
        (Lamb, {"eps": -1e-8}, "eps"),
        (Lamb, {"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff is 2.0 and max_coeff is 1.0"),
        (Muon, {"momentum": -0.1}, "momentum"),
        (Muon, {"adam_eps": -0.1}, "adam_eps"),
        (Muon, {"betas": (-0.1, 0.9)}, "betas"),
        (Muon, {"ns_coefficients": (1.0, 2.0)}, "ns_coefficients"),
        (Muon, {"ns_steps": 100}, "ns_steps"),
        (Muon, {"adjust_lr_fn": "sqrt"}, "adjust_lr_fn is 'sqrt'"),
    ],
)
def test_bad_options_are_refused(make: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(values([(2, 3)]), **options)
    with pytest.raises(ConfigError, match=message):
        make([{"params": values([(2, 3)]), **options}])
