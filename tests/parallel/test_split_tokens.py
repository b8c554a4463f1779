"""Ranks with a part of each sequence, or of the vocabulary: what they would get wrong without a word is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwell
from shardwell.errors import ShardwellError
from shardwell.tensor_parallel import vocab_parallel_cross_entropy
from tests.support import sequence_models
from tests.support.models import batches, zero
from tests.support.ranks import Ranks
from tests.support.sequence_models import SequenceCase
from tests.support.tensor_models import HEAD, PLAN, ROWS, WIDTH, WORDS, TensorCase, started

SPLIT = {"sequence_parallel": True}


class Local(sequence_models.Block):
    """Attends by torch's own function, which sees this rank's tokens."""

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def beside_exchanged_attention() -> None:
    case = SequenceCase(steps=1, dtype=torch.float32)
    engine = sequence_models.started(case, 1)
    engine.module.blocks[1].__class__ = Local
    sequence_models.train(engine, case)


def mixed(x: Tensor) -> None:
    F.scaled_dot_product_attention(x, x, x)


def with_plan(what: str) -> None:
    plan = {**PLAN, **WORDS, "head": "colwise"} if what == "label" else {**PLAN, **HEAD}
    case = TensorCase(plan={**plan, **WORDS}, tensor={} if what in ("label", "word") else SPLIT, loss_parallel=True)
    engine, model = started(case, 1)
    rows = batches(1, ROWS)[0]

    def embedded(inputs: Tensor) -> Tensor:
        return model.embed(inputs) + model.position[: inputs.shape[1]]

    def around_blocks(inputs: Tensor) -> Tensor:
        x = embedded(inputs)
        for block in model.blocks:
            x = x + block.attention(block.norm1(x))
        return x

    def forward(tokens: Tensor) -> Tensor:
        logits = model.head(model.norm(model.hidden(tokens[:, :-1])))
        return vocab_parallel_cross_entropy(logits, tokens[:, 1:] + 20, model.head)

    if what == "mixed":  # in a block itself
        model.blocks[1].register_forward_pre_hook(lambda _, args: mixed(*args))
    if what == "mean":
        model.blocks[1].register_forward_pre_hook(lambda _, args: (args[0] * args[0].mean((0, 1)),))
    if what == "batch norm":
        norm = nn.BatchNorm1d(WIDTH).double()
        model.blocks[1].register_forward_pre_hook(lambda _, args: (norm(args[0].flatten(0, 1)).view_as(args[0]),))
    if what == "around":
        model.hidden = around_blocks  # type: ignore[method-assign]
    if what == "last":
        model.hidden = lambda inputs: model.blocks[0](embedded(inputs))  # type: ignore[method-assign]
        model.forward = lambda tokens: F.mse_loss(hidden := model.hidden(tokens[:, :-1]), hidden)  # type: ignore[method-assign]
    if what == "label":
        model.forward = forward  # type: ignore[method-assign]
    if what == "hidden":
        model.forward = lambda tokens, output_hidden_states: tokens  # type: ignore[method-assign,misc]
        engine(rows, output_hidden_states=True)
    engine(rows + 20 if what == "word" else rows)


class Gated(nn.Module):
    """A layer whose two halves are packed in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def packed(style: str) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated())
    config = zero(1, tensor_parallel={"autotp_size": 2, "plan": {"*.both": style, "*.down": "rowwise"}})
    engine = shardwell.initialize(model=model, config=config).engine
    return float(engine(torch.ones(2, 8)).detach().sum())


def words_of(what: str) -> str:
    try:
        if what in ("colwise", "packed_colwise"):
            packed(what)
        else:
            beside_exchanged_attention() if what == "exchanged" else with_plan(what)
    except (ShardwellError, IndexError) as error:
        return str(error)
    return "nothing was refused"


REFUSALS = {
    "colwise": "the output of '0.both.weight' is divided by chunk into 2 blocks, and colwise cuts its weight as one",
    "packed_colwise": "nothing was refused",
    "exchanged": "sequence_parallel_size: scaled_dot_product_attention runs over 6 tokens",
    "mixed": "tensor_parallel.sequence_parallel: scaled_dot_product_attention runs over 4 tokens between cut layers",
    "around": "'blocks.0.attention' got hidden states of 8 tokens, which were not split",
    "last": "the forward ended with sequences that are split",
    "mean": "tensor_parallel.sequence_parallel: mean runs over 4 tokens between cut layers",
    "batch norm": "tensor_parallel.sequence_parallel: batch_norm runs over 4 tokens between cut layers",
    "hidden": "output_hidden_states asks for the hidden states between blocks",
    "label": "target 48 is out of range: the vocabulary has 29 words",
    "word": "embed: word 48 is out of range: the vocabulary has 29 words",
}


def all_words() -> dict[str, str]:
    return {what: words_of(what) for what in REFUSALS}


def test_what_would_be_wrong_without_a_word_is_one_sentence(ranks: Ranks) -> None:
    for answers in ranks.run(2, all_words):
        for what, words in answers.items():
            assert REFUSALS[what] in words


def documents_as_long_as_parts() -> list[float]:
    """Train on documents that are as long as a rank's part of the sequence: each attends to itself on one rank."""
    case = SequenceCase(steps=2)
    engine = sequence_models.started(case, 2)
    losses = []
    for (batch,) in sequence_models.micro_batches(case):
        row = {key: value[:1] for key, value in batch.items()} | {"position_ids": torch.arange(6).repeat(2)[None]}
        part = shardwell.sequence_parallel.shard_batch(row, engine)
        mask = shardwell.sequence_parallel.whole_attention_mask(engine, position_ids=part["position_ids"])
        logits = engine(part["input_ids"], part["position_ids"], mask)
        loss = shardwell.sequence_parallel.cross_entropy(logits, part["shift_labels"], part["num_items_in_batch"])
        losses.append(float(shardwell.sequence_parallel.average_loss(loss, engine)))
        engine.backward(loss)
        engine.step()
    engine.destroy(whole=False)
    return losses


def test_documents_as_long_as_a_part_are_not_taken_for_one(ranks: Ranks) -> None:
    first, second = ranks.run(2, documents_as_long_as_parts)
    assert first == pytest.approx(second, abs=1e-12)
