"""Checkpoints of a mixture of experts go from any axis to any other, with values and moments of the optimizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.mixture_legs import Leg, alone, read_alone, run_chain, run_leg
from tests.support.ranks import Ranks

# Of the largest element. Norms and routers of Transformers compute in fp32, and Adam's first step makes much of little;
# a state that is lost or misplaced changes a tenth.
FURTHEST = 1e-3
EXPERT, TENSOR, PIPE, DATA = Leg(3, expert=2), Leg(1, tensor=2), Leg(1, pipe=2), Leg(2)
SHARED, SPLIT = Leg(3, tensor=2, sequence=2), Leg(2, expert=2, sequence=2)
CHAINS = [
    [PIPE, EXPERT, TENSOR, SPLIT, DATA, SHARED],
    [replace(EXPERT, hands_on="dcp"), replace(SHARED, hands_on="dcp"), replace(PIPE, hands_on="dcp"), SPLIT],
    [replace(SPLIT, hands_on="hf"), replace(PIPE, hands_on="hf"), EXPERT],
    [replace(EXPERT, hands_on="deepspeed"), replace(SHARED, hands_on="deepspeed"), Leg(1, expert=4), PIPE],
]


def all_chains(folder: str) -> list[dict[str, Tensor]]:
    return [run_chain(chain, Path(folder) / f"{number}") for number, chain in enumerate(CHAINS)]


@pytest.mark.slow
def test_chains_over_expert_sequence_tensor_and_pipe_axes_follow_one_process(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.run(4, all_chains, str(tmp_path))
    for number, chain in enumerate(CHAINS):
        check(answers[3][number], chain, f"chain {number}")


def check(found: dict[str, Tensor], chain: list[Leg], words: str) -> None:
    expected = alone(chain)
    held = {name: torch.as_tensor(value) for name, value in found.items()}
    assert held.keys() == expected.keys()
    for name, value in expected.items():
        difference = (held[name] - value).abs().max() / value.abs().max()
        assert difference < FURTHEST, f"{words}: {name} differs by {difference}"


SIZES = [
    (4, EXPERT),
    (4, TENSOR),
    (2, Leg(2, sequence=2)),
    (1, Leg(1)),
    (2, Leg(3, sequence=2)),
    (4, TENSOR),
]


@pytest.mark.slow
def test_a_chain_from_four_ranks_to_one_and_back_follows_one_process(ranks: Ranks, tmp_path: Path) -> None:
    at, chain = "", [leg for _, leg in SIZES]
    for number, (size, leg) in enumerate(SIZES):
        at = ranks.run(size, run_leg, leg, number, at, "own", str(tmp_path))[0]
    for found in ranks.run(2, read_alone, at, len(chain)):
        check(found, chain, "to one rank and back")
