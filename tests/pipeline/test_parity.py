"""Training in a pipeline follows plain PyTorch in one process: at every ZeRO stage, with every schedule."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import shardwell
from tests.support.pipelines import CHUNKS, Decoder, chain, next_token_loss, pipeline_config, plain, stream
from tests.support.ranks import Ranks

STEPS = 8
MODELS = {
    "chain": lambda: chain(2),
    "tied": lambda: Decoder(2, tied=True),
    "long chain": chain,
    "long and tied": lambda: Decoder(tied=True),
}


def made(kind: str) -> torch.nn.Module:
    """Return a model in fp64, with the same values everywhere."""
    torch.manual_seed(0)
    return MODELS[kind]().double()


def trained(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Train on this rank; return its parameters, and the losses and norms that it saw."""
    model = shardwell.pipeline.split(made(kind), loss_fn=next_token_loss)
    engine, *_ = shardwell.initialize(model=model, config=config)
    batches = stream(STEPS, engine.data_rank)
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(float(engine.train_batch(batches)))
        norms.append(engine.get_global_grad_norm())
    found = {"parameters": engine.state_dict(), "losses": losses, "norms": norms}
    engine.destroy(whole=False)
    return found


def several(cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Train several cases one after another."""
    return [trained(*case) for case in cases]


@cache
def expected_of(kind: str) -> dict[str, Any]:
    return plain(made(kind), STEPS, data_size=2)


def check(ranks: list[list[dict[str, Any]]], kinds: list[str]) -> None:
    """Compare what ranks found with plain PyTorch."""
    for number, kind in enumerate(kinds):
        expected = expected_of(kind)
        seen = set()
        for rank in ranks:
            found = rank[number]
            assert found["losses"] == pytest.approx(expected["losses"], abs=1e-10)
            assert found["norms"] == pytest.approx(expected["norms"], abs=1e-10)
            for name, value in found["parameters"].items():
                seen.add(name)
                want = expected["parameters"].get(name)
                if want is not None:
                    assert abs(torch.as_tensor(value) - want).max() < 1e-10, (number, kind, name)
        assert seen >= set(expected["parameters"])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", CHUNKS)
def test_every_stage_follows_plain_pytorch(ranks: Ranks, schedule: str) -> None:
    """Of stages, schedules and models with and without tied weights, every two meet."""
    first = list(CHUNKS).index(schedule)
    models = ("long chain", "long and tied") if schedule == "interleaved" else ("chain", "tied")
    kinds = [models[(first + stage) % 2] for stage in range(4)]
    cases = [(kind, pipeline_config(stage, schedule)) for stage, kind in enumerate(kinds)]
    check(ranks.run(4, several, cases), kinds)
