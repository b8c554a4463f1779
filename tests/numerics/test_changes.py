"""Models that change after `initialize`: resized, replaced, added, removed, frozen and thawed parameters.

Each change is made to a plain model as well, whose optimizer is told by hand what happened to its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import shardwell
from shardwell.utils import safe_get_full_optimizer_state
from shardwell.zero import GatheredParameters
from tests.support.changing_models import (
    OPTIONS,
    VOCAB,
    WIDTH,
    Block,
    Net,
    at_all_stages,
    build,
    fresh,
    more_rows,
    tokens,
    train,
)
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks


def train_plainly(model: nn.Module, optimizer: Optimizer, steps: range, num_ranks: int = 2) -> None:
    for step in steps:
        optimizer.zero_grad()
        for own in tokens(step, num_ranks):
            (model(own) / num_ranks).backward()
        optimizer.step()


class Change:
    """What to override: `plainly` and `sharded`, or `both` if the model does not mind who holds it."""

    tied = False

    def both(self, model: Net) -> None:
        raise NotImplementedError

    def plainly(self, model: Net, optimizer: Optimizer) -> None:
        before = dict(model.named_parameters())
        self.both(model)
        follow(optimizer, before, dict(model.named_parameters()))

    def sharded(self, engine: shardwell.Engine, model: Net) -> None:
        with GatheredParameters(model.parameters(), modifier_rank=0):
            self.both(model)


def follow(optimizer: Optimizer, before: dict[str, nn.Parameter], after: dict[str, nn.Parameter]) -> None:
    """New parameters take the places of those whose names they took over; what has another shape starts anew."""
    (group,) = optimizer.param_groups
    group["params"] = [
        after.get(name, old) for name, old in before.items() if any(old is known for known in group["params"])
    ]
    for parameter in list(optimizer.state):
        gone = all(parameter is not known for known in group["params"])
        if gone or optimizer.state[parameter]["exp_avg"].shape != parameter.shape:
            del optimizer.state[parameter]


def play_plainly(change: Change) -> dict[str, Tensor]:
    model = build(tied=change.tied)
    optimizer = AdamW(model.parameters(), **OPTIONS)
    train_plainly(model, optimizer, range(2))
    change.plainly(model, optimizer)
    train_plainly(model, optimizer, range(2, 4))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def play_sharded(stage: int, change: Change) -> dict[str, Tensor]:
    model = build(tied=change.tied)
    engine, *_ = shardwell.initialize(model=model, optimizer=AdamW(model.parameters(), **OPTIONS), config=zero(stage))
    train(engine, range(2))
    change.sharded(engine, model)
    train(engine, range(2, 4))
    return whole_parameters(model)


def check(found: dict[str, Any], expected: dict[str, Tensor], what: str, limit: float = 1e-10) -> None:
    assert found.keys() == expected.keys(), what
    for name, wanted in expected.items():
        there = torch.as_tensor(found[name])
        assert there.shape == wanted.shape, f"{what}: {name}"
        difference = float((there.double() - wanted.double()).norm() / wanted.double().norm())
        assert difference <= limit, f"{what}: {name} differs by {difference}"


# ------------------------------------------------------------------------------------------------ values and shapes


class LargerData(Change):
    """`.data` is given a larger tensor."""

    def both(self, model: Net) -> None:
        model.embed.weight.data = more_rows(model.embed.weight)


class LargerTied(LargerData):
    tied = True


class LargerParameter(Change):
    """A new parameter takes the name."""

    def both(self, model: Net) -> None:
        model.embed.weight = nn.Parameter(more_rows(model.embed.weight))


class SmallerHead(Change):
    def both(self, model: Net) -> None:
        model.head.weight.data = model.head.weight.detach()[:4].clone()


class Reinitialised(Change):
    """In place; the optimizer keeps its state."""

    def both(self, model: Net) -> None:
        torch.manual_seed(4)
        nn.init.normal_(model.blocks[1].up.weight, std=0.1)
        nn.init.zeros_(model.head.weight)


class SameShape(Change):
    """`.data` is given another tensor of the same shape, also one with other strides."""

    def both(self, model: Net) -> None:
        model.blocks[0].down.weight.data = fresh(lambda: torch.randn(WIDTH, 2 * WIDTH + 1))
        model.blocks[2].up.weight.data = fresh(lambda: torch.randn(WIDTH, 2 * WIDTH + 1)).t()


class ByOneRank(Change):
    """Only the modifying rank changes anything."""

    def sharded(self, engine: shardwell.Engine, model: Net) -> None:
        with GatheredParameters(model.parameters(), modifier_rank=1):
            if dist.get_rank() == 1:
                self.both(model)

    def both(self, model: Net) -> None:
        with torch.no_grad():
            model.embed.weight[2:4] += 1.0
            model.blocks[1].up.bias.fill_(0.5)


class LargerAndOthers(Change):
    """Next to the parameter that grows, others of the same unit change their values."""

    def both(self, model: Net) -> None:
        block = model.blocks[1]
        block.up.weight.data = more_rows(block.up.weight)
        block.up.bias.data = torch.cat([block.up.bias.detach(), torch.ones(3).double()])
        block.down.weight.data = more_rows(block.down.weight.t()).t().contiguous()
        with torch.no_grad():
            block.down.bias.fill_(0.25)


class LargerByAnotherRank(Change):
    """All ranks give the same shape, and the modifying rank's values count."""

    def sharded(self, engine: shardwell.Engine, model: Net) -> None:
        with GatheredParameters(model.parameters(), modifier_rank=1):
            self.both(model)
            if dist.get_rank() != 1:
                model.embed.weight.data.fill_(7.0)

    def both(self, model: Net) -> None:
        model.embed.weight.data = more_rows(model.embed.weight)


