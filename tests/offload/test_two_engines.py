"""Two engines in one loss: a generator that is trained through a discriminator, whose gradients are then dropped."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from shardwell.offload.auto_commit import STEPS_TO_LEARN, CommitPhase
from tests.support.before_step_loops import Net, Plain, Sharded, check_alike, config_for, rows
from tests.support.offload_cases import quickly
from tests.support.ranks import Ranks


def judge(real: Plain, number: int, fake: Tensor) -> None:
    """One step of the discriminator."""
    real.zero_grad()
    scores = real(real.part(rows(number))), real(fake)
    real.backward((scores[0] - 1).square().mean() + scores[1].square().mean())
    real.step()


def played(maker: Plain, judging: Plain, num_alone: int) -> tuple[Plain, Plain]:
    """`num_alone`: steps of the discriminator before the generator is trained."""
    for number in range(num_alone):
        judge(judging, number, maker.part(rows(200 + number)))
    for number in range(4):
        noise = maker.part(rows(300 + number))
        judge(judging, 50 + number, maker(noise).detach())
        maker.zero_grad()
        loss = (judging(maker(noise)) - 1).square().mean()  # nothing is frozen
        maker.backward(loss)
        maker.seen.append(maker.mean(loss))
        maker.step()
    judging.zero_grad()
    return maker, judging


def adversarial(stage: int, tiers: list[str], path: str, num_alone: int) -> list[list[str]]:
    quickly()
    expected = played(Plain(Net(1)), Plain(Net(2)), num_alone)
    phases = []
    for tier in tiers:
        config = config_for(stage, tier, path)
        found = played(Sharded(Net(1), config), Sharded(Net(2), config), num_alone)
        for one, other in zip(expected, found, strict=True):
            check_alike(one, other)
        if tier != "none":
            phases.append([one.optimizer.executor.auto.phase.name for one in found])
    return phases


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "tiers"), [(0, ["none", "cpu"]), (1, ["cpu"]), (2, ["none", "nvme"]), (3, ["none", "cpu", "nvme"])]
)
def test_a_gan_without_freezing_follows_plain_pytorch(
    ranks: Ranks, tmp_path: Path, stage: int, tiers: list[str]
) -> None:
    below = [tier for tier in tiers if tier != "none"]
    for phases in ranks.run(2, adversarial, stage, tiers, str(tmp_path), 0):
        assert [judging for _, judging in phases] == [CommitPhase.AFTER_NORM.name] * len(below)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "tiers"), [(2, ["none", "cpu"]), (3, ["cpu", "nvme"])])
def test_a_discriminator_that_was_trained_alone_first_follows_plain_pytorch(
    ranks: Ranks, tmp_path: Path, stage: int, tiers: list[str]
) -> None:
    ranks.run(2, adversarial, stage, tiers, str(tmp_path), STEPS_TO_LEARN + 1)
