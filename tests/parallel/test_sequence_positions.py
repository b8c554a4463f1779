"""Models that count positions by padding get, on a sequence axis, the positions that they give whole rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwell
from shardwell import sequence_parallel
from shardwell.errors import ShardwellError
from tests.support.models import zero
from tests.support.ranks import Ranks
from tests.support.sequence_models import VOCABULARY, pretrained

STEPS, TOKENS = 2, 8
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "OPT": {"ffn_dim": 24, "word_embed_proj_dim": 12, "dropout": 0.0},
    "Roberta": {"is_decoder": True, **NO_DROPOUT},
}


def made(family: str) -> nn.Module:
    torch.manual_seed(0)
    return pretrained(family, **MODELS[family]).double()


def batch(step: int) -> dict[str, Tensor]:
    """Rows of which the first begins with padding and the second ends with it; RoBERTa's tokens that pad are in it."""
    tokens = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(tokens)
    mask[0, :3] = mask[1, -1] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def on_parts(family: str) -> dict[str, Tensor]:
    """Train on two ranks that share rows."""
    model = made(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = zero(1, sequence_parallel_size=2)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config).engine
    for step in range(STEPS):
        engine.backward(engine(**sequence_parallel.shard_batch(batch(step), engine)).loss)
        engine.step()
    found = engine.state_dict()
    engine.destroy(whole=False)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_positions_are_those_of_whole_rows(ranks: Ranks, family: str) -> None:
    model: Any = made(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(**batch(step)).loss.backward()
        optimizer.step()
    expected = {name: value.detach() for name, value in model.state_dict().items()}
    for found in ranks.run(2, on_parts, family):
        for name, value in expected.items():
            assert abs(torch.as_tensor(found[name]) - value).max() < 1e-10, name


def cut_by_hand(family: str) -> str:
    """Return what is said of parts without positions."""
    engine = shardwell.initialize(model=made(family), config=zero(1, sequence_parallel_size=2)).engine
    part = sequence_parallel.shard_batch(batch(0), engine)
    del part["position_ids"]
    try:
        engine(**part)
    except ShardwellError as error:
        return str(error)
    finally:
        engine.destroy(whole=False)
    return "nothing was refused"


def test_parts_that_were_cut_by_hand_need_positions(ranks: Ranks) -> None:
    for words in ranks.run(2, cut_by_hand, "OPT"):
        assert (
            "OPTLearnedPositionalEmbedding counts positions by the padding mask of whole rows: pass position_ids"
            in words
        )
