"""A checkpoint of a pipeline is loaded by any other layout, and one of another layout by a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.errors import CheckpointError, ShardwellError
from tests.support.pipelines import NUM_MICRO_BATCHES, Decoder, micro_batches, next_token_loss, pipeline_config, plain
from tests.support.ranks import Ranks

LEG = 2  # steps between a load and a save
DATA_SIZE = 2


class Counting(Decoder):
    """A decoder with buffers: one in a block of each stage, and one beside the blocks."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.shift = nn.Module()
        self.shift.register_buffer("calls", torch.zeros(()))
        for block in self.blocks:
            block.register_buffer("seen", torch.zeros(()))


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Counting().double()


def leg(folder: str, config: dict[str, Any], first_step: int) -> dict[str, Any]:
    """Load what there is, train some steps and save; return what this rank holds then."""
    model = model_of(first_step)
    stages = config["pipeline"]["stages"]
    engine, *_ = shardwell.initialize(model=shardwell.pipeline.split(model, loss_fn=next_token_loss), config=config)
    if first_step:
        path, client = engine.load_checkpoint(folder, strict=True)
        assert path is not None
        assert client == {"step": first_step}
        assert engine.global_steps == first_step
        for name, buffer in engine.module.named_buffers():
            assert buffer.item() == first_step, name
    losses = []
    for step in range(first_step, first_step + LEG):
        mine = DATA_SIZE // engine.data_size
        ranks = range(engine.data_rank * mine, (engine.data_rank + 1) * mine)
        losses.append(float(engine.train_batch(batch for rank in ranks for batch in micro_batches(step, rank))))
        for buffer in engine.module.buffers():
            buffer.add_(1)
    engine.save_checkpoint(folder, client_state={"step": first_step + LEG})
    found = {"parameters": engine.state_dict(), "losses": losses, "stages": stages}
    engine.destroy(whole=False)
    return found


@pytest.mark.slow
def test_a_chain_of_layouts_follows_plain_pytorch(ranks: Ranks, tmp_path: Path) -> None:
    chain = [
        (4, pipeline_config(3, "1f1b", stages=2)),
        (1, pipeline_config(1, "1f1b", stages=1, gradient_accumulation_steps=DATA_SIZE * NUM_MICRO_BATCHES)),
        (4, pipeline_config(1, "interleaved", stages=2)),
        (2, pipeline_config(2, "zb-h1", stages=2, gradient_accumulation_steps=DATA_SIZE * NUM_MICRO_BATCHES)),
        (2, pipeline_config(2, "1f1b", stages=1)),
    ]
    expected = plain(model_of(0), LEG * len(chain), DATA_SIZE)
    for number, (size, config) in enumerate(chain):
        found = ranks.run(size, leg, str(tmp_path), config, number * LEG)
        for one in found:
            assert one["losses"] == pytest.approx(expected["losses"][number * LEG : (number + 1) * LEG], abs=1e-10)
    held = {name: torch.as_tensor(value) for one in found for name, value in one["parameters"].items()}
    for name, value in expected["parameters"].items():
        assert abs(held[name] - value).max() < 1e-10


def load_strange(folder: str, config: dict[str, Any]) -> str:
    """Load a checkpoint of a larger model into a pipeline."""
    model = shardwell.pipeline.split(Decoder(5).double(), loss_fn=next_token_loss)
    engine, *_ = shardwell.initialize(model=model, config=config)
    engine.save_checkpoint(folder)
    engine.destroy()
    model = shardwell.pipeline.split(Decoder(4).double(), loss_fn=next_token_loss)
    engine, *_ = shardwell.initialize(model=model, config=config)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder)
    engine.destroy(whole=False)
    return str(caught.value)


def test_tensors_that_no_stage_has_are_named(ranks: Ranks, tmp_path: Path) -> None:
    for words in ranks.run(2, load_strange, str(tmp_path), pipeline_config(1, "1f1b", stages=2)):
        assert "it lacks nothing, and holds 'blocks.4.down.weight'" in words


def divided_twice() -> str:
    divided = shardwell.pipeline.split(model_of(0), loss_fn=next_token_loss)
    engine = shardwell.initialize(model=divided, config=pipeline_config(1, "1f1b")).engine
    engine.destroy()
    with pytest.raises(ShardwellError) as caught:
        shardwell.initialize(model=divided, config=pipeline_config(1, "1f1b"))
    return str(caught.value)


def test_a_model_of_which_ranks_have_stages_is_not_divided_again(ranks: Ranks) -> None:
    for words in ranks.run(2, divided_twice):
        assert "an earlier engine has divided this model" in words
