"""A stage that fails is an error on all ranks, with the first one's words and its global rank, soon."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest
import torch.distributed as dist

import shardwell
from shardwell.errors import ShardwellError
from tests.support.command import ROOT, environment
from tests.support.faults import fault_at
from tests.support.killed_stage import NUM_RANKS, SCENARIOS
from tests.support.patience import HANG, soon
from tests.support.pipelines import CHUNKS, Decoder, micro_batches, next_token_loss, pipeline_config, stream
from tests.support.ranks import Ranks

SOON = 6.0  # seconds
SHORT = 2.0  # seconds, until a circle of waits is an error
WHERE = {"gpipe": ("0F1", "1B2"), "1f1b": ("1F0", "0B3"), "interleaved": ("2F1", "1B0"), "zb-h1": ("1I1", "0W3")}


class Fault(Exception):  # noqa: N818
    """What nobody expects."""


def fail_at_each() -> list[tuple[str, str, str, float]]:
    """For each schedule and place: the place, the error, its words, and how long that took."""
    found = []
    for number, (schedule, place) in enumerate((name, place) for name in CHUNKS for place in WHERE[name]):
        culprit = 2 * (int(place[0]) % 2) + number % 2  # a rank that has the stage

        def fail(note: Any, engine: Any, operation: Any, place: str = place, culprit: int = culprit) -> None:
            if str(operation) == place and dist.get_rank() == culprit:
                raise Fault(place)
            note(engine, operation)

        config = pipeline_config(1 + number % 3, schedule, shardwell={"divergence_timeout": SOON})
        model = shardwell.pipeline.split(Decoder(tied=True), loss_fn=next_token_loss)
        engine, *_ = shardwell.initialize(model=model, config=config)
        batches = stream(2, engine.data_rank)
        engine.train_batch(batches)
        begin = time.monotonic()
        try:
            with fault_at("operation of a pipeline", fail):
                engine.train_batch(batches)
            found.append((place, "", "", 0.0))
        except Exception as error:
            found.append((f"rank {culprit}", type(error).__name__, str(error), time.monotonic() - begin))
        dist.barrier()
    return found


@pytest.mark.slow
def test_a_rank_that_raises_at_an_operation_takes_the_others_with_it(ranks: Ranks) -> None:
    answers = ranks.run(4, fail_at_each)
    places = [place for name in CHUNKS for place in WHERE[name]]
    for number, found in enumerate(zip(*answers, strict=True)):
        for rank, (who, error, words, seconds) in enumerate(found):
            if who == f"rank {rank}":
                assert (error, words) == ("Fault", places[number])
            else:
                assert error == "PeerError", (places[number], found)
                assert f"{who} failed first: Fault in train_batch: {places[number]}" in words
                assert seconds < soon(SOON)


@pytest.mark.slow
def test_a_rank_that_is_killed_or_leaves_ends_all_ranks() -> None:
    command = [sys.executable, "-m", "tests.support.killed_stage"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(root=True), capture_output=True, text=True, timeout=HANG, check=True
    )
    for (victim, _, how), line in zip(SCENARIOS, done.stdout.splitlines(), strict=True):
        survivors = json.loads(line)
        assert len(survivors) == NUM_RANKS - 1
        for one in survivors:
            assert one["error"] == "PeerError", one
            if how == "exit":
                assert f"rank {victim} left by sys.exit(0) in train_batch" in one["text"], one
            else:
                assert f"rank {victim} is gone" in one["text"] or "stopped answering" in one["text"], one
            assert one["seconds"] < soon(15)


def diverge_alone(schedule: str, place: str, culprit: int) -> tuple[str, str, float]:
    """One rank alone gathers parameters inside of an operation; return what this rank hears of it, and when."""

    def gather(note: Any, engine: Any, operation: Any) -> None:
        if str(operation) == place and dist.get_rank() == culprit:
            with shardwell.zero.GatheredParameters(list(engine.module.parameters())):
                pass
        note(engine, operation)

    config = pipeline_config(3, schedule, shardwell={"divergence_timeout": SHORT})
    model = shardwell.pipeline.split(Decoder(), loss_fn=next_token_loss)
    engine, *_ = shardwell.initialize(model=model, config=config)
    batches = stream(2, engine.data_rank)
    engine.train_batch(batches)
    begin = time.monotonic()
    try:
        with fault_at("operation of a pipeline", gather):
            engine.train_batch(batches)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "place", "culprit", "over"),
    [("gpipe", "0F2", 0, "in 1F3 for a message of rank 0"), ("zb-h1", "0F1", 1, "for rank 1")],
)
def test_ranks_of_which_one_leaves_an_operation_for_a_collective_of_its_own_are_told(
    ranks: Ranks, schedule: str, place: str, culprit: int, over: str
) -> None:
    found = ranks.run(4, diverge_alone, schedule, place, culprit)
    assert len({words for _, words, _ in found}) == 1, found
    for error, words, seconds in found:
        assert error == "DivergenceError", found
        assert "they wait for each other" in words
        assert over in words
        assert f"Rank {culprit} leaves the order of the steps so far" in words
        assert seconds < soon(10 * SHORT)


def misuse() -> list[str]:
    """Use an engine with a pipeline as one without, and with data that cannot work."""
    config = pipeline_config(1, "1f1b")
    model = shardwell.pipeline.split(Decoder(), loss_fn=next_token_loss)
    engine, *_ = shardwell.initialize(model=model, config=config)
    batch = micro_batches(0, 0)[0]
    said = []
    for misused in (
        lambda: engine(batch[0]),
        lambda: engine.backward(None),
        engine.step,
        engine.join,
        lambda: engine.use_schedule([["0F0", "0B0"], ["1F0", "1B0"]]),
        lambda: engine.use_schedule(shardwell.pipeline.make_schedule("zb-h1", 2, 4)),
    ):
        with pytest.raises(ShardwellError) as caught:
            misused()
        said.append(str(caught.value))
    return said


def test_what_a_pipeline_cannot_do_is_one_sentence(ranks: Ranks) -> None:
    for said in ranks.run(2, misuse):
        for what, words in zip(("engine(...)", "engine.backward", "engine.step", "engine.join"), said, strict=False):
            assert words.startswith(f"{what} does not exist in a pipeline")
        assert said[4].startswith(
            "the schedule has 2 ranks, 2 stages and 1 micro-batches; this pipeline has 2, 2 and 4"
        )
        assert said[5].startswith("the schedule splits backwards")


def uneven(case: str) -> str:
    """Read other micro-batches than the other stage, or too few."""
    model = shardwell.pipeline.split(Decoder(), loss_fn=next_token_loss)
    engine, *_ = shardwell.initialize(
        model=model, config=pipeline_config(1, "1f1b", shardwell={"divergence_timeout": SOON})
    )
    batches = micro_batches(0, 0)
    if case == "shapes" and dist.get_rank() == 1:
        batches[2] = (batches[2][0][:, :3], batches[2][1][:, :3])
    with pytest.raises(ShardwellError) as caught:
        engine.train_batch(iter(batches[: 3 if case == "few" else 4]))
    return str(caught.value)


def test_stages_that_read_different_micro_batches_are_told(ranks: Ranks) -> None:
    for words in ranks.run(2, uneven, "shapes"):
        assert "ranks diverge" in words
        assert "BATCH" in words
    for words in ranks.run(2, uneven, "few"):
        assert "the iterator ended after 3 of the 4 micro-batches" in words or "failed first" in words
