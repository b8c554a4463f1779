"""Muon against torch's own, and the parameters that are for it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from shardwell.errors import ConfigError, ShardwellError
from shardwell.optim.muon import Muon, muon_groups, newton_schulz
from tests.support.optimizer_steps import MATRICES, SHAPES, Groups, close, equal, members, run, values

# ------------------------------------------------------------------------------------------------------------- Muon


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_bit_for_bit(nesterov: bool, adjust_lr_fn: str | None, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"lr": 0.02, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    ours, torchs = values(MATRICES, dtype=dtype), values(MATRICES, dtype=dtype)
    mine, theirs = Muon(ours, **options), torch.optim.Muon(torchs, **options)
    assert equal(run(mine, ours, 6), run(theirs, torchs, 6))
    for a, b in zip(ours, torchs, strict=True):
        assert torch.equal(mine.state[a]["momentum_buffer"], theirs.state[b]["momentum_buffer"])


def test_muon_has_torchs_defaults_and_takes_its_options() -> None:
    theirs = torch.optim.Muon(values(MATRICES)).defaults
    assert {key: Muon(values(MATRICES)).defaults[key] for key in theirs} == theirs
    options: dict[str, Any] = {"momentum": 0.8, "weight_decay": 0.0, "ns_coefficients": (3.0, -3.2, 1.2), "ns_steps": 3}
    ours, torchs = values(MATRICES), values(MATRICES)
    assert equal(run(Muon(ours, eps=0.1, **options), ours), run(torch.optim.Muon(torchs, eps=0.1, **options), torchs))


def test_muon_does_not_touch_16_bit_momentum_beyond_its_update() -> None:
    tensor = torch.zeros(4, 6, dtype=torch.bfloat16)
    tensor.grad = torch.ones_like(tensor)
    optimizer = Muon([tensor], momentum=0.5, nesterov=False)
    optimizer.step()
    assert torch.equal(optimizer.state[tensor]["momentum_buffer"], torch.full_like(tensor, 0.5))


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 3, 20, 8), (4, 8, 8), (1, 5, 9)])
@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
def test_a_stack_moves_as_its_matrices(shape: tuple[int, ...], adjust_lr_fn: str) -> None:
    (stack,), (apart,) = values([shape], dtype=torch.float32), values([shape], dtype=torch.float32)
    matrices = list(apart.flatten(0, -3).unbind())
    gradient = values([shape], 1, torch.float32)[0] * torch.logspace(-2, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))
    stack.grad = gradient
    for matrix, part in zip(matrices, gradient.flatten(0, -3), strict=True):
        matrix.grad = part
    for tensors in ([stack], matrices):
        Muon(tensors, lr=0.1, adjust_lr_fn=adjust_lr_fn).step()
    torch.testing.assert_close(stack, apart, rtol=0, atol=0.1 * 0.02 * 0.2 * math.sqrt(20))  # bf16 roundings


@pytest.mark.parametrize("shape", [(24, 60), (60, 24), (3, 60, 24), (2, 2, 24, 60)])
def test_newton_schulz_flattens_the_spectrum(shape: tuple[int, ...]) -> None:
    matrix = values([shape], dtype=torch.bfloat16)[0]
    before = matrix.clone()
    result = newton_schulz(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7)
    singular = torch.linalg.svdvals(result.float())
    assert result.dtype == torch.bfloat16
    assert result.is_contiguous()
    assert torch.equal(matrix, before)
    assert float(singular.min()) > 0.5
    assert float(singular.max()) < 1.3


def test_muon_steps_other_groups_by_adamw() -> None:
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.2}
    ours, torchs, matrix = values(SHAPES), values(SHAPES), values([(4, 6)])
    groups: Groups = [{"params": ours, "use_muon": False, "adam_eps": 1e-3, **options}, {"params": matrix}]
    optimizer = Muon(groups, lr=0.5)
    wanted = run(torch.optim.AdamW(torchs, eps=1e-3, **options), torchs)
    close(run(optimizer, ours + matrix)[:-1], wanted)
    assert all(set(optimizer.state[tensor]) == {"exp_avg", "exp_avg_sq", "step"} for tensor in ours)
    assert set(optimizer.state[matrix[0]]) == {"momentum_buffer"}


def test_adamw_takes_tensors_and_gradients_of_other_layouts() -> None:
    turned, straight = values([(3, 5)])[0].t(), values([(3, 5)])[0].t().contiguous()
    for tensor in (turned, straight):
        run(Muon([{"params": [tensor], "use_muon": False}]), [tensor], 2)
    close([turned], [straight])


# ----------------------------------------------------------------------------------------------------- muon_groups


class Model(nn.Module):
    """An embedding, a fused stack, a norm, a bias, a Linear right below the root that is not the last, and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.experts = nn.Parameter(torch.zeros(3, 4, 5))
        self.middle = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