# --------------------------------------------------------------------------------------------------------- structure


class ReplacedModule(Change):
    def both(self, model: Net) -> None:
        model.blocks[1] = fresh(Block)
        model.head = fresh(lambda: nn.Linear(WIDTH, VOCAB, bias=False))


class RemovedBlock(Change):
    """The blocks behind it move up."""

    def both(self, model: Net) -> None:
        del model.blocks[1]

    def plainly(self, model: Net, optimizer: Optimizer) -> None:
        self.both(model)


class RemovedUntilOne(RemovedBlock):
    """A single block is no repeated block any more, so that the model is cut into other units."""

    def both(self, model: Net) -> None:
        del model.blocks[1:]


class AddedUntrained(Change):
    """A block that nobody gives to the optimizer stays as it is."""

    def both(self, model: Net) -> None:
        model.blocks.append(fresh(Block))


class InsertedBlock(Change):
    """In the middle, so that names move; its own names belonged to others, and it must not train for that."""

    def both(self, model: Net) -> None:
        model.blocks.insert(1, fresh(Block))

    def plainly(self, model: Net, optimizer: Optimizer) -> None:
        self.both(model)


class AddedAfterForward(Change):
    """Its parameters enter the optimizer once the engine has seen them."""

    def both(self, model: Net) -> None:
        model.blocks.append(fresh(Block))

    def plainly(self, model: Net, optimizer: Optimizer) -> None:
        self.both(model)
        optimizer.add_param_group({"params": list(model.blocks[3].parameters()), "lr": 0.05, "weight_decay": 0.0})

    def sharded(self, engine: shardwell.Engine, model: Net) -> None:
        self.both(model)
        with torch.no_grad():
            engine(tokens(0, 1)[0])
        self.add(engine, model)

    def add(self, engine: shardwell.Engine, model: Net) -> None:
        new = list(model.blocks[3].parameters())
        engine.optimizer.add_param_group({"params": new, "lr": 0.05, "weight_decay": 0.0})


class AddedBeforeForward(AddedAfterForward):
    """Its parameters enter the optimizer at once, as they would with torch."""

    def sharded(self, engine: shardwell.Engine, model: Net) -> None:
        self.both(model)
        self.add(engine, model)


class AddedAfterRefit(AddedAfterForward):
    def sharded(self, engine: shardwell.Engine, model: Net) -> None:
        self.both(model)
        engine.refit()
        self.add(engine, model)


class Untied(Change):
    """The head gets a copy of its own."""

    tied = True

    def both(self, model: Net) -> None:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())

    def plainly(self, model: Net, optimizer: Optimizer) -> None:
        self.both(model)  # nobody gives the copy to the optimizer


