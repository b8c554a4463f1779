"""The small names: accelerator, logger, loaders, arguments, estimates and `runtime.utils`."""

from __future__ import annotations

import argparse
import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwell.compat.deepspeed_api import accelerator, modules
from shardwell.compat.deepspeed_api import logging as logs
from shardwell.compat.deepspeed_api import runtime_names as names
from shardwell.compat.deepspeed_api.arguments import add_config_arguments, config_of
from shardwell.compat.deepspeed_api.initialization import initialize
from shardwell.compat.deepspeed_api.loader import RepeatingLoader
from shardwell.errors import ShardwellError
from shardwell.plan import state_estimates as estimates
from tests.support.ranks import Ranks


def test_the_cpu_is_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = accelerator.CPU_Accelerator()
    assert (cpu.device_name(), cpu.device_name(3), cpu.current_device_name()) == ("cpu", "cpu", "cpu")
    assert cpu.is_available()
    assert cpu.communication_backend_name() == "gloo"
    assert cpu.on_accelerator(torch.ones(1))
    assert torch.bfloat16 in cpu.supported_dtypes()
    assert 0 < cpu.memory_allocated() <= cpu.max_memory_allocated() < cpu.total_memory()
    assert cpu.FloatTensor is torch.FloatTensor
    monkeypatch.setenv("LOCAL_SIZE", "7")
    assert cpu.device_count() == 7
    state = cpu.get_rng_state()
    cpu.manual_seed_all(3)
    first = torch.rand(2)
    cpu.manual_seed(3)
    assert torch.equal(torch.rand(2), first)
    cpu.set_rng_state(state)
    with cpu.stream(None), cpu.device(0):
        cpu.synchronize()
    with pytest.raises(AttributeError, match="get_accelerator"):
        cpu.no_such_name  # noqa: B018
    assert not hasattr(cpu, "no_such_name")
    cpu.set_compile_backend("eager")
    assert cpu.get_compile_backend() == "eager"
    with pytest.raises(ValueError, match="nope"):
        cpu.set_compile_backend("nope")


def test_the_choice_of_the_accelerator_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    for named, kind in (("cpu", accelerator.CPU_Accelerator), ("cuda:0", accelerator.CUDA_Accelerator)):
        monkeypatch.setattr(accelerator, "_current", None)
        monkeypatch.setenv("SHARDWELL_DEVICE", named)
        assert type(accelerator.get_accelerator()) is kind
    assert accelerator.get_accelerator().communication_backend_name() == "nccl"
    assert accelerator.get_accelerator().Stream is torch.cuda.Stream
    assert accelerator.get_accelerator().device_name(1) == "cuda:1"
    monkeypatch.setattr(accelerator, "_current", None)
    monkeypatch.setenv("SHARDWELL_DEVICE", "xpu")
    with pytest.raises(ShardwellError, match="xpu"):
        accelerator.get_accelerator()


def test_the_logger_speaks_where_it_is_told_to(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert logs.logger.name == "DeepSpeed"
    with caplog.at_level(logging.INFO, "DeepSpeed"):
        logs.log_dist("to all", ranks=[-1])
        for _ in range(3):
            logs.logger.warning_once("only once")
        logs.print_rank_0("first", force=True)
    assert "to all" in caplog.text
    assert caplog.text.count("only once") == 1
    assert "first" in caplog.text
    before = logs.logger.level
    logs.set_log_level_from_string("error")
    assert logs.get_current_level() == logging.ERROR
    assert not logs.should_log_le("info")
    logs.logger.setLevel(before)
    with pytest.raises(ValueError, match="loud"):
        logs.set_log_level_from_string("loud")
    logs.print_json_dist({"a": 1}, [-1], str(tmp_path / "x.json"))
    rank = dist.get_rank() if dist.is_initialized() else -1  # a test before may have made an engine in this process
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1, "rank": rank}


