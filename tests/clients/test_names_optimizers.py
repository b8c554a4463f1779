"""DeepSpeed's optimizers by name: torch's numbers, the engine's kernels, and refusals with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.compat.deepspeed_api import op_builders
from shardwell.compat.deepspeed_api import optimizers as named
from shardwell.offload.cpu_kernels import kernel_for
from shardwell.optim.elementwise import kind_by_step
from shardwell.optim.lamb import Lamb
from shardwell.optim.lion import Lion

PAIRS: list[tuple[Any, dict[str, Any], Any, dict[str, Any]]] = [
    (named.FusedAdam, {"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
    (named.FusedAdam, {"weight_decay": 0.1, "adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.1}),
    (named.DeepSpeedCPUAdam, {"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
    (named.DeepSpeedCPUAdam, {"weight_decay": 0.1, "adamw_mode": False}, torch.optim.Adam, {"weight_decay": 0.1}),
    (named.DeepSpeedCPUAdagrad, {}, torch.optim.Adagrad, {}),
    (named.DeepSpeedCPULion, {}, Lion, {"betas": (0.9, 0.999), "lr": 1e-3}),
    (named.FusedLion, {}, Lion, {"betas": (0.9, 0.999), "lr": 1e-3}),
    (named.FusedLamb, {}, Lamb, {}),
]


def trained(config: dict[str, Any], kind: Any, options: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    engine = shardwell.initialize(model=model, optimizer=kind(model.parameters(), **options), config=config).engine
    for step in range(3):
        engine.backward(engine(torch.full((2, 4), 0.1 * step)).square().sum())
        engine.step()
    return [parameter.detach().clone() for parameter in engine.module.parameters()]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("kind", "options", "other", "others"), PAIRS)
def test_an_engine_trains_with_it_as_with_torchs_own(
    kind: Any, options: dict[str, Any], other: Any, others: dict[str, Any], offload: bool
) -> None:
    zero: dict[str, Any] = {"stage": 2, **({"offload_optimizer": {"device": "cpu"}} if offload else {})}
    found = trained({"zero_optimization": zero}, kind, options)
    expected = trained({"zero_optimization": zero}, other, others)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2))]


@pytest.mark.parametrize("kind", [pair[0] for pair in PAIRS[:7]])
def test_the_host_kernels_step_it(kind: Any) -> None:
    optimizer = kind(parameters())
    assert kernel_for(optimizer, 1) is not None
    optimizer.step()
    assert kind_by_step(kind) is not kind


def test_a_class_that_computes_otherwise_gets_no_kernel() -> None:
    class Doubled(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            return super().step(closure)

    class Renamed(torch.optim.AdamW):
        """Other defaults, the same step."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=1.0)

    assert kind_by_step(Doubled) is Doubled
    assert kernel_for(Doubled(parameters()), 1) is None
    assert kind_by_step(Renamed) is torch.optim.AdamW
    assert kernel_for(Renamed(parameters()), 1) is not None


def test_groups_of_another_optimizer_are_taken_with_their_rates() -> None:
    """Accelerate makes DeepSpeed's optimizer from the groups of torch's."""
    given = torch.optim.AdamW([{"params": parameters(), "lr": 0.5}, {"params": parameters()}], lr=0.1, weight_decay=0.2)
    made = named.DeepSpeedCPUAdam(given.param_groups, lr=0.1, weight_decay=0.2, adamw_mode=False)
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.1]
    assert [group["decoupled_weight_decay"] for group in made.param_groups] == [False, False]
    assert [group["fused"] for group in made.param_groups] == [True, True]
    ada = torch.optim.Adagrad(parameters(), lr=0.3)
    assert named.DeepSpeedCPUAdagrad(ada.param_groups, lr=0.3, adamw_mode=False).param_groups[0]["lr"] == 0.3


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (named.FusedAdam, {"amsgrad": True}, "amsgrad"),
    (named.DeepSpeedCPUAdam, {"amsgrad": True}, "amsgrad"),
    (named.DeepSpeedCPUAdam, {"bias_correction": False}, "bias_correction"),
    (named.FusedLamb, {"max_grad_norm": 1.0}, "gradient_clipping"),
    (named.FusedLamb, {"eps_inside_sqrt": True}, "eps_inside_sqrt"),
    (named.FusedLamb, {"amsgrad": True}, "amsgrad"),
    (named.DeepSpeedCPUAdagrad, {"amsgrad": True}, "amsgrad"),
]


@pytest.mark.parametrize(("kind", "options", "word"), REFUSED)
def test_what_cannot_be_done_is_refused_with_the_way_out(kind: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises(RuntimeError, match=word) as caught:
        kind(parameters(), **options)
    assert "use " in str(caught.value) or "write " in str(caught.value)


def test_muon_takes_groups_that_say_who_is_a_matrix() -> None:
    made = named.MuonWithAuxAdam(
        [
            {"params": parameters(), "use_muon": True, "ns_method": "gram"},
            {"params": [nn.Parameter(torch.ones(3))], "use_muon": False, "eps": 1e-6},
        ]
    )
    matrix, rest = made.param_groups
    assert (matrix["lr"], matrix["momentum"], matrix["weight_decay"]) == (0.02, 0.95, 0.0)
    assert (rest["lr"], rest["adam_eps"]) == (3e-4, 1e-6)
    with pytest.raises(ValueError, match="use_muon"):
        named.MuonWithAuxAdam([{"params": parameters()}])


def test_builders_say_what_is_served_and_build_nothing() -> None:
    assert op_builders.FusedAdamBuilder.NAME == "fused_adam"
    assert op_builders.__compatible_ops__["cpu_adam"]
    assert not op_builders.__compatible_ops__["transformer_inference"]
    assert not op_builders.by_class_name("Unknown")().is_compatible()
    with pytest.raises(RuntimeError, match="FusedAdam is torch's fused Adam"):
        op_builders.FusedAdamBuilder().load()
    tensors = [torch.ones(2), torch.zeros(3)]
    flat = op_builders.UtilsBuilder().load().flatten(tensors)
    assert [part.tolist() for part in op_builders.UtilsBuilder().load().unflatten(flat, tensors)] == [[1, 1], [0, 0, 0]]
