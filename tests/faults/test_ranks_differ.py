"""Ranks that differ in one thing are told so, by name, before anything is trained; honest differences are none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwell
from shardwell.engine import consistency
from shardwell.memory import Device, MemoryStats, TemporaryBuffers
from shardwell.parallel import Agreement, Collectives, TrafficStats
from shardwell.parallel.mesh import world_mesh
from tests.support.models import Gpt, batches, share, zero
from tests.support.ranks import Ranks


class Logger(nn.Module):
    """A module without parameters, for the first rank."""


class AdamW(torch.optim.AdamW):
    """An optimizer with the name of torch's and a step of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class HiddenConfig:
    """The configuration of a model, as Transformers has it."""

    def __init__(self, hidden_act: str) -> None:
        self.hidden_act = hidden_act

    def to_dict(self) -> dict[str, Any]:
        return {"hidden_act": self.hidden_act, "_name_or_path": f"/rank{dist.get_rank()}", "rope": {"base": 1.0}}


class Small(nn.Module):
    """Two layers, a dropout and a buffer."""

    def __init__(
        self,
        width: int = 8,
        dtype: torch.dtype = torch.float32,
        scales: int = 1,
        drop: float = 0.0,
        logs: bool = False,
        act: str = "relu",
    ) -> None:
        super().__init__()
        self.act, self.config = getattr(torch, act), HiddenConfig(act)
        self.dropout = nn.Dropout(drop)
        if logs:
            self.logger = Logger()
        self.up = nn.Linear(4, width, dtype=dtype)
        self.down = nn.Linear(width, 1, dtype=dtype)
        self.register_buffer("scale", torch.ones(scales, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.act(self.dropout(self.up(x)))) * self.scale).square().mean()


def _optimizer(model: nn.Module, kind: str = "AdamW", **options: Any) -> torch.optim.Optimizer:
    found = AdamW if kind == "own AdamW" else getattr(torch.optim, kind)
    made: torch.optim.Optimizer = found(model.parameters(), **{"lr": 0.1, **options})
    return made


