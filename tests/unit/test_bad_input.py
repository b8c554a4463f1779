"""Bad input gets one clear sentence, soon: files that are none, numbers that are none, arguments that nobody takes."""

from __future__ import annotations

import inspect
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwell
from shardwell.config import Config, OptimizerConfig, load
from shardwell.config.arguments import check
from shardwell.config.optimizers import NOT_ELEMENTWISE, RULES, checked
from shardwell.config.schedules import NEEDED
from shardwell.config.schedules import RULES as SCHEDULES
from shardwell.optim.lamb import Lamb
from shardwell.optim.lion import Lion
from shardwell.optim.lr_schedules import KINDS
from shardwell.optim.muon import Muon
from tests.support.patience import soon

SOON = 10.0  # seconds


def refusal(config: Any, **options: Any) -> str:
    """What the error says; its first line names the number of problems."""
    begin = time.monotonic()
    with pytest.raises(shardwell.ConfigError) as caught:
        load(config, **options)
    assert time.monotonic() - begin < soon(SOON)
    str(caught.value).encode()  # it can be printed
    return str(caught.value)


def with_params(kind: str = "AdamW", **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


# ------------------------------------------------------------------------------------------------------ optimizers


@pytest.mark.parametrize("kind", RULES)
def test_the_arguments_that_are_known_are_those_of_the_optimizer(kind: str) -> None:
    own = {"Lamb": Lamb, "Lion": Lion, "Muon": Muon}
    signature = inspect.signature(own.get(kind) or getattr(torch.optim, kind))
    assert set(RULES[kind]) == set(signature.parameters) - {"params"}


def test_every_optimizer_of_torch_is_known_or_refused() -> None:
    kinds = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)} - {"Optimizer"}
    assert kinds <= {*RULES, *NOT_ELEMENTWISE}


@pytest.mark.parametrize("kind", RULES)
def test_the_defaults_of_an_optimizer_are_right(kind: str) -> None:
    own = {"Lamb": Lamb, "Lion": Lion, "Muon": Muon}
    signature = inspect.signature(own.get(kind) or getattr(torch.optim, kind))
    defaults = {name: p.default for name, p in signature.parameters.items() if name != "params"}
    clean, problems = checked(kind, json.loads(json.dumps(defaults)))
    assert problems == []
    assert {name: tuple(v) if isinstance(v, list) else v for name, v in clean.items()} == defaults


def test_numbers_in_quotes_are_numbers() -> None:
    found = load(with_params(lr="3e-5", betas=["0.9", 0.95], weight_decay="0"))
    assert found.optimizer is not None
    assert found.optimizer.params == {"lr": 3e-5, "betas": [0.9, 0.95], "weight_decay": 0.0}


def test_numbers_in_quotes_are_numbers_in_a_config_of_python_too() -> None:
    found = load(Config(optimizer=OptimizerConfig(type="AdamW", params={"lr": "3e-5"})))
    assert found.optimizer is not None
    assert found.optimizer.params == {"lr": 3e-5}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "null": (with_params(lr=None), "optimizer.params.lr: expected a number, found null; remove it"),
    "a word": (with_params(lr="fast"), 'optimizer.params.lr: expected a number, found "fast"'),
    "true": (with_params(lr=True), "optimizer.params.lr: expected a number, found true"),
    "infinite": (with_params(lr=float("inf")), "optimizer.params.lr: expected a finite number"),
    "nan": (with_params(lr=float("nan")), "optimizer.params.lr: expected a finite number"),
    "too large": (with_params(lr=10**400), "optimizer.params.lr: expected a finite number"),
    "negative": (with_params(weight_decay=-0.1), "optimizer.params.weight_decay: expected at least 0, found -0.1"),
    "a list": (with_params(lr=[0.1]), "optimizer.params.lr: expected a number, found [0.1]"),
    "one beta": (with_params(betas=[0.9]), "optimizer.params.betas: expected a list of 2 numbers, found [0.9]"),
    "three betas": (with_params(betas=[0.9, 0.9, 0.9]), "optimizer.params.betas: expected a list of 2 numbers"),
    "no betas": (with_params(betas=0.9), "optimizer.params.betas: expected a list of 2 numbers, found 0.9"),
    "a beta of 1": (with_params(betas=[0.9, 1.0]), "optimizer.params.betas: expected 2 numbers of at least 0"),
    "a beta that is none": (with_params(betas=[None, 0.9]), "optimizer.params.betas: expected a number"),
    "a typo": (with_params(weigth_decay=0.1), "AdamW does not take it; did you mean weight_decay?"),
    "of another": (with_params(momentum=0.9), "optimizer.params.momentum: AdamW does not take it; it takes "),
    "nesterov": (with_params("SGD", nesterov=True), "optimizer.params.nesterov: true needs a momentum above 0"),
    "differentiable": (
        with_params(differentiable=True),
        "optimizer.params.differentiable: true needs steps that autograd records, and none are",
    ),
    "etas": (with_params("Rprop", etas=[2, 3]), "optimizer.params.etas: expected a number between 0 and 1"),
    "no optimizer": (with_params("AdaBest"), 'optimizer.type: "AdaBest" is not known; known are ASGD, Adadelta'),
    "whole tensors": (with_params("LBFGS"), 'optimizer.type: "LBFGS" is not elementwise'),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_argument_that_the_optimizer_would_not_take_is_refused_by_load(what: str) -> None:
    config, words = WRONG[what]
    text = refusal(config)
    assert words in text
    assert "1 problem in" in text
    assert words in refusal(json.dumps(config)) or what in ("nan",)


