"""Any configuration follows plain PyTorch on the concatenated batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.ranks import Ranks
from tests.support.training import Case, all_sharded, distance, plainly

# Every pair of values of (accumulation, clipping, parameter groups, sharded construction) is met.
CASES = [
    Case(accumulation=a, clip=c, groups=g, born_sharded=b)
    for a, c, g, b in [
        (1, 0.0, False, False),
        (1, 0.5, True, True),
        (4, 0.0, True, True),
        (4, 0.5, False, True),
        (4, 0.5, True, False),
        (1, 0.0, False, True),
    ]
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "num_ranks"), [(0, 1), (3, 1), *((stage, n) for stage in range(4) for n in (2, 3)), (1, 4), (3, 4)]
)
def test_fp64_parameters_agree_to_1e_10(ranks: Ranks, stage: int, num_ranks: int) -> None:
    """On two ranks after 20 steps of the plainest case at stage 3, and after 4 of all; on others after 4 of some."""
    chosen = CASES if num_ranks == 2 and stage == 3 else CASES[(stage + num_ranks) % 2 :: 2]
    chosen = chosen[: 2 if num_ranks in (1, 4) else None]
    chosen = [replace(case, steps=20 if (stage, num_ranks, k) == (3, 2, 0) else 4) for k, case in enumerate(chosen)]
    if num_ranks > 2:
        chosen = [replace(case, accumulation=min(case.accumulation, 2)) for case in chosen]
    for case, found in zip(chosen, ranks.run(num_ranks, all_sharded, chosen, stage)[0], strict=True):
        difference, name = distance(found, plainly(case)[0])
        assert difference < 1e-10, f"{case}: {name} differs by {difference}"


@pytest.mark.parametrize(("optimizer", "stage"), [("SGD", 0), ("AdamW", 2), ("AdamW", 3)])
def test_fp32_parameters_agree_to_1e_5_after_20_steps(ranks: Ranks, stage: int, optimizer: str) -> None:
    options = {"lr": 1e-2, "momentum": 0.9} if optimizer == "SGD" else {"lr": 1e-3}
    case = Case(dtype=torch.float32, optimizer=optimizer, options=options, clip=1.0, steps=20)
    expected, largest = plainly(case)
    # A key bias shifts all attention scores of a row alike: its gradient is rounding noise, which AdamW blows up to lr.
    noise = {name for name in largest if name.endswith("qkv.bias")} if optimizer == "AdamW" else set()
    difference, name = distance(ranks.run(2, all_sharded, [case], stage)[0][0], expected, noise)
    assert difference < 1e-5, f"{name} differs by {difference}"


def test_key_biases_have_gradients_of_rounding_noise() -> None:
    """The reason why the test above leaves them out by name."""
    case = Case(dtype=torch.float64, steps=1)
    _, largest = plainly(case)
    model = case.build()
    model(torch.randint(29, (4, 9))).backward()
    width = model.embed.embedding_dim
    for name, parameter in model.named_parameters():
        if name.endswith("qkv.bias"):
            assert parameter.grad[width : 2 * width].abs().max() < 1e-15 < largest[name]


@pytest.mark.parametrize("stage", [0, 3])
def test_same_seed_and_world_give_the_same_bits_twice(ranks: Ranks, stage: int) -> None:
    case = Case(dtype=torch.float32, accumulation=2, clip=0.5)
    first, second = ranks.run(3, all_sharded, [case, case], stage)[0]
    for name in first:
        assert (first[name] == second[name]).all(), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_rank_ends_with_the_same_bits(ranks: Ranks, stage: int) -> None:
    answers = ranks.run(3, all_sharded, [Case(dtype=torch.float32, steps=3)], stage)
    for other in answers[1:]:
        for name, values in answers[0][0].items():
            assert (values == other[0][name]).all(), name


def test_stages_1_2_and_3_give_the_same_bits(ranks: Ranks) -> None:
    case = Case(dtype=torch.float32, clip=0.5)
    one, two, three = (ranks.run(2, all_sharded, [case], stage)[0][0] for stage in (1, 2, 3))
    for name in one:
        assert (one[name] == two[name]).all(), name
        assert (one[name] == three[name]).all(), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_plain_loss_backward_agrees_with_engine_backward(ranks: Ranks, stage: int) -> None:
    case = Case(dtype=torch.float32, steps=3, accumulation=2)
    ours, plain = ranks.run(2, all_sharded, [case, replace(case, plain_backward=True)], stage)[0]
    for name in ours:
        assert (ours[name] == plain[name]).all(), name


@pytest.mark.parametrize(
    ("stage", "recompute"), [(1, "reentrant"), (2, "non-reentrant"), (3, "reentrant"), (3, "non-reentrant")]
)
def test_activation_checkpointing_keeps_parity(ranks: Ranks, stage: int, recompute: str) -> None:
    case = Case(model={"recompute": recompute})
    difference, name = distance(ranks.run(2, all_sharded, [case], stage)[0][0], plainly(case)[0])
    assert difference < 1e-10, f"{name} differs by {difference}"


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_tied_weights_keep_parity(ranks: Ranks, stage: int) -> None:
    case = Case(model={"tied": True}, born_sharded=True)
    difference, name = distance(ranks.run(2, all_sharded, [case], stage)[0][0], plainly(case)[0])
    assert difference < 1e-10, f"{name} differs by {difference}"


@pytest.mark.parametrize(
    "limits",
    [
        {"stage3_prefetch_bucket_size": 0},
        {"stage3_max_live_parameters": 1},
        {"stage3_max_reuse_distance": 1000000},
        {"stage3_param_persistence_threshold": 100},
    ],
    ids=lambda limits: next(iter(limits)),
)
def test_limits_change_what_is_whole_and_not_the_result(ranks: Ranks, limits: dict) -> None:
    case = Case(config={"zero_optimization": limits})
    difference, name = distance(ranks.run(2, all_sharded, [case], 3)[0][0], plainly(case)[0])
    assert difference < 1e-10, f"{name} differs by {difference}"
