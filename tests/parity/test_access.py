"""Reading and changing sharded state: single parameters through `shardwell.utils`, whole models by state dicts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell import utils
from shardwell.rounding import narrow
from tests.models import zero
from tests.ranks import Ranks

WIDTH, SCALE = 5, 256.0
STAGES = (0, 1, 2, 3)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BLOCKS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": SCALE}},
}


class Net(nn.Module):
    """Odd sizes: shards cut through parameters, and most ranks hold no part of the small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.ones(1))
        self.turned = nn.Parameter(torch.randn(WIDTH, 7).t() / 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x @ self.turned.t() * self.single


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def rows(step: int, num_ranks: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(20 + step)
    return list(torch.randn(num_ranks, 4, WIDTH, generator=generator))


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


class Plain:
    """A mixed-precision loop in one process, with everything at hand."""

    def __init__(self, precision: str, num_ranks: int, accumulation: int = 1) -> None:
        self.masters = {name: nn.Parameter(p.detach().clone()) for name, p in build().named_parameters()}
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=1e-2, weight_decay=0.1)
        self.dtype, self.num_ranks, self.accumulation = DTYPES[precision], num_ranks, accumulation
        self.scale = SCALE if precision == "fp16" else 1.0
        self.model = build().to(self.dtype)

    def backward(self, step: int) -> None:
        """The average over ranks, a micro-step's share of it."""
        share = 1.0 / (self.num_ranks * self.accumulation)
        for name, parameter in self.model.named_parameters():
            flat = self.masters[name].detach().flatten()
            parameter.data.copy_(narrow(flat, torch.empty_like(flat, dtype=self.dtype)).view(parameter.shape))
        for own in rows(step, self.num_ranks):
            self.model.zero_grad()
            (loss_of(self.model(own.to(self.dtype))) * self.scale).backward()
            for name, parameter in self.model.named_parameters():
                master = self.masters[name]
                gradient = parameter.grad.float() * share / self.scale
                master.grad = gradient if master.grad is None else master.grad + gradient

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self, name: str, key: str) -> Tensor:
        return self.optimizer.state[self.masters[name]][key]


def initialize(stage: int, precision: str = "fp32", **config: Any) -> shardwell.Engine:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage, **BLOCKS[precision], **config))[0]


def backward(engine: shardwell.Engine, step: int) -> None:
    engine.backward(loss_of(engine(rows(step, engine.world_size)[engine.global_rank])))


def read(engine: shardwell.Engine, ask: Callable[[nn.Parameter], Any]) -> dict[str, Any]:
    return {name: ask(parameter) for name, parameter in engine.module.named_parameters()}


# ------------------------------------------------------------------------------------------------------------ reading

KEYS = ("exp_avg", "exp_avg_sq", "step")


def readings(stage: int, precision: str, accumulation: int) -> dict[str, Any]:
    engine = initialize(stage, precision, gradient_accumulation_steps=accumulation)
    found: dict[str, Any] = {}

    def note(when: str) -> None:
        found[f"{when}: gradients"] = read(engine, utils.safe_get_full_grad)
        if "backward" not in when:
            found[f"{when}: masters"] = read(engine, utils.safe_get_full_fp32_param)
            for key in KEYS:
                found[f"{when}: {key}"] = read(engine, lambda p, key=key: utils.safe_get_full_optimizer_state(p, key))

    note("at first")
    for step in range(2):
        for micro in range(accumulation):
            backward(engine, 10 * step + micro)
            note(f"{step}.{micro} after backward")
            engine.step()
        note(f"{step} after the step")
    found["no such key"] = read(engine, lambda p: utils.safe_get_full_optimizer_state(p, "sum"))
    return found


def plain_readings(precision: str, num_ranks: int, accumulation: int) -> dict[str, Any]:
    plain = Plain(precision, num_ranks, accumulation)
    found: dict[str, Any] = {}

    def note(when: str) -> None:
        found[f"{when}: gradients"] = {name: master.grad for name, master in plain.masters.items()}
        if "backward" in when:
            return
        states = [plain.optimizer.state.get(master, {}) for master in plain.masters.values()]
        for key in KEYS:
            values = {n: state.get(key) for n, state in zip(plain.masters, states, strict=True)}
            found[f"{when}: {key}"] = {name: None if v is None else v.clone() for name, v in values.items()}
        found[f"{when}: masters"] = {name: master.detach().clone() for name, master in plain.masters.items()}

    note("at first")
    for step in range(2):
        for micro in range(accumulation):
            plain.backward(10 * step + micro)
            note(f"{step}.{micro} after backward")
        plain.step()
        note(f"{step} after the step")
    found["no such key"] = dict.fromkeys(plain.masters)
    return found