def test_all_problems_are_told_at_once() -> None:
    text = refusal({**with_params(lr=-1, betas=[1], eps="x", foo=3), "gradient_clipping": -2})
    assert "5 problems" in text


def test_a_block_that_the_code_replaces_is_not_checked() -> None:
    assert load(with_params("Mine", lr="x"), optimizer_given=True).optimizer is not None


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "Lion", "Lamb", "Muon", "Adagrad"])
def test_what_is_accepted_is_taken_by_initialize(kind: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    config = {**with_params(kind, lr="1e-3", weight_decay=0.01), "zero_optimization": {"stage": 1}}
    engine, *_ = shardwell.initialize(model=model, config=config, device="cpu")
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    engine.destroy()


@pytest.mark.parametrize("kind", ["AdamW", "RMSprop"])
def test_an_optimizer_for_graphs_of_cuda_is_refused_on_the_cpu(kind: str) -> None:
    with pytest.raises(shardwell.ConfigError, match=r"optimizer\.params\.capturable: true is for graphs of CUDA"):
        shardwell.initialize(model=torch.nn.Linear(4, 4), config=with_params(kind, capturable=True), device="cpu")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("warmup_max_lr", 10**400, "scheduler.params.warmup_max_lr: expected a finite number"),
        ("warmup_num_steps", 10**400, "scheduler.params.warmup_num_steps: expected a whole number below 2**63"),
    ],
)
def test_numbers_of_a_schedule_that_no_float_holds_are_refused(name: str, value: int, words: str) -> None:
    config = {**with_params(lr=0.1), "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, name: value}}}
    with pytest.raises(shardwell.ConfigError, match=words.replace(".", r"\.").replace("*", r"\*")):
        shardwell.initialize(model=torch.nn.Linear(4, 4), config=config, device="cpu")


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_arguments_that_are_known_are_those_of_the_schedule(kind: str) -> None:
    parameters = dict(list(inspect.signature(KINDS[kind]).parameters.items())[1:])
    assert set(SCHEDULES[kind]) == set(parameters)
    assert set(NEEDED.get(kind, ())) == {name for name, p in parameters.items() if p.default is p.empty}
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    clean, problems = check("scheduler", kind, SCHEDULES[kind], defaults)
    assert (clean, problems) == (defaults, [])


def with_schedule(kind: str, **params: Any) -> dict[str, Any]:
    return {**with_params(lr=0.1), "scheduler": {"type": kind, "params": params}}


def test_a_schedules_arguments_are_refused_by_load_all_at_once() -> None:
    text = refusal(with_schedule("WarmupDecayLR", total_num_stps=9, warmup_type="x", warmup_max_lr=-1))
    assert "4 problems in" in text
    assert "total_num_stps: WarmupDecayLR does not take it; did you mean total_num_steps?" in text
    assert "total_num_steps: missing; WarmupDecayLR has no default for it" in text
    assert "scheduler.params.warmup_max_lr: expected at least 0, found -1" in text


def test_what_a_schedule_leaves_to_the_trainer_is_no_problem_of_the_file() -> None:
    found = load(with_schedule("WarmupDecayLR", total_num_steps="auto", warmup_num_steps="2000"))
    assert found.scheduler is not None
    assert found.scheduler.params == {"warmup_num_steps": 2000}
    assert load(found).scheduler == found.scheduler
    config = with_schedule("WarmupDecayLR", total_num_steps="auto")
    with pytest.raises(shardwell.ConfigError, match="total_num_steps: missing"):
        shardwell.initialize(model=torch.nn.Linear(4, 4), config=config, device="cpu")


def test_nobody_reads_the_schedule_of_the_file_where_the_code_has_one() -> None:
    config = with_schedule("WarmupLR", warmup_num_steps=-1)

    def constant(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    shardwell.initialize(model=torch.nn.Linear(4, 4), lr_scheduler=constant, config=config, device="cpu")


# ---------------------------------------------------------------------------------------------------------- values

NONSENSE: dict[str, tuple[dict[str, Any], str]] = {
    "ratio 2": ({"zero_optimization": {"offload_optimizer": {"ratio": 2}}}, "ratio: expected a number from 0 to 1"),
    "ratio -1": ({"zero_optimization": {"offload_optimizer": {"ratio": -1}}}, "ratio: expected a number from 0 to 1"),
    "a batch of 10^400": ({"train_micro_batch_size_per_gpu": 10**400}, "expected a whole number below 2**63"),
    "a batch of 1e300": ({"train_micro_batch_size_per_gpu": 1e300}, "expected a whole number below 2**63"),
    "a bucket of 1e300": ({"zero_optimization": {"reduce_bucket_size": 1e300}}, "a whole number below 2**63"),
    "clipping at 10^400": ({"gradient_clipping": 10**400}, "gradient_clipping: expected a finite number"),
    "printing every 10^400": ({"steps_per_print": 10**400}, "steps_per_print: expected a whole number below 2**63"),
    "a scale of 2**100000": ({"fp16": {"initial_scale_power": 100000}}, "initial_scale_power: expected at most 127"),
    "NUL in a path": (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/a\0b"}}},
        "expected a path without a NUL character",
    ),
    "a surrogate in a path": (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/a\ud800"}}},
        "expected a path without lone surrogates",
    ),
    "a surrogate in a key": ({"\ud800": 1}, "unknown key"),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_a_value_that_makes_no_sense_is_refused(what: str) -> None:
    config, words = NONSENSE[what]
    assert words in refusal(config)


def test_a_message_can_be_printed_whatever_the_names_in_it_are() -> None:
    config = {"zero_optimization": {"stage": 3, "leaf_module": {"names": ["\ud800\0"]}}}
    with pytest.raises(shardwell.ConfigError) as caught:
        shardwell.initialize(model=torch.nn.Linear(4, 4), config=config, device="cpu")
    assert rb"module \ud800\0. Its classes" in str(caught.value).encode()


def test_a_second_copy_for_a_single_rank_is_refused() -> None:
    config = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 5}}
    assert "5 ranks cannot hold secondary shards, because there is one rank" in refusal(config, world_size=1)
    assert load(config, world_size=10).zero_optimization.zero_hpz_partition_size == 5


# ----------------------------------------------------------------------------------------------------------- files


def test_forty_thousand_keys_are_refused_soon() -> None:
    text = refusal(json.dumps({f"key_{number}": 1 for number in range(40_000)}))
    assert "40000 problems" in text
    assert "and 39,950 more" in text


def test_forty_thousand_arguments_are_refused_soon() -> None:
    text = refusal(with_params(**{f"key_{number}": 1 for number in range(40_000)}))
    assert "does not take 39990 more" in text


@pytest.mark.parametrize(
    "text", ['{{"train_batch_size": {0}}}', "{{train_batch_size: {0}}}", '{{"train_batch_size": -{0}}}']
)
def test_an_integer_of_five_thousand_digits_is_refused(text: str) -> None:
    assert "a number of 5,00" in refusal(text.format("9" * 5000))


def test_a_pipe_that_nobody_writes_into_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwell.config.source._PIPE_TIMEOUT", 0.5)
    os.mkfifo(tmp_path / "pipe")
    assert "a pipe into which no configuration was written" in refusal(tmp_path / "pipe")


def test_a_pipe_that_somebody_writes_into_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    threading.Thread(target=(tmp_path / "pipe").write_text, args=['{"gradient_clipping": 2}'], daemon=True).start()
    assert load(tmp_path / "pipe").gradient_clipping == 2


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/tmp"])
def test_what_is_no_file_is_refused(path: str) -> None:
    assert "not a file" in refusal(path)


@pytest.mark.parametrize("path", ["a\0b.json", "\ud800.json"])
def test_what_is_no_name_of_a_file_is_refused(path: str) -> None:
    assert "not a valid file name" in refusal(path)


def test_the_root_is_called_so_where_gradients_are_not_finite() -> None:
    model = torch.nn.Linear(4, 1)
    engine, *_ = shardwell.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config={}, device="cpu"
    )
    engine.backward(engine(torch.full((2, 4), float("inf"))).mean())
    with pytest.raises(shardwell.NonFiniteError, match=r"first in unit '\(root\)'"):
        engine.step()
    engine.destroy(whole=False)