class FrozenForAWhile(Change):
    """AdamW keeps the state of what is frozen."""

    def plainly(self, model: Net, optimizer: Optimizer) -> None:
        self.freeze(model, lambda steps: train_plainly(model, optimizer, steps))

    def sharded(self, engine: shardwell.Engine, model: Net) -> None:
        self.freeze(model, lambda steps: train(engine, steps))

    def freeze(self, model: Net, run: Callable[[range], None]) -> None:
        model.blocks[1].requires_grad_(False)
        model.blocks[2].up.weight.requires_grad_(False)
        run(range(20, 22))
        model.blocks[1].requires_grad_(True)
        run(range(22, 24))
        model.blocks[2].requires_grad_(True)


CHANGES = [
    LargerData, LargerTied, LargerParameter, SmallerHead, Reinitialised, SameShape, ByOneRank, ReplacedModule,
    RemovedBlock, RemovedUntilOne, AddedUntrained, AddedAfterForward, AddedBeforeForward, AddedAfterRefit,
    InsertedBlock, Untied, FrozenForAWhile, LargerAndOthers, LargerByAnotherRank,
]  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES, ids=lambda kind: kind.__name__)
def test_training_goes_on_as_it_does_plainly(ranks: Ranks, kind: type[Change]) -> None:
    """At stage 3, where a rank has only its shard, and at one of the others."""
    expected = play_plainly(kind())
    for stage in (CHANGES.index(kind) % 3, 3):
        check(ranks.run(2, play_sharded, stage, kind())[0], expected, f"stage {stage}")


def rows_that_stay(stage: int) -> dict[str, Any]:
    """Values and state right after a change, before anything is trained."""
    model = build()
    engine, *_ = shardwell.initialize(model=model, optimizer=AdamW(model.parameters(), **OPTIONS), config=zero(stage))
    train(engine, range(2))
    before = whole_parameters(model)
    with GatheredParameters(model.parameters(), modifier_rank=0):
        model.embed.weight.data = more_rows(model.embed.weight)
    states = {
        name: safe_get_full_optimizer_state(p, "exp_avg") for name, p in model.named_parameters() if "blocks" in name
    }
    engine.refit()
    after = whole_parameters(model)
    kept = {name: safe_get_full_optimizer_state(p, "exp_avg") for name, p in model.named_parameters()}
    return {"before": before, "after": after, "states": states, "kept": kept}


def test_old_rows_keep_their_values_and_others_their_state(ranks: Ranks) -> None:
    for answer in (answer for by_stage in ranks.run(2, at_all_stages, rows_that_stay) for answer in by_stage):
        assert (answer["after"]["embed.weight"][:VOCAB] == answer["before"]["embed.weight"]).all()
        assert answer["after"]["embed.weight"].shape == (VOCAB + 3, WIDTH)
        assert answer["kept"]["embed.weight"] is None
        for name, state in answer["states"].items():
            assert (answer["kept"][name] == state).all(), name
            assert (answer["after"][name] == answer["before"][name]).all(), name


# ------------------------------------------------------------------------------------------------------ Transformers


def tiny(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        return transformers.GPT2LMHeadModel(config).double()
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def resized(stage: int | None, kind: str, num_ranks: int = 2) -> dict[str, Tensor]:
    """Train, add three tokens, train on; `stage` None is plain."""
    model = tiny(kind)
    optimizer = AdamW(model.parameters(), **OPTIONS)
    engine = None
    if stage is not None:
        engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage)).engine
    for step in range(4):
        if step == 2:
            before = dict(model.named_parameters())
            with GatheredParameters(model.parameters(), modifier_rank=0):
                torch.manual_seed(7)
                model.resize_token_embeddings(23, mean_resizing=False)
            if engine is None:
                follow(optimizer, before, dict(model.named_parameters()))
        batch = tokens(step, num_ranks, model.config.vocab_size)
        if engine is None:
            optimizer.zero_grad()
            for own in batch:
                (model(input_ids=own, labels=own).loss / num_ranks).backward()
            optimizer.step()
        else:
            own = batch[dist.get_rank()]
            engine.backward(engine(input_ids=own, labels=own).loss)
            engine.step()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return whole_parameters(model)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_can_add_tokens(ranks: Ranks, kind: str) -> None:
    expected = resized(None, kind)
    for stage in {"gpt2": (0, 2), "llama": (1, 3)}[kind]:
        check(ranks.run(2, resized, stage, kind)[0], expected, f"{kind} at stage {stage}")