def test_a_repeating_loader_never_ends_and_an_empty_one_says_so() -> None:
    loader = RepeatingLoader([1, 2, 3])
    assert [next(loader) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    assert len(loader) == 3
    with pytest.raises(ShardwellError, match="empty"):
        next(RepeatingLoader([]))


def test_a_script_takes_deepspeeds_options() -> None:
    parser = add_config_arguments(argparse.ArgumentParser())
    assert config_of(parser.parse_args([])) is None
    found = parser.parse_args(["--deepspeed", "--deepspeed_config", "a.json"])
    assert found.deepspeed
    assert config_of(found) == "a.json"
    assert config_of(parser.parse_args(["--deepscale_config", "b.json"])) == "b.json"


def test_estimates_follow_the_formulas_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    _, device = estimates.estimate_zero2_model_states_mem_needs(1000, 4, 2, cpu_offload=False)
    in_shards = 2 + 8 + 2  # bytes: lower halves of masters, moments, gradients
    assert device == 2000 + in_shards * 1000 // 8
    _, offloaded = estimates.estimate_zero2_model_states_mem_needs(1000, 4, 2)
    assert offloaded == 2000
    host, device, unsharded = estimates.estimate_zero3_model_states_mem_needs(1000, 100, 4, 2, zero_init=True)
    assert device == unsharded == 400
    host_built, *_ = estimates.estimate_zero3_model_states_mem_needs(1000, 100, 4, 2, zero_init=False)
    assert host_built == 4 * 1000 * 4 * 1.5 > host
    model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 2000))
    estimates.estimate_zero2_model_states_mem_needs_all_live(model, 8, 1)
    estimates.estimate_zero3_model_states_mem_needs_all_live(model, 1, 2)
    printed = capsys.readouterr().out
    assert "HW: Setup with 1 node, 8 GPUs per node." in printed
    assert "SW: Model with 3M total params, 2M largest layer params." in printed
    assert printed.count("offload_optimizer=none") == 3
    tied = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    assert estimates.model_to_params(tied) == (9, 9)


def test_calls_items_and_structures() -> None:
    assert names.call_to_str("int") == "int()"
    assert names.call_to_str("hello", 1138, "jeff", val=3) == "hello(1138, 'jeff', val=3)"
    assert names.get_only_unique_item([3, 3]) == 3
    with pytest.raises(RuntimeError, match="alike"):
        names.get_only_unique_item([3, 4])
    same = names.compare_tensors_in_structures
    assert same([torch.ones(2), {"a": 1}], [torch.ones(2), {"a": 1}])
    assert not same([torch.ones(2)], [torch.zeros(2)])
    assert not same({"a": torch.ones(1)}, {"b": torch.ones(1)})
    moved = names.move_to_device({"a": [torch.ones(1)], "b": "x"}, "meta")
    assert moved["a"][0].is_meta
    assert moved["b"] == "x"
    assert names.get_tensor_bytes([torch.ones(3), {"x": torch.ones(2, dtype=torch.float16)}]) == 16
    assert names.required_torch_version(min_version=1.8)
    assert not names.required_torch_version(min_version=99.1)


@pytest.mark.parametrize("norm_type", [1, 2, 3])
def test_clipping_on_one_rank_is_torchs(norm_type: int) -> None:
    def made() -> list[torch.nn.Parameter]:
        found = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
        found[0].grad, found[1].grad = torch.tensor([3.0, -4.0]), torch.tensor([2.0])
        return found

    expected, found = made(), made()
    norm = torch.nn.utils.clip_grad_norm_(expected, 1.0, norm_type=norm_type)
    assert torch.equal(names.clip_grad_norm_(found, max_norm=1.0, norm_type=norm_type), norm)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(expected, found, strict=True) if a.grad is not None)
    assert names.get_grad_norm(made(), norm_type) == pytest.approx(float(norm))
    assert names.get_weight_norm([torch.tensor([float("inf")])]) == -1