def all_readings(precision: str) -> dict[tuple[int, int], dict[str, Any]]:
    cases = [(0, 1), (1, 1), (1, 2), (2, 2), (3, 1), (3, 2)] if dist.get_world_size() == 2 else [(1, 2), (3, 1)]
    return {(stage, accumulation): readings(stage, precision, accumulation) for stage, accumulation in cases}


# gradients are rounded to 16 bits before and after they are averaged
NEAR = {"fp32": (1e-5, 1e-7), "bf16": (2e-2, 1e-3), "fp16": (5e-3, 1e-4)}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("precision", list(DTYPES))
def test_whole_state_is_the_plain_optimizers(ranks: Ranks, precision: str, num_ranks: int) -> None:
    rtol, atol = NEAR[precision]
    expected = {g: plain_readings(precision, num_ranks, g) for g in (1, 2)}
    for answer in ranks.run(num_ranks, all_readings, precision):
        for (stage, accumulation), found in answer.items():
            wanted = expected[accumulation]
            assert found.keys() == wanted.keys()
            for what in wanted:
                for name in wanted[what]:
                    where = f"{what} of {name} at stage {stage}"
                    near(found[what][name], wanted[what][name], rtol, atol, where)


def near(found: Any, wanted: Any, rtol: float, atol: float, what: str) -> None:
    assert (found is None) == (wanted is None), what
    if wanted is not None:
        found = torch.as_tensor(found, dtype=torch.float32)
        assert found.shape == wanted.shape, what
        torch.testing.assert_close(found, wanted.float(), rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def parts(stage: int, precision: str) -> dict[str, Any]:
    """This rank's parts, next to the whole values."""
    engine = initialize(stage, precision)
    backward(engine, 0)
    engine.step()
    backward(engine, 1)
    whole = {
        "master": utils.safe_get_full_fp32_param,
        "gradient": utils.safe_get_full_grad,
        "exp_avg": lambda p: utils.safe_get_full_optimizer_state(p, "exp_avg"),
    }
    local = {
        "master": utils.safe_get_local_fp32_param,
        "gradient": utils.safe_get_local_grad,
        "exp_avg": lambda p: utils.safe_get_local_optimizer_state(p, "exp_avg"),
    }
    strides = read(engine, lambda p: p.stride())
    return {
        "whole": {what: read(engine, ask) for what, ask in whole.items()},
        "local": {what: read(engine, ask) for what, ask in local.items()},
        "strides": strides,
    }


def all_parts() -> dict[tuple[str, int], dict[str, Any]]:
    return {(precision, stage): parts(stage, precision) for precision in DTYPES for stage in STAGES}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_local_parts_make_up_the_whole(ranks: Ranks, num_ranks: int) -> None:
    by_rank = ranks.run(num_ranks, all_parts)
    for precision, stage in by_rank[0]:
        answers = [answer[precision, stage] for answer in by_rank]
        holders = set()
        for what, by_name in answers[0]["whole"].items():
            for name, whole in by_name.items():
                every = [answer["local"][what][name] for answer in answers]
                held = [torch.as_tensor(part) for part in every if part is not None]
                holders.add(len(held))
                flat = in_memory_order(torch.as_tensor(whole), answers[0]["strides"][name])
                for part in held if stage == 0 else [torch.cat(held)]:
                    assert torch.equal(part, flat), f"{what} of {name} at stage {stage} in {precision}"
        assert holders == ({num_ranks} if stage == 0 else holders - {0})
        assert stage == 0 or 1 in holders, "no parameter lies on one rank alone"


def in_memory_order(whole: Tensor, stride: tuple[int, ...]) -> Tensor:
    order = sorted(range(whole.ndim), key=lambda dim: -stride[dim])
    return whole.permute(order).flatten()


# ----------------------------------------------------------------------------------------------------------- changing


def value_for(name: str, shape: Any, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
    return torch.randn(tuple(shape), generator=generator) / 10


def change(stage: int, precision: str, local: bool) -> dict[str, Any]:
    """Train, change everything that can be changed, train on."""
    engine = initialize(stage, precision)
    backward(engine, 0)
    engine.step()
    for name, parameter in engine.module.named_parameters():
        master, first, second = (value_for(name, parameter.shape, seed) for seed in (1, 2, 3))
        if local:
            set_parts(parameter, master, first, second.square())
        else:
            utils.safe_set_full_fp32_param(parameter, master)
            utils.safe_set_full_optimizer_state(parameter, first, "exp_avg")
            utils.safe_set_full_optimizer_state(parameter, second.square(), "exp_avg_sq")
            utils.safe_set_full_optimizer_state(parameter, 5.0, "step")
    backward(engine, 1)
    for name, parameter in engine.module.named_parameters():
        gradient = value_for(name, parameter.shape, 4)
        if local:
            part = mine(parameter, gradient)
            if part is not None:
                utils.safe_set_local_grad(parameter, part)
        else:
            utils.safe_set_full_grad(parameter, gradient)
    got = read(engine, utils.safe_get_full_grad)
    engine.step()
    backward(engine, 2)
    engine.step()
    return {"gradients": got, "masters": read(engine, utils.safe_get_full_fp32_param)}


def mine(parameter: nn.Parameter, value: Tensor) -> Tensor | None:
    """This rank's part of a whole value, cut by hand: ranks come in order."""
    held = utils.safe_get_local_fp32_param(parameter)
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, 0 if held is None else held.numel())
    flat = in_memory_order(value, parameter.stride())
    if held is None or held.numel() == flat.numel():
        return None if held is None else flat
    start = sum(sizes[: dist.get_rank()])
    return flat[start : start + held.numel()]


def set_parts(parameter: nn.Parameter, master: Tensor, first: Tensor, second: Tensor) -> None:
    values = [mine(parameter, value) for value in (master, first, second)]
    if values[0] is not None:
        utils.safe_set_local_fp32_param(parameter, values[0])
        utils.safe_set_local_optimizer_state(parameter, values[1], "exp_avg")
        utils.safe_set_local_optimizer_state(parameter, values[2], "exp_avg_sq")
        utils.safe_set_local_optimizer_state(parameter, 5.0, "step")


def plain_change(precision: str, num_ranks: int) -> dict[str, Tensor]:
    plain = Plain(precision, num_ranks)
    plain.backward(0)
    plain.step()
    for name, master in plain.masters.items():
        values = [value_for(name, master.shape, seed) for seed in (1, 2, 3)]
        master.data.copy_(values[0])
        plain.state(name, "exp_avg").copy_(values[1])
        plain.state(name, "exp_avg_sq").copy_(values[2].square())
        plain.state(name, "step").fill_(5.0)
    plain.backward(1)
    for name, master in plain.masters.items():
        master.grad = value_for(name, master.shape, 4)
    plain.step()
    plain.backward(2)
    plain.step()
    return {name: master.detach() for name, master in plain.masters.items()}


CHANGES = [(0, False), (1, False), (2, False), (3, False), (3, True)]


def all_changes(precision: str) -> list[dict[str, Any]]:
    return [change(stage, precision, local) for stage, local in CHANGES]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("precision", list(DTYPES))
def test_training_goes_on_from_what_was_set(ranks: Ranks, precision: str, num_ranks: int) -> None:
    rtol, atol = NEAR[precision]
    expected = plain_change(precision, num_ranks)
    for answers in ranks.run(num_ranks, all_changes, precision):
        for (stage, local), answer in zip(CHANGES, answers, strict=True):
            for name, wanted in expected.items():
                where = f"{name} at stage {stage}, {'local' if local else 'full'}"
                near(answer["masters"][name], wanted, rtol, atol, where)
                near(answer["gradients"][name], value_for(name, wanted.shape, 4), rtol, atol, where)


def set_small_gradients() -> list[float]:
    found = []
    for stage in STAGES:
        engine = initialize(stage, "fp16")
        backward(engine, 0)
        parameter = engine.module.blocks[0][0].weight
        utils.safe_set_full_grad(parameter, torch.full(parameter.shape, 1e-8))
        found.append(float(utils.safe_get_full_grad(parameter).min()))
    return found


def test_gradients_that_are_set_are_scaled_before_they_are_rounded(ranks: Ranks) -> None:
    """1e-8 is nothing in fp16; 256 times as much is something."""
    assert ranks.run(2, set_small_gradients)[0] == pytest.approx([1e-8] * 4, rel=2e-2)


def set_steps() -> list[float]:
    """As a tensor; on a parameter of one element too, where it could be taken for the parameter's own shape."""
    found = []
    for stage in STAGES:
        engine = initialize(stage)
        backward(engine, 0)
        engine.step()
        for parameter in (engine.module.single, engine.module.turned):
            utils.safe_set_full_optimizer_state(parameter, torch.tensor(5.0), "step")
            found.append(float(utils.safe_get_full_optimizer_state(parameter, "step")))
        backward(engine, 1)
        engine.step()
        found.append(float(utils.safe_get_full_optimizer_state(engine.module.single, "step")))
    return found


def test_a_count_of_steps_can_be_set_as_a_tensor(ranks: Ranks) -> None:
    assert ranks.run(2, set_steps)[0] == [5.0, 5.0, 6.0] * 4


def set_while_open() -> list[float]:
    """How far a master is from what it was set to inside a context."""
    found = []
    for stage, precision in [(0, "bf16"), (1, "fp16"), (2, "bf16"), (3, "bf16"), (3, "fp16")]:
        engine = initialize(stage, precision)
        parameter = engine.module.blocks[0][0].weight
        value = torch.full(parameter.shape, 1.0 + 2.0**-20)
        with shardwell.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
            utils.safe_set_full_fp32_param(parameter, value)
        found.append(float((utils.safe_get_full_fp32_param(parameter) - value).abs().max()))
    return found


def test_masters_that_are_set_inside_a_context_keep_all_their_bits(ranks: Ranks) -> None:
    assert ranks.run(2, set_while_open)[0] == [0.0] * 5


def refusals(stage: int) -> dict[str, str]:
    engine = initialize(stage)
    parameter = engine.module.blocks[0][0].weight
    asks: dict[str, Callable[[], Any]] = {
        "foreign": lambda: utils.safe_get_full_fp32_param(nn.Parameter(torch.ones(2))),
        "no gradient": lambda: utils.safe_set_full_grad(parameter, torch.ones(9, WIDTH)),
        "size": lambda: utils.safe_set_full_fp32_param(parameter, torch.ones(9, WIDTH + 1)),
        "turned": lambda: utils.safe_set_full_fp32_param(parameter, torch.ones(WIDTH, 9)),
        "part of a whole": lambda: utils.safe_set_local_fp32_param(parameter, torch.ones(9 * WIDTH)),
    }
    said = {}
    for name, ask in asks.items():
        try:
            ask()
        except shardwell.ShardwellError as error:
            said[name] = str(error)
    return said


def test_what_cannot_be_asked_for_says_why(ranks: Ranks) -> None:
    for stage in (0, 2):
        said = ranks.run(2, refusals, stage)[0]
        assert "does not belong" in said["foreign"]
        assert "call backward first" in said["no gradient"]
        assert "(9, 5)" in said["size"]
        assert "safe_set_full_fp32_param" in said["part of a whole"]


def test_a_turned_value_is_refused(ranks: Ranks) -> None:
    assert "(9, 5)" in ranks.run(2, refusals, 1)[0].get("turned", "")


# -------------------------------------------------------------------------------------------------------- state dicts


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
    return {(stage, rank0_only): states(stage, rank0_only) for stage in STAGES for rank0_only in (False, True)}


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


# --------------------------------------------------------------------------------------------------------- divergence


def one_asks(stage: int, what: str, warm_up: int) -> tuple[str, float]:
    """Rank 0 reads something while the others train on."""
    engine = initialize(stage, shardwell={"divergence_timeout": 1.0})
    for step in range(warm_up):
        backward(engine, step)
        engine.step()
    parameter = engine.module.blocks[0][0].weight
    start = time.monotonic()
    try:
        if engine.global_rank == 0:
            if what == "state":
                utils.safe_get_full_optimizer_state(parameter, "exp_avg")
            elif what == "state dict":
                engine.state_dict()
            else:
                utils.safe_get_full_fp32_param(parameter)
        backward(engine, warm_up)
        engine.step()
    except shardwell.ShardwellError as error:
        return type(error).__name__, time.monotonic() - start
    return "", time.monotonic() - start


@pytest.mark.parametrize(
    ("stage", "what", "warm_up"),
    [(0, "state", 1), (1, "master", 0), (1, "master", 1), (2, "state", 0), (3, "state dict", 0), (3, "state dict", 1)],
)
def test_a_rank_that_asks_alone_gets_an_error_and_no_hang(ranks: Ranks, stage: int, what: str, warm_up: int) -> None:
    answers = ranks.run(2, one_asks, stage, what, warm_up, limit=30)
    errors = [error for error, _ in answers]
    assert "DivergenceError" in errors
    assert set(errors) <= {"DivergenceError", "PeerError"}
    assert all(seconds < 12 for _, seconds in answers)
