"""Models that change after `initialize`: resized, replaced, added, removed, frozen and thawed parameters.

Each change is made to a plain model as well, whose optimizer is told by hand what happened to its parameters.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import shardwell
from shardwell.memory import State
from shardwell.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from shardwell.zero import GatheredParameters
from tests.models import whole_parameters, zero
from tests.ranks import Ranks

WIDTH, VOCAB = 6, 10
STAGES = (0, 1, 2, 3)
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def fresh(make: Callable[[], Any], seed: int = 9) -> Any:
    """A new module in fp64, the same wherever it is made."""
    torch.manual_seed(seed)
    made = make()
    return made.double() if isinstance(made, (nn.Module, Tensor)) else made


def build(**options: Any) -> Net:
    return fresh(lambda: Net(**options), 0)


def tokens(step: int, num_ranks: int, vocab: int = VOCAB) -> list[Tensor]:
    generator = torch.Generator().manual_seed(30 + step)
    return list(torch.randint(vocab, (num_ranks, 3, 4), generator=generator))


def train(engine: shardwell.Engine, steps: range) -> None:
    for step in steps:
        engine.backward(engine(tokens(step, engine.world_size)[engine.global_rank]))
        engine.step()


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


def at_all_stages(run: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    return [run(stage, *args, **kwargs) for stage in STAGES]


def check(found: dict[str, Any], expected: dict[str, Tensor], what: str, limit: float = 1e-10) -> None:
    assert found.keys() == expected.keys(), what
    for name, wanted in expected.items():
        there = torch.as_tensor(found[name])
        assert there.shape == wanted.shape, f"{what}: {name}"
        difference = float((there.double() - wanted.double()).norm() / wanted.double().norm())
        assert difference <= limit, f"{what}: {name} differs by {difference}"


# ------------------------------------------------------------------------------------------------ values and shapes


def more_rows(weight: Tensor, number: int = 3) -> Tensor:
    return torch.cat([weight.detach(), fresh(lambda: torch.randn(number, weight.shape[1]))])


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
    expected = play_plainly(kind())
    for stage, found in zip(STAGES, ranks.run(2, at_all_stages, play_sharded, kind())[0], strict=True):
        check(found, expected, f"stage {stage}")


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
    for stage, found in zip(STAGES, ranks.run(2, at_all_stages, resized, kind)[0], strict=True):
        check(found, expected, f"{kind} at stage {stage}")


# ------------------------------------------------------------------------------------------------- what refit is for


def give_back(stage: int, **config: Any) -> dict[str, Any]:
    model = build()
    engine, *_ = shardwell.initialize(
        model=model.float(), optimizer=AdamW(model.parameters(), **OPTIONS), config=zero(stage, **config)
    )
    train(engine, range(2))
    before = books(engine)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    engine.refit()
    at_once = books(engine)
    train(engine, range(2, 4))
    trained = books(engine)
    model.requires_grad_(True)
    train(engine, range(4, 6))
    return {"before": before, "at once": at_once, "trained": trained, "thawed": books(engine)}


def books(engine: shardwell.Engine) -> dict[str, int]:
    """Optimizer bytes by unit."""
    found: dict[str, int] = {}
    for (state, unit, _), size in engine.memory().now.items():
        if state is State.OPTIMIZER:
            found[unit] = found.get(unit, 0) + size
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_refit_after_freezing_gives_memory_back(ranks: Ranks, precision: str) -> None:
    answers = ranks.run(2, at_all_stages, give_back, bf16={"enabled": precision == "bf16"})
    for answer in (answer for by_stage in answers for answer in by_stage):
        before = answer["before"]
        for after in (answer["at once"], answer["trained"]):
            assert after.get("blocks.0", 0) == 0
            assert 0 < after["blocks.1"] < 0.75 * before["blocks.1"]
            assert after["blocks.2"] == before["blocks.2"]
        assert answer["thawed"]["blocks.0"] == pytest.approx(before["blocks.0"], abs=64)  # padding, step counts


def wait_and_change(stage: int, change: str) -> str:
    model = build()
    model.blocks[2].up.requires_grad_(False)
    config = zero(stage, gradient_accumulation_steps=2)
    engine, *_ = shardwell.initialize(model=model, optimizer=AdamW(model.parameters()), config=config)
    train(engine, range(1))
    if change == "resize":
        with GatheredParameters(model.parameters(), modifier_rank=0):
            model.embed.weight.data = more_rows(model.embed.weight)
    elif change == "replace":
        model.head.weight = nn.Parameter(torch.zeros(VOCAB, WIDTH).double())
    elif change == "remove":
        del model.blocks[0]
    elif change == "thaw":
        model.blocks[2].up.requires_grad_(True)
    try:
        train(engine, range(1, 2))
    except shardwell.ShardwellError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("change", ["resize", "replace", "remove", "thaw"])
def test_a_change_while_gradients_wait_is_an_error(ranks: Ranks, change: str) -> None:
    for by_stage in ranks.run(2, at_all_stages, wait_and_change, change, limit=60):
        for stage, said in zip(STAGES, by_stage, strict=True):
            assert said.startswith(("ModelChangedError", "PeerError")), f"stage {stage}: {said}"
            assert "gradients wait for a step" in said


def nothing_waits(stage: int) -> int:
    """After zero_grad a change is welcome."""
    model = build()
    engine, *_ = shardwell.initialize(model=model, optimizer=AdamW(model.parameters()), config=zero(stage))
    engine.backward(engine(tokens(0, 1)[0]))
    model.blocks[1] = fresh(Block)
    engine.zero_grad()
    train(engine, range(2))
    return engine.global_steps


def test_after_zero_grad_a_change_is_welcome(ranks: Ranks) -> None:
    assert ranks.run(2, at_all_stages, nothing_waits)[0] == [2, 2, 2, 2]


# -------------------------------------------------------------------------------------------------------- newcomers


def labels_of_newcomers(stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters of removed blocks are gone; whoever gets their memory must not get their place in the optimizer."""
    model = build()
    engine, *_ = shardwell.initialize(model=model, optimizer=AdamW(model.parameters(), **OPTIONS), config=zero(stage))
    train(engine, range(1))
    del model.blocks[2]
    train(engine, range(1))
    gc.collect()
    for number in range(30):
        model.add_module(f"extra{number}", fresh(lambda: nn.Linear(WIDTH, WIDTH), number))
    forward = type(model).forward

    def with_extras(self: Net, batch: Tensor) -> Tensor:
        rows = self.embed(batch)
        return forward(self, batch) + sum(getattr(self, f"extra{n}")(rows).square().mean() for n in range(30))

    model.forward = with_extras.__get__(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "extra" in name}
    train(engine, range(2))
    after = {name: value for name, value in whole_parameters(model).items() if "extra" in name}
    return before, after