class Named(Model):
    def get_output_embeddings(self) -> nn.Module:
        return self.middle


class Silent(Model):
    def get_output_embeddings(self) -> None:
        return None


def chosen(model: nn.Module, **options: Any) -> list[set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = muon_groups(model.named_parameters(), model, **options)
    assert [group["use_muon"] for group in groups] == [True, False]
    return [{names[id(parameter)] for parameter in group["params"]} for group in groups]


INSIDE = {"inner.0.weight", "experts"}


@pytest.mark.parametrize(
    ("model", "matrices"),
    [
        (Model(), INSIDE | {"middle.weight"}),
        (Silent(), INSIDE | {"middle.weight"}),
        (Named(), INSIDE | {"head.weight"}),
        (Model(tied=True), INSIDE | {"middle.weight"}),
    ],
)
def test_matrices_inside_the_model_are_muons(model: nn.Module, matrices: set[str]) -> None:
    assert chosen(model) == [matrices, {name for name, _ in model.named_parameters()} - matrices]


def test_a_parameters_own_word_decides_and_frozen_ones_are_left_out() -> None:
    model = Model()
    model.embedding.weight.use_muon = True
    model.experts.use_muon = False
    model.middle.weight.requires_grad_(False)
    matrices, others = chosen(model)
    assert matrices == {"inner.0.weight", "embedding.weight"}
    assert others == {"experts", "head.weight", "inner.0.bias", "inner.1.weight", "inner.1.bias"}


def test_rates_go_to_their_groups() -> None:
    model = Model()
    assert [group.get("lr") for group in muon_groups(model.named_parameters(), model)] == [None, None]
    groups = muon_groups(model.named_parameters(), model, muon_lr=0.02, adam_lr=0.003)
    assert [group["lr"] for group in Muon(groups, lr=7.0).param_groups] == [0.02, 0.003]
    assert "lr" not in muon_groups(model.named_parameters(), model, muon_lr=0.02)[1]


def test_a_shared_parameter_is_stepped_once() -> None:
    model = Model(tied=True)
    groups = muon_groups(model.named_parameters(remove_duplicate=False), model)
    assert len(members(groups)) == len(list(model.parameters()))


# -------------------------------------------------------------------------------------------------- what is refused


def test_muon_groups_must_share_newton_schulz() -> None:
    groups: Groups = [{"params": [tensor], "ns_steps": 4 + i} for i, tensor in enumerate(values([(2, 3)] * 2))]
    with pytest.raises(ConfigError, match="the same ns_steps; it is 4 and 5"):
        Muon(groups)
    groups[1]["use_muon"] = False
    Muon(groups)


@pytest.mark.parametrize("shape", [(), (5,)])
def test_vectors_are_not_for_muon(shape: tuple[int, ...]) -> None:
    tensors = values([shape])
    with pytest.raises(ShardwellError, match=rf"shape \[{','.join(map(str, shape))}\]"):
        run(Muon(tensors), tensors, 1)
    model = nn.Module()
    model.gain = nn.Parameter(tensors[0])
    model.gain.use_muon = True
    with pytest.raises(ShardwellError, match="'gain' has shape"):
        muon_groups(model.named_parameters(), model)
