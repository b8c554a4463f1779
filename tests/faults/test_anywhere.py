"""A rank that fails at any collective takes the others with it, whatever they are doing, and soon."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwell
from tests.support.faults import fault_at
from tests.support.models import Gpt, batches, share, zero
from tests.support.patience import soon
from tests.support.ranks import Ranks

SOON = 6.0  # seconds
LINGER = 5.0  # that rank 0 waits for others to hear what became of a save
WHERE = (1, 2, 5, 9, 14, 20, 27, 33)  # of the collectives behind the first step
FIRST, SECOND = WHERE[::2], WHERE[1::2]  # cases that do most things alike share the places
HOST, DISK = {"device": "cpu"}, {"device": "nvme"}
CODED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
CASES: dict[str, tuple[int, int, dict[str, Any], tuple[int, ...]]] = {  # ranks, stage, the block, places
    "1": (2, 1, {}, WHERE),
    "3": (2, 3, {}, WHERE),
    "2, host": (2, 2, {"offload_optimizer": HOST}, WHERE),
    "3, disk": (2, 3, {"offload_param": DISK, "offload_optimizer": DISK}, WHERE),
    "3, copies": (4, 3, {"zero_hpz_partition_size": 2}, FIRST),
    "3, codes and copies": (4, 3, {"zero_hpz_partition_size": 2, **CODED}, SECOND),
}


class Fault(Exception):  # noqa: N818
    """What nobody expects."""


def use(engine: shardwell.Engine, folder: str, number: int) -> None:
    """All that ranks do together."""
    batch = share(batches(1, 4)[0], dist.get_rank(), dist.get_world_size())
    for _ in range(2):
        engine.backward(engine(batch))
        engine.step()
    with torch.no_grad():
        engine(batch)
    with shardwell.zero.GatheredParameters(list(engine.module.parameters())[:3], modifier_rank=0):
        pass
    engine.state_dict()
    engine.save_checkpoint(folder, tag=str(number))
    engine.load_checkpoint(folder, tag=str(number))
    dist.barrier()  # who is done waits for those who are not


def fail_at_each(
    stage: int, block: dict[str, Any], places: tuple[int, ...], folder: str
) -> list[tuple[str, str, float]]:
    """For each place: the error, its words, and how long that took."""
    blocks = {key: {**value, "nvme_path": folder} if value == DISK else value for key, value in block.items()}
    found = []
    for number, place in enumerate(places):
        culprit, left = number % dist.get_world_size(), itertools.count(place, -1)

        def fail(announce: Any, agreement: Any, token: str, culprit: int = culprit, left: Any = left) -> None:
            if next(left) == 1 and dist.get_rank() == culprit:
                raise Fault(token)
            announce(agreement, token)

        torch.manual_seed(0)
        model = Gpt(blocks=2)
        config = zero(stage, zero_optimization=blocks, shardwell={"divergence_timeout": SOON})
        engine = shardwell.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
        ).engine
        use(engine, folder, -1)
        begin = time.monotonic()
        try:
            with fault_at("collective", fail):
                use(engine, folder, number)
            found.append(("", "", 0.0))
        except Exception as error:
            found.append((type(error).__name__, str(error), time.monotonic() - begin))
        dist.barrier()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_fails_anywhere_takes_the_others_with_it(ranks: Ranks, tmp_path: Path, case: str) -> None:
    num_ranks, stage, block, places = CASES[case]
    answers = ranks.run(num_ranks, fail_at_each, stage, block, places, str(tmp_path))
    for number, found in enumerate(zip(*answers, strict=True)):
        culprit = number % num_ranks
        name, token, _ = found[culprit]
        assert name == "Fault", (places[number], found)
        for rank, (error, words, seconds) in enumerate(found):
            if rank != culprit:
                assert error in ("PeerError", "CheckpointError"), (places[number], found)
                assert f"rank {culprit} failed first: Fault in" in words
                assert f": {token}" in words
                assert seconds < soon(SOON + LINGER)