def test_newcomers_train_only_if_the_optimizer_was_given_them(ranks: Ranks) -> None:
    for by_stage in ranks.run(2, at_all_stages, labels_of_newcomers):
        for stage, (before, after) in zip(STAGES, by_stage, strict=True):
            moved = [name for name in before if (before[name] != after[name]).any()]
            assert len(before) == 60
            assert not moved, f"stage {stage}: {moved}"


def away_and_back(stage: int) -> tuple[Any, Any, Any]:
    """A block's weights before it leaves the model, after a step without it, and after a step with it again."""
    model = build()
    engine, *_ = shardwell.initialize(model=model, optimizer=AdamW(model.parameters(), **OPTIONS), config=zero(stage))
    train(engine, range(1))
    before = whole_parameters(model)["blocks.1.up.weight"]
    block = model.blocks.pop(1)
    train(engine, range(1))
    away = block.up.weight.detach().clone()
    model.blocks.insert(1, block)
    train(engine, range(1))
    return before, away, whole_parameters(model)["blocks.1.up.weight"]


def test_a_block_that_comes_back_trains_again(ranks: Ranks) -> None:
    for before, away, after in ranks.run(2, at_all_stages, away_and_back)[0]:
        assert (before == away).all()
        assert (away != after).any()


# ----------------------------------------------------------------------------------------------------- exact masters


def masters_through_contexts(stage: int, how: str, precision: str) -> float:
    """How far masters are from themselves after nothing was changed."""
    block = {"bf16": {"enabled": precision == "bf16"}, "fp16": {"enabled": precision == "fp16", "loss_scale": 8.0}}
    model = build().float()
    engine, *_ = shardwell.initialize(
        model=model, optimizer=AdamW(model.parameters(), **OPTIONS), config=zero(stage, **block)
    )
    train(engine, range(2))
    before = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    rounded = {name: value.detach().float() for name, value in whole_parameters(model).items()}
    assert any((before[name] != rounded[name]).any() for name in before)
    if how == "refit":
        model.blocks.insert(0, fresh(Block).float())
        engine.refit()
        del model.blocks[0]
        engine.refit()
    with GatheredParameters(model.parameters(), modifier_rank=0):
        if how == "nested":
            with GatheredParameters(model.blocks[1].parameters()):
                pass
        elif how == "state dict":
            engine.state_dict()
    after = {name: safe_get_full_fp32_param(model.get_parameter(name)) for name in before}
    return max(float((before[name] - after[name].float()).abs().max()) for name in before)


def all_masters(how: str) -> dict[tuple[int, str], float]:
    cases = [(0, "bf16"), (1, "fp16"), (2, "bf16"), (3, "bf16"), (3, "fp16")]
    return {(stage, precision): masters_through_contexts(stage, how, precision) for stage, precision in cases}


@pytest.mark.parametrize("how", ["once", "nested", "state dict", "refit"])
def test_looking_at_parameters_leaves_their_masters_alone(ranks: Ranks, how: str) -> None:
    for case, distance in ranks.run(2, all_masters, how)[0].items():
        assert distance == 0.0, case


# ---------------------------------------------------------------------------------------------------------- deepcopy


def copied(stage: int) -> dict[str, Any]:
    model = build(tied=True)
    engine, *_ = shardwell.initialize(model=model, optimizer=AdamW(model.parameters(), **OPTIONS), config=zero(stage))
    train(engine, range(2))
    with GatheredParameters(model.parameters()):
        twin = copy.deepcopy(model)
    whole = whole_parameters(model)
    same = all(torch.equal(whole[name], parameter) for name, parameter in twin.named_parameters())
    if dist.get_rank() == 0:  # it is this rank's own: no other one has to take part
        twin(tokens(0, 1)[0]).backward()
    train(engine, range(2, 3))
    return {
        "ordinary": all(type(p) is nn.Parameter and not hasattr(p, "_shardwell_keeper") for p in twin.parameters()),
        "same": same,
        "tied": twin.head.weight is twin.embed.weight,
        "trained": dist.get_rank() != 0 or all(p.grad is not None for p in twin.parameters()),
        "engine": engine.global_steps == 3,
    }


def test_a_copy_made_inside_a_context_is_an_ordinary_model(ranks: Ranks) -> None:
    for by_stage in ranks.run(2, at_all_stages, copied):
        for stage, answer in zip(STAGES, by_stage, strict=True):
            assert all(answer.values()), f"stage {stage}: {answer}"
