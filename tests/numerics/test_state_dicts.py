"""State dicts of sharded models: read, loaded at another stage, and refused where they do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from tests.support.models import zero
from tests.support.ranks import Ranks
from tests.support.state_access import BLOCKS, STAGES, WIDTH, near


class Stateful(nn.Module):
    """Tied weights, a norm with buffers, buffers that are saved and one that is not."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH)) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("hidden", torch.arange(4.0), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.frozen) * float(self.table[1])


def stateful(seed: int = 0, norm: type[nn.Module] = nn.BatchNorm1d) -> Stateful:
    torch.manual_seed(seed)
    return Stateful(norm)


def stateful_engine(stage: int, seed: int = 0, precision: str = "fp32") -> shardwell.Engine:
    model = stateful(seed, nn.BatchNorm1d if precision == "fp32" else nn.LayerNorm)
    config = BLOCKS[precision]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage, **config)).engine


def stateful_step(engine: Any) -> Tensor:
    """All ranks see the same rows, so that batch norms stay alike."""
    return engine(torch.arange(11)).square().mean()


def states(stage: int, rank0_only: bool) -> dict[str, Any]:
    engine = stateful_engine(stage)
    for _ in range(2):
        engine.backward(stateful_step(engine))
        engine.step()
    state = engine.state_dict(rank0_only=rank0_only)
    if state:
        plain = stateful(5)
        plain.load_state_dict(state)  # strictly
        assert plain.head.weight is plain.embed.weight
        assert all(value.device.type == "cpu" and type(value) is Tensor for value in state.values())
    return state


def all_states() -> dict[tuple[int, bool], dict[str, Any]]:
    """All stages, for all ranks and for rank 0; on three ranks, what differs there."""
    cases = [(stage, rank0_only) for stage in STAGES for rank0_only in (False, True)]
    if dist.get_world_size() > 2:
        cases = [(1, True), (3, False)]
    return {(stage, rank0_only): states(stage, rank0_only) for stage, rank0_only in cases}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_state_dict_is_the_plain_models(ranks: Ranks, num_ranks: int) -> None:
    model = stateful()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        stateful_step(model).backward()
        optimizer.step()
    wanted = model.state_dict()
    for rank, answer in enumerate(ranks.run(num_ranks, all_states)):
        for (stage, rank0_only), found in answer.items():
            if rank0_only and rank:
                assert found == {}
                continue
            assert list(found) == list(wanted)
            for name, value in wanted.items():
                near(found[name], value, 1e-5, 1e-6, f"{name} at stage {stage}")
                assert str(found[name].dtype) == str(value.dtype).removeprefix("torch."), name


def round_trip(before: int, after: int, precision: str) -> dict[str, Any]:
    """From one engine into another one of another stage, and train both on."""
    first = stateful_engine(before, 0, precision)
    second = stateful_engine(after, 1, precision)
    first.backward(stateful_step(first).float())
    first.step()
    state = first.state_dict()
    answer = second.load_state_dict(state)
    assert not answer.missing_keys
    assert not answer.unexpected_keys
    loaded = second.state_dict()
    first.load_state_dict(state)  # in 16 bits its masters have more to tell than the state has
    for engine in (first, second):
        engine.backward(stateful_step(engine).float())
        engine.step()
    return {"sent": state, "loaded": loaded, "on": [first.state_dict(), second.state_dict()]}


@pytest.mark.parametrize(
    ("before", "after", "precision"),
    [(0, 3, "fp32"), (3, 1, "fp32"), (3, 1, "bf16"), (2, 3, "fp16")],
)
def test_states_travel_between_stages(ranks: Ranks, before: int, after: int, precision: str) -> None:
    for answer in ranks.run(2, round_trip, before, after, precision):
        for name, value in answer["sent"].items():
            assert (answer["loaded"][name] == value).all(), name
            near(answer["on"][0][name], torch.as_tensor(answer["on"][1][name]), 1e-5, 1e-6, name)


def bad_states(stage: int) -> dict[str, str]:
    engine = stateful_engine(stage)
    good = engine.state_dict()
    turned = torch.ones(WIDTH, 11)
    bad = {
        "missing": {key: value for key, value in good.items() if key != "frozen"},
        "unexpected": {**good, "more": torch.ones(1)},
        "size": {**good, "frozen": torch.ones(WIDTH + 1)},
        "turned": {**good, "embed.weight": turned, "head.weight": turned},
        "buffer": {**good, "table": torch.ones(5)},
        "buffer that would spread": {**good, "table": torch.ones(1)},
    }
    said = {}
    for name, state in bad.items():
        try:
            engine.load_state_dict(state)
            said[name] = "taken"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    answer = engine.load_state_dict({"frozen": torch.zeros(WIDTH), "more": torch.ones(1)}, strict=False)
    said["not strict"] = f"{len(answer.missing_keys)} {answer.unexpected_keys}"
    said["frozen"] = str(float(engine.state_dict()["frozen"].abs().max()))
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_states_that_do_not_fit_are_refused(ranks: Ranks, stage: int) -> None:
    said = ranks.run(2, bad_states, stage)[0]
    assert said["missing"].startswith("ShardwellError: the state does not fit the model: missing ['frozen']")
    assert "unexpected ['more']" in said["unexpected"]
    assert said["size"].startswith("ShardwellError: 'frozen' has shape (5,)")
    assert said["not strict"] == f"{len(stateful().state_dict()) - 1} ['more']"
    assert said["frozen"] == "0.0"


def test_states_of_another_shape_are_refused_by_name(ranks: Ranks) -> None:
    """Also where the number of elements fits, or where torch would spread the value."""
    said = ranks.run(2, bad_states, 1)[0]
    for case, name in {"turned": "embed.weight", "buffer": "table", "buffer that would spread": "table"}.items():
        assert said[case].startswith("ShardwellError"), f"{case}: {said[case]}"
        assert f"'{name}'" in said[case]


def plain_optimizer_state(stage: int) -> str:
    """A state of whole parameters goes to an optimizer that steps shards."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
        return model, torch.optim.AdamW(model.parameters())

    plain, state = build()
    plain(torch.ones(2, 8)).sum().backward()
    state.step()
    model, optimizer = build()
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage)).engine
    try:
        optimizer.load_state_dict(state.state_dict())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    return "taken"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_plain_optimizers_state_is_refused_by_one_that_steps_shards(ranks: Ranks, stage: int) -> None:
    for said in ranks.run(2, plain_optimizer_state, stage):
        assert said.startswith("ShardwellError: this state is not of the ")
        assert "load_checkpoint" in said


def state_of_more_ranks(stage: int) -> str:
    """A state of shards half as long goes to an engine that has taken no step."""

    def start() -> tuple[shardwell.Engine, torch.optim.Optimizer]:
        model = nn.Linear(8, 8, bias=False)
        optimizer = torch.optim.AdamW(model.parameters())
        return shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage)).engine, optimizer

    engine, optimizer = start()
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    state = optimizer.state_dict()
    _second, fresh = start()
    fresh.load_state_dict(state)
    for values in state["state"].values():
        values.update({key: value[::2] for key, value in values.items() if value.ndim})
    _third, fresh = start()
    try:
        fresh.load_state_dict(state)
    except shardwell.ShardwellError as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizers_state_of_another_number_of_ranks_is_refused(ranks: Ranks, stage: int) -> None:
    for said in ranks.run(2, state_of_more_ranks, stage):
        assert said.startswith("this state is not of the ")