def test_tensors_are_clipped_and_masked() -> None:
    tensors = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert names.clip_tensors_by_global_norm(tensors, 1.0) == pytest.approx(5.0)
    assert names.get_global_norm_of_tensors(tensors) == pytest.approx(1.0, rel=1e-5)
    assert names.get_global_norm([3.0, 4.0]) == 5.0
    for val in (-1.0, 0.0, 1.5):
        tensor = torch.tensor([float("nan"), float("inf"), 2.0])
        names.mask_nan_or_inf_with_val_inplace(tensor, val=val)
        assert tensor.tolist() == [val, val, 2.0]


@pytest.mark.parametrize("weights", [[1, 2, 3, 4, 5], [0, 1, 2, 3, 3, 3], [5, 1, 1, 1], [1] * 9, [52, 48, 28, 22, 56]])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
def test_balanced_parts_are_as_light_as_can_be(weights: list[int], num_parts: int) -> None:
    parts = names.partition_balanced(weights, num_parts)
    assert len(parts) == num_parts + 1
    assert (parts[0], parts[-1]) == (0, len(weights))
    assert parts == sorted(parts)
    heaviest = max(sum(weights[a:b]) for a, b in pairwise(parts))
    assert heaviest == lightest(weights, num_parts)


def lightest(weights: list[int], num_parts: int) -> int:
    """The smallest heaviest part of all ways to cut, by trying them all."""
    if num_parts == 1:
        return sum(weights)
    return min(
        max(sum(weights[:cut]), lightest(weights[cut:], num_parts - 1) if weights[cut:] else 0)
        for cut in range(len(weights) + 1)
    )


def test_uniform_parts_differ_by_one() -> None:
    assert names.partition_uniform(7, 3) == [0, 3, 5, 7]
    assert names.partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    assert names.prefix_sum_inc([1, 2, 3]) == [1, 3, 6]


def test_memory_is_told_if_it_is_asked_for(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING, "DeepSpeed"):
        names.see_memory_usage("before", force=False)
        names.see_memory_usage("after", force=True)
    assert "before" not in caplog.text
    assert "after: device: " in caplog.text
    names.ensure_directory_exists(str(tmp_path / "a" / "b" / "c.txt"))
    assert (tmp_path / "a" / "b").is_dir()


def test_gradients_of_an_engine_are_not_mistaken_for_whole_ones() -> None:
    import shardwell

    engine: Any = shardwell.initialize(
        model=torch.nn.Linear(2, 2), config={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    ).engine
    engine.backward(engine(torch.ones(1, 2)).sum())
    with pytest.raises(ShardwellError, match="gradient_clipping"):
        names.clip_grad_norm_(engine.module.parameters(), 1.0)


def answers_of_an_engine() -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    off = ("amp_enabled", "pld_enabled", "eigenvalue_enabled", "curriculum_enabled_legacy", "graph_harvesting")
    names = (*off, "prescale_gradients", "zero_has_nvme_offload", "dynamic_loss_scale_args", "get_parallel_world_sizes")
    found = {name: getattr(engine, name)() for name in names}
    engine.destroy()
    return found


def test_an_engine_says_that_features_it_lacks_are_off_and_how_ranks_are_laid_out(ranks: Ranks) -> None:
    found = ranks.run(1, answers_of_an_engine)[0]
    assert found.pop("get_parallel_world_sizes") == {"dp": 1, "tp": 1}
    rules = found.pop("dynamic_loss_scale_args")
    assert (rules["init_scale"], rules["scale_window"], rules["delayed_shift"]) == (16, 1000, 2)
    assert list(found.values()) == [False] * 7


def test_a_hook_on_a_gradient_is_called_after_it_was_accumulated() -> None:
    weight, seen = torch.nn.Parameter(torch.ones(2)), []
    modules.register_grad_hook(weight, lambda parameter: seen.append(parameter.grad.clone()))
    (3 * weight).sum().backward()
    assert [list(one) for one in seen] == [[3.0, 3.0]]
