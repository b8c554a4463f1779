"""What `initialize` decides where the file leaves something open or says it twice, and what it says once."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import shardwell
from tests.support.models import Gpt, batches, whole_parameters, zero
from tests.support.ranks import Ranks

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}


def start(config: dict[str, Any], model: nn.Module | None = None, **given: Any) -> shardwell.Engine:
    return shardwell.initialize(model=model or Gpt(), config=config, device="cpu", **given).engine


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="shardwell")
    return caplog


def records(log: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno == level]


def test_rank_0_says_it_in_one_record_for_what_hurts_and_one_for_the_rest(log: pytest.LogCaptureFixture) -> None:
    engine = start(zero(1, optimizer=ADAMW, zero_optimization={"overlap_comm": True}))
    (hurts,), (rest,) = records(log, logging.WARNING), records(log, logging.INFO)
    assert "nothing is clipped" in hurts
    assert "without effect: zero_optimization.overlap_comm (communication always overlaps compute)" in rest
    for sentence in engine.startup_report.splitlines():
        assert (sentence in hurts) != (sentence in rest)


def test_what_hurts_nobody_is_no_warning(log: pytest.LogCaptureFixture) -> None:
    start(zero(3, optimizer=ADAMW, gradient_clipping=1.0, bf16={"enabled": True}))
    assert records(log, logging.WARNING) == []
    assert len(records(log, logging.INFO)) == 1


def heard(config: dict[str, Any]) -> tuple[str, int]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardwell")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        engine = start(config)
        engine.backward(engine(batches(1, 2)[0]))
        engine.step()
        return engine.startup_report, len(said)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def test_the_other_ranks_are_silent(ranks: Ranks) -> None:
    first, second = ranks.run(2, heard, zero(3, optimizer=ADAMW, gradient_clipping=1.0))
    assert first == (second[0], 1)
    assert second[1] == 0


# --------------------------------------------------------------------------------------------------- the code wins


def test_an_optimizer_in_the_code_wins_over_the_file_and_that_is_said() -> None:
    model = Gpt()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = start(zero(1, optimizer=ADAMW), model, optimizer=optimizer)
    assert engine.optimizer is not None
    assert engine.optimizer.optimizer is optimizer
    assert "the one that was passed to initialize holds, not AdamW of the file" in engine.startup_report


def test_a_schedule_in_the_code_wins_over_the_file_and_that_is_said() -> None:
    model = Gpt()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = StepLR(optimizer, 1)
    config = zero(1, scheduler={"type": "WarmupLR", "params": {}})
    engine = start(config, model, optimizer=optimizer, lr_scheduler=schedule)
    assert engine.lr_scheduler is schedule
    assert "scheduler: the one that was passed to initialize holds, not WarmupLR of the file" in engine.startup_report


def test_a_schedule_of_the_file_without_an_optimizer_is_left_out_and_that_is_said() -> None:
    engine = start(zero(1, scheduler={"type": "WarmupLR", "params": {}}))
    assert engine.lr_scheduler is None
    assert "scheduler WarmupLR: there is no optimizer, so it is left out" in engine.startup_report


def test_a_schedule_of_the_file_serves_an_optimizer_of_the_code() -> None:
    model = Gpt()
    config = zero(1, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "10"}})
    engine = start(config, model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    assert type(engine.lr_scheduler).__name__ == "WarmupLR"
    assert "passed to initialize" not in engine.startup_report


# -------------------------------------------------------------------------------------------- what is left open

AUTO = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}


@pytest.mark.parametrize(
    ("dtype", "bf16", "fp16"),
    [(torch.bfloat16, True, False), (torch.float16, False, True), (torch.float32, False, False)],
)
def test_precision_auto_is_the_models_own_and_said(
    dtype: torch.dtype, bf16: bool, fp16: bool, log: pytest.LogCaptureFixture
) -> None:
    engine = start(zero(1, optimizer=ADAMW, **AUTO), Gpt().to(dtype))
    assert (engine.config.bf16.enabled, engine.config.fp16.enabled) == (bf16, fp16)
    short = str(dtype).removeprefix("torch.")
    said = f"bf16.enabled {str(bf16).lower()} (the model's parameters are {short})"
    assert said in records(log, logging.WARNING)[0]


def test_a_bf16_model_under_auto_trains_as_with_bf16_written_down() -> None:
    def trained(**config: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        engine = start(zero(1, optimizer=ADAMW, **config), Gpt().bfloat16())
        for batch in batches(3, 4):
            engine.backward(engine(batch))
            engine.step()
        return whole_parameters(engine.module)

    expected, found = trained(bf16={"enabled": True}), trained(**AUTO)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_auto_beside_a_precision_that_is_written_down_is_off() -> None:
    engine = start(zero(1, optimizer=ADAMW, bf16={"enabled": True}, fp16={"enabled": "auto"}), Gpt().half())
    assert (engine.config.bf16.enabled, engine.config.fp16.enabled) == (True, False)


def test_a_16_bit_model_without_masters_is_told() -> None:
    engine = start(zero(1, optimizer=ADAMW), Gpt().bfloat16())
    assert "parameters are bfloat16 and neither bf16 nor fp16 is enabled: there are no fp32 masters" in (
        engine.startup_report
    )
    assert "masters" not in start(zero(1, optimizer=ADAMW, bf16={"enabled": True}), Gpt().bfloat16()).startup_report


def test_arguments_that_are_auto_are_said_in_numbers() -> None:
    params = {"lr": "auto", "betas": "auto", "weight_decay": 0.1}
    engine = start(zero(1, optimizer={"type": "AdamW", "params": params}))
    assert "optimizer: betas (0.9, 0.999), lr 0.001" in engine.startup_report


# ------------------------------------------------------------------------------------------- arguments as strings


def test_a_rate_that_is_a_string_is_its_number() -> None:
    engine = start(zero(1, optimizer={"type": "AdamW", "params": {"lr": "1e-3", "betas": ["0.9", "0.95"]}}))
    assert engine.get_lr() == [1e-3]
    assert engine.optimizer is not None
    assert engine.optimizer.param_groups[0]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("params", [{"lr": "fast"}, {"lr": -1}, {"betas": [0.9, 7]}])
def test_an_argument_that_the_optimizer_refuses_is_an_error_of_the_configuration(params: dict[str, Any]) -> None:
    with pytest.raises(shardwell.ConfigError, match=r"optimizer\.params\.(lr|betas): expected "):
        start(zero(1, optimizer={"type": "AdamW", "params": params}))


DEEPSPEEDS = {"torch_adam": True, "adam_w_mode": True, "bias_correction": True, "set_grad_none": True}


def test_arguments_of_deepspeeds_kernels_that_ask_for_the_usual_are_taken() -> None:
    params = {"lr": 1e-3, **DEEPSPEEDS, "max_grad_norm": 0.0, "fp32_optimizer_states": True, "amsgrad": False}
    start(zero(1, optimizer={"type": "Adam", "params": params}))
    with pytest.raises(shardwell.ConfigError, match=r"max_grad_norm: 1\.0: .*write gradient_clipping"):
        start(zero(1, optimizer={"type": "Adam", "params": {"max_grad_norm": 1.0}}))
    with pytest.raises(shardwell.ConfigError, match="bias_correction: False: AdamW has only True here"):
        start(zero(1, optimizer={"type": "AdamW", "params": {"bias_correction": False}}))


# -------------------------------------------------------------------------------------------- where bytes rest


def report(config: dict[str, Any], width: int = 16) -> tuple[str, dict[str, int]]:
    model = Gpt(width=width)
    engine = start(config, model)
    engine.backward(engine(batches(1, 2)[0]))
    engine.step()
    sizes: dict[str, int] = {}
    for (state, _, tier), size in engine.memory().now.items():
        sizes[f"{state.value} {tier.value}"] = sizes.get(f"{state.value} {tier.value}", 0) + size
    return engine.startup_report, sizes


def said(text: str, what: str, where: str) -> float:
    """Bytes that the report has of something somewhere."""
    found = re.search(rf"on each rank: .*{what} (?:[^;]*, )?([\d.]+) KiB on {where}", text)
    assert found is not None, text
    return 1024 * float(found.group(1))


def test_the_bytes_that_are_said_are_those_that_rest_after_a_step(ranks: Ranks) -> None:
    for text, sizes in ranks.run(2, report, zero(3, optimizer=ADAMW, gradient_clipping=1.0)):
        assert said(text, "parameters", "the device") == pytest.approx(sizes["parameters device"], rel=0.02)
        assert said(text, "optimizer state", "the device") == pytest.approx(sizes["optimizer device"], rel=0.02)
        gradients = said(text, "gradients and secondary shards until the step", "the device")
        assert gradients == pytest.approx(sizes["parameters device"], rel=0.02)


def test_bytes_on_the_host_are_said_to_be_there(ranks: Ranks) -> None:
    block = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    config = zero(3, optimizer=ADAMW, zero_optimization=block, bf16={"enabled": True})
    for text, sizes in ranks.run(2, report, config):
        assert said(text, "optimizer state", "the host") == pytest.approx(sizes["optimizer host"], rel=0.02)
        assert said(text, "parameters", "the host") == pytest.approx(sizes["parameters host"], rel=0.02)


def on_disk(folder: Path, **param: Any) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    return zero(3, optimizer=ADAMW, zero_optimization={"offload_optimizer": nvme, "offload_param": {**nvme, **param}})


def test_a_published_file_for_drives_of_which_nothing_reaches_the_drive_says_so(ranks: Ranks, tmp_path: Path) -> None:
    for text, _ in ranks.run(2, report, on_disk(tmp_path, max_in_cpu=1e9)):
        assert 'offload_param.device is "nvme", but no parameter is stored on disk' in text
        assert "max_in_cpu keeps up to 1,000,000,000 elements of each rank on the host" in text
    for text, _ in ranks.run(2, report, on_disk(tmp_path, max_in_cpu=0)):
        assert "max_in_cpu" not in text
        assert "on disk" in text


def test_stage_3_that_gathers_nothing_says_so(ranks: Ranks) -> None:
    threshold = {"stage3_param_persistence_threshold": 100_000}
    for text, _ in ranks.run(2, report, zero(3, optimizer=ADAMW, zero_optimization=threshold)):
        assert "stage 3, but all parameters are below stage3_param_persistence_threshold 100000" in text
    threshold = {"stage3_param_persistence_threshold": "auto"}
    for text, _ in ranks.run(2, report, zero(3, optimizer=ADAMW, zero_optimization=threshold)):
        assert "nothing is all-gathered" not in text


def test_one_rank_is_said_to_have_nobody_to_split_with() -> None:
    assert "one rank: stage 2 has no other rank to shard over" in start(zero(2)).startup_report