def train(differs: dict[str, Any], stage: int = 2, steps: int = 2, who: int = 1, **base: Any) -> dict[str, Any]:
    """Rank `who` differs from the others in these things; `base` is what all of them have."""
    mine = differs if dist.get_rank() == who else base
    torch.manual_seed(0)
    model = Small(**mine.get("model", {}))
    if mine.get("frozen"):
        model.up.bias.requires_grad_(False)
    if mine.get("act"):
        model.config.hidden_act = mine["act"]
    model.train(mine.get("trains", True))
    config = zero(stage, **{"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, **mine.get("config", {})})
    given = _optimizer(model, **mine["optimizer"]) if "optimizer" in mine else None
    numerics: Any = mine.get("numerics", contextlib.nullcontext)
    versions = mock.patch.object(consistency, "__version__", mine.get("version", consistency.__version__))
    data = TensorDataset(torch.ones(8, 4))
    loader = DataLoader(data, batch_size=mine.get("batch", 2))
    try:
        with versions, numerics():
            engine, *_ = shardwell.initialize(model=model, optimizer=given, config=config, training_data=loader)
        for _ in range(steps):
            engine.backward(engine(torch.ones(2, 4, dtype=model.up.weight.dtype)))
            engine.step()
    except shardwell.ShardwellError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": "", "text": ""}


@contextlib.contextmanager
def with_medium_matmuls() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def with_autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "another optimizer": ({"optimizer": {"kind": "SGD"}}, "optimizer's class is SGD on rank 1 and AdamW on rank 0"),
    "another of the same name": ({"optimizer": {"kind": "own AdamW"}}, "test_ranks_differ.AdamW with step"),
    "its mode": ({"trains": False}, "module '(root)' is Small, act=relu in eval mode on rank 1 and Small, act=relu on"),
    "a function of torch": ({"model": {"act": "tanh"}}, "is Small, act=tanh on rank 1 and Small, act=relu on rank 0"),
    "an activation by name": ({"act": "silu"}, "config of the model: hidden_act is 'silu' on rank 1 and 'relu' on"),
    "another learning rate": ({"optimizer": {"lr": 0.2}}, "optimizer's lr is 0.2 on rank 1 and 0.1 on rank 0"),
    "other betas": ({"optimizer": {"betas": (0.8, 0.9)}}, "betas is (0.8, 0.9) on rank 1 and (0.9, 0.999) on rank 0"),
    "clipping": ({"config": {"gradient_clipping": 0.5}}, "gradient_clipping is 0.5 on rank 1 and 0.0 on rank 0"),
    "accumulation": (
        {"config": {"gradient_accumulation_steps": 2}},
        "gradient_accumulation_steps is 2 on rank 1 and 1 on rank 0",
    ),
    "a stage": ({"config": {"zero_optimization": {"stage": 1}}}, "stage is 1 on rank 1 and 2 on rank 0"),
    "precision": ({"config": {"bf16": {"enabled": True}}}, "bf16.enabled is true on rank 1 and false on rank 0"),
    "a width": ({"model": {"width": 16}}, "parameter 'up.weight' is float32 [16, 4]"),
    "a dtype": ({"model": {"dtype": torch.float64}}, "parameter 'up.weight' is float64 [8, 4]"),
    "a buffer": ({"model": {"scales": 3}}, "buffer scale is float32 [3] on rank 1 and float32 [1] on rank 0"),
    "what is frozen": ({"frozen": True}, "parameter 'up.bias' is float32 [8], frozen"),
    "a dropout": (
        {"model": {"drop": 0.5}},
        "module 'dropout' is Dropout(p=0.5, inplace=False) on rank 1 and Dropout(p=0.0",
    ),
    "precision of matmuls": (
        {"numerics": with_medium_matmuls},
        "torch's float32 matmul precision is medium on rank 1 and highest on rank 0",
    ),
    "autocast": ({"numerics": with_autocast}, "torch's autocast on cpu is bfloat16 on rank 1 and off on rank 0"),
    "a version": ({"version": "0.0.9"}, "version of shardwell is 0.0.9 on rank 1 and"),
    "a batch size": ({"batch": 4}, "train_micro_batch_size_per_gpu is 4 on rank 1 and 2 on rank 0"),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_rank_that_differs_in_one_thing_is_named_with_what_it_has(ranks: Ranks, what: str) -> None:
    differs, words = DIFFERENCES[what]
    for answer in ranks.run(2, train, differs):
        assert answer["error"] == "DivergenceError", answer["text"]
        assert words in answer["text"]


def test_a_ratio_with_its_default_on_one_rank_alone_is_a_difference(ranks: Ranks) -> None:
    """Left out, it lets state of the first units stay on a device that has room."""
    left_out, written = (
        {"config": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", **ratio}}}}
        for ratio in ({}, {"ratio": 1.0})
    )
    for answer in ranks.run(2, train, written, **left_out):
        assert answer["error"] == "DivergenceError", answer["text"]
        assert "zero_optimization.offload_optimizer.ratio is 1.0 on rank 1 and left out on rank 0" in answer["text"]


@pytest.mark.parametrize("who", [0, 2])
def test_the_one_of_three_that_differs_is_named_whoever_it_is(ranks: Ranks, who: int) -> None:
    rest = ", ".join(str(rank) for rank in range(3) if rank != who)
    for answer in ranks.run(3, train, {"config": {"gradient_clipping": 0.5}}, who=who):
        assert f"gradient_clipping is 0.5 on rank {who} and 0.0 on ranks {rest}" in answer["text"]


HONEST: dict[str, dict[str, Any]] = {
    "prints": {"config": {"steps_per_print": 1}},
    "has another drive": {"config": {"zero_optimization": {"offload_optimizer": {"nvme_path": "/mnt/other"}}}},
    "has less memory": {"config": {"shardwell": {"memory": {"host": 1 << 30}}}},
    "writes a key without effect": {"config": {"dump_state": True}},
    "times its steps": {"config": {"wall_clock_breakdown": True, "comms_logger": {"enabled": True}}},
    "logs by a module of its own": {"model": {"logs": True}},
    "makes the same optimizer in code": {"optimizer": {"weight_decay": 0.0}},
}


@pytest.mark.parametrize("what", HONEST)
def test_a_rank_may_differ_in_what_is_its_own(ranks: Ranks, what: str) -> None:
    assert [answer["text"] for answer in ranks.run(2, train, HONEST[what])] == ["", ""]


def test_replicas_are_not_updated_by_other_kernels_than_the_first(ranks: Ranks) -> None:
    """At stage 0 every rank updates the whole model itself, and fused steps round otherwise."""
    for answer in ranks.run(2, train, {"optimizer": {"fused": False, "weight_decay": 0.0}}, stage=0):
        assert answer["error"] == "DivergenceError"
        assert "optimizer's fused is False on rank 1 and True on rank 0" in answer["text"]


def fail_to_initialize() -> dict[str, Any]:
    """Rank 1 cannot read its configuration."""
    config = {"zero_optimization": {"stage": 7 if dist.get_rank() == 1 else 2}}
    try:
        shardwell.initialize(model=Small(), config=config)
    except shardwell.ShardwellError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": "", "text": ""}


def test_an_error_of_one_rank_in_initialize_is_told_to_all(ranks: Ranks) -> None:
    first, second = ranks.run(2, fail_to_initialize)
    assert (first["error"], second["error"]) == ("PeerError", "ConfigError")
    assert "rank 1 failed first" in first["text"]
    assert "zero_optimization.stage" in first["text"]


def change_a_rate(stage: int, name: str, groups: int, late: bool = False, value: float | bool = 0.05) -> dict[str, Any]:
    """After two steps rank 1 changes something alone. `late`: sums are read as from a GPU."""
    torch.manual_seed(0)
    model = Gpt()
    parameters = list(model.parameters())
    cut = len(parameters) // groups
    split = [{"params": parameters[n * cut : (n + 1) * cut if n < groups - 1 else None]} for n in range(groups)]
    optimizer = torch.optim.AdamW(split, lr=0.1)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage))
    if late:
        engine.optimizer._grad_norm.summed[0]._reads_later = True
    taken = 0
    try:
        for batch in batches(5, 4):
            if taken == 2 and dist.get_rank() == 1:
                engine.optimizer.param_groups[-1][name] = value
            engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
            engine.step()
            taken += 1
    except shardwell.ShardwellError as error:
        return {"error": type(error).__name__, "text": str(error), "taken": taken}
    return {"error": "", "text": "", "taken": taken}


@pytest.mark.parametrize(("name", "groups"), [("lr", 1), ("lr", 2), ("weight_decay", 2)])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rate_that_changes_on_one_rank_stops_the_step(ranks: Ranks, stage: int, name: str, groups: int) -> None:
    place = " of parameter group 1" if groups == 2 else ""
    for answer in ranks.run(2, change_a_rate, stage, name, groups):
        assert answer["error"] == "DivergenceError"
        assert f"optimizer's {name}{place} is 0.05 on rank 1 and" in answer["text"]
        assert answer["taken"] == 2


OPTIONS = {"eps": 0.05, "maximize": True, "amsgrad": True}


@pytest.mark.parametrize("name", OPTIONS)
def test_any_option_that_changes_on_one_rank_stops_the_step(ranks: Ranks, name: str) -> None:
    for answer in ranks.run(2, change_a_rate, 0, name, 1, value=OPTIONS[name]):
        assert answer["error"] == "DivergenceError"
        assert f"optimizer's {name} is {float(OPTIONS[name])} on rank 1 and" in answer["text"]
        assert answer["taken"] == 2


def test_where_the_host_does_not_wait_for_sums_rates_are_compared_a_step_later(ranks: Ranks) -> None:
    for answer in ranks.run(2, change_a_rate, 2, "lr", 1, True):
        assert answer["error"] == "DivergenceError"
        assert "optimizer's lr is 0.05 on rank 1 and 0.1 on rank 0" in answer["text"]
        assert answer["taken"] == 3


def follow_a_schedule() -> list[float]:
    """All ranks follow the same schedule, which changes the rate at each step."""
    torch.manual_seed(0)
    model = Gpt()
    params = {"warmup_max_lr": 0.1, "warmup_num_steps": 5, "warmup_type": "linear"}
    config = zero(2, optimizer={"type": "AdamW"}, scheduler={"type": "WarmupLR", "params": params})
    engine, *_ = shardwell.initialize(model=model, config=config)
    rates = []
    for batch in batches(5, 4):
        engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
        engine.step()
        rates += engine.get_lr()
    return rates


def test_a_schedule_that_all_ranks_follow_is_no_difference(ranks: Ranks) -> None:
    first, second = ranks.run(2, follow_a_schedule)
    assert first == second
    assert len(set(first)) > 3


def load_otherwise(folder: str, what: str) -> dict[str, str]:
    """Rank 1 sets another rate, or asks for something else, before it loads what all have saved."""
    torch.manual_seed(0)
    model = Small()
    engine, *_ = shardwell.initialize(model=model, optimizer=_optimizer(model), config=zero(2))
    engine.save_checkpoint(folder)
    is_odd = dist.get_rank() == 1
    if is_odd and what == "lr":
        engine.optimizer.param_groups[0]["lr"] = 0.2
    try:
        engine.load_checkpoint(folder, load_optimizer_states=not (is_odd and what == "with_optimizer"))
    except shardwell.ShardwellError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": "", "text": ""}


@pytest.mark.parametrize(
    ("what", "words"),
    [("lr", "lr is 0.2 on rank 1"), ("with_optimizer", "with_optimizer is False on rank 1"), ("", "")],
)
def test_ranks_that_load_in_different_ways_are_told_so(ranks: Ranks, tmp_path: Path, what: str, words: str) -> None:
    for answer in ranks.run(2, load_otherwise, str(tmp_path), what):
        assert answer["error"] == ("DivergenceError" if what else "")
        assert words in answer["text"]


def widen_one_layer(stage: int) -> dict[str, Any]:
    """After a step rank 1's model gets a wider layer than the others'."""
    torch.manual_seed(0)
    model = Small()
    engine, *_ = shardwell.initialize(model=model, optimizer=_optimizer(model), config=zero(stage))
    engine.backward(engine(torch.ones(2, 4)))
    engine.step()
    width = 12 if dist.get_rank() == 1 else 10
    model.up, model.down = nn.Linear(4, width), nn.Linear(width, 1)
    try:
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()
    except shardwell.ShardwellError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": "", "text": ""}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_that_changes_in_another_way_on_one_rank_is_named(ranks: Ranks, stage: int) -> None:
    for answer in ranks.run(2, widen_one_layer, stage):
        assert answer["error"] == "DivergenceError"
        assert "is float32 [1, 12] in unit '(root)' on rank 1 and float32 [1, 10]" in answer["text"]


def gather_unequal(dtypes: bool) -> dict[str, str]:
    """Rank 1 gathers more than the others, or numbers of another kind, under the same name."""
    home = Device(torch.device("cpu"))
    comm = Collectives(world_mesh(home.torch_device), home, TrafficStats(), TemporaryBuffers(home, MemoryStats()))
    comm.agreement = Agreement(comm.rank_group, 5.0, comm.abort_links)
    is_odd = dist.get_rank() == 1
    numel, dtype = (8, torch.float64) if is_odd and dtypes else (12 if is_odd else 8, torch.float32)
    try:
        comm.all_gather(torch.zeros(numel, dtype=dtype), "GATHER all").wait()
    except shardwell.ShardwellError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": "", "text": ""}


@pytest.mark.parametrize("dtypes", [False, True], ids=["sizes", "dtypes"])
def test_a_collective_of_another_size_or_dtype_is_an_error_with_both(ranks: Ranks, dtypes: bool) -> None:
    odd = "(8 x float64)" if dtypes else "(12 x float32)"
    for answer in ranks.run(2, gather_unequal, dtypes):
        assert answer["error"] == "DivergenceError"
        assert f"GATHER all {odd}" in answer["text"]
        assert "GATHER all (8 x float32)" in answer["text"]
