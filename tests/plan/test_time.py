"""The time of planned steps: what is priced was counted, faster machines are never slower, few blocks tell all."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from shardwell.memory import Tier
from shardwell.monitor.timeline import ROWS
from shardwell.parallel.traffic import PAYLOAD
from shardwell.plan import BlockModel, PlanReport, SimulatedMachine, SimulatedRanks, Speeds, StepTime, estimate
from shardwell.plan.decoder import DecoderSizes
from shardwell.plan.devices import drives, gpu, gpus, links, speeds_of
from shardwell.plan.estimate import _time_of_blocks, _timed_at
from shardwell.plan.models import decoder
from shardwell.plan.step_time import ResourceTime, extrapolated
from shardwell.plan.time_report import cost
from shardwell.virtual_time.virtual_clock import BETWEEN, COMPUTE, DISK, DOWN, INSIDE, UP, UPDATE

SIZES = DecoderSizes(4, 256, 4, 1000, mlp=512, positions=64)
HOST = {"offload_optimizer": {"device": "cpu", "ratio": 1.0}}  # all of it: without a ratio the first units stay above
NVME = {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}
ZEROPP = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # stage, ZeRO block, other keys
    "stage 0": (0, {}, {}),
    "stage 1": (1, {}, {}),
    "stage 2, accumulated": (2, {}, {"gradient_accumulation_steps": 3}),
    "stage 3": (3, {}, {}),
    "stage 3, ZeRO++": (3, ZEROPP, {}),
    "host": (2, HOST, {}),
    "host, after the norm": (3, HOST, {"gradient_clipping": 1.0, "shardwell": {"commit": "after_norm"}}),
    "host, at once": (2, HOST, {"shardwell": {"commit": "at_once"}}),
    "host, speculative": (2, HOST, {"gradient_clipping": 1e3, "shardwell": {"commit": "shadow"}}),
    "host, accumulated": (2, HOST, {"gradient_accumulation_steps": 2}),
    "host, parameters": (3, {**HOST, "offload_param": {"device": "cpu"}}, {}),
    "disk": (3, NVME, {}),
    "disk, parameters": (
        3,
        {**NVME, "offload_param": {"device": "nvme", "nvme_path": "/nvme", "max_in_cpu": 0}},
        {},
    ),
}
H100 = speeds_of(gpu("h100"))


def arguments(name: str, layers: int = 4) -> tuple[BlockModel, dict[str, Any], SimulatedMachine]:
    stage, zero, more = CASES[name]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        **more,
        "shardwell": {"bundle_size": 0, **more.get("shardwell", {})},
    }
    model = decoder("small", replace(SIZES, layers=layers), 2, 64, recomputes=False)
    return model, config, SimulatedMachine(80e9, 1e12, 1e13, ranks=SimulatedRanks(0, 4, 2), speeds=H100)


def planned(name: str) -> PlanReport:
    return estimate(*arguments(name))


def timed(name: str, speeds: Speeds = H100, layers: int = 4) -> StepTime:
    """Return the time alone, of all blocks."""
    model, config, machine = arguments(name, layers)
    return _timed_at(model, layers, config, replace(machine, speeds=speeds), None)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_bytes_that_are_priced_are_those_that_are_counted(name: str) -> None:
    report = planned(name)
    time, costs = report.time, report.costs
    assert time is not None
    kinds = {kind.value for kind in PAYLOAD}
    counted = sum(size for key, size in costs.traffic.items() if key.split()[0] in kinds)
    assert time.num_bytes.get(INSIDE, 0) + time.num_bytes.get(BETWEEN, 0) == counted
    assert time.num_bytes.get(UP, 0) == costs.copies["to device"]
    assert time.num_bytes.get(DOWN, 0) == costs.copies["to host"]
    on_disk = costs.copies["disk read"] + costs.copies["disk written"]
    unit = on_disk / 5  # workers may be one ahead at the begin of a step, or behind at its end
    assert time.num_bytes.get(DISK, 0) == pytest.approx(on_disk, abs=unit)
    assert bool(time.num_bytes.get(UPDATE)) == bool(report.at_rest(Tier.HOST) or report.at_rest(Tier.DISK))


@pytest.mark.parametrize("name", ["stage 3", "stage 3, ZeRO++", "host", "disk, parameters"])
def test_every_moment_of_a_step_has_a_reason_and_no_resource_works_longer_than_it(name: str) -> None:
    time = timed(name)
    assert sum(one.exposed for one in time.by_resource.values()) == pytest.approx(time.seconds)
    assert sum(time.bounds.values()) == pytest.approx(1.0)
    assert all(one.busy <= time.seconds * (1 + 1e-9) for one in time.by_resource.values())
    assert all(task.begin < task.end for task in time.events if task.resource == COMPUTE)
    names = {task.name for task in time.events}
    assert {"forward blocks.1", "all-gather blocks.1"} <= names if name.startswith("stage 3") else True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("stage 3", ("between", "inside", "device_memory")),
        ("host, parameters", ("copy_up", "copy_down", "host_update")),
        ("disk", ("disk_read", "disk_write", "host_update")),
    ],
)
def test_faster_hardware_is_never_slower(name: str, fields: tuple[str, ...]) -> None:
    slow = replace(H100, between=1e9, inside=2e9, copy_up=1e9, copy_down=1e9, host_update=1e10, disk_read=1e9)
    before = timed(name, slow).seconds
    for field in fields:
        faster = timed(name, replace(slow, **{field: 2 * getattr(slow, field)})).seconds
        assert faster <= before * (1 + 1e-9), field
    assert timed(name).seconds < before


def test_what_each_further_block_hides_more_of_does_not_make_shares_that_exceed_the_step() -> None:
    """A link that is waited for less with each block would be waited for a negative time."""
    few = StepTime(10.0, {COMPUTE: ResourceTime(9.0, 9.0), INSIDE: ResourceTime(2.0, 1.0)}, ())
    more = StepTime(11.6, {COMPUTE: ResourceTime(11.0, 11.0), INSIDE: ResourceTime(3.0, 0.6)}, ())
    for blocks in (1, 2, 10):
        whole = extrapolated(few, more, 1, blocks)
        assert sum(one.exposed for one in whole.by_resource.values()) == pytest.approx(whole.seconds)
        assert sum(whole.bounds.values()) == pytest.approx(1.0)
        assert whole.seconds >= max(one.busy for one in whole.by_resource.values())


def test_plans_of_the_same_are_the_same() -> None:
    assert timed("host") == timed("host")


@pytest.mark.parametrize(
    ("name", "change", "bound"),
    [
        ("stage 3", {"between": 1e7}, "link"),
        ("host, parameters", {"copy_up": 1e6}, "PCIe"),
        ("host", {"host_update": 1e7}, "host update"),
        ("disk", {"disk_read": 1e6}, "disk"),
    ],
)
def test_what_bounds_a_step_follows_the_machine(name: str, change: dict[str, float], bound: str) -> None:
    assert timed(name, replace(H100, **change)).bound == bound


def test_updates_at_once_hide_behind_the_backward_and_those_after_the_norm_do_not() -> None:
    slow = replace(H100, host_update=2e9, kernel_seconds=2e-5)  # updates take about as long as a backward
    assert timed("host", slow, 8).seconds < timed("host, after the norm", slow, 8).seconds


def test_speculative_updates_are_between_those_at_once_and_those_after_the_norm() -> None:
    slow = replace(H100, host_update=1e9, kernel_seconds=2e-5)
    auto, at_once, speculative, after = (
        timed(name, slow, 8).seconds for name in ("host", "host, at once", "host, speculative", "host, after the norm")
    )
    assert at_once < speculative < after
    assert auto == pytest.approx(at_once, rel=0.01)  # what it comes to after a few steps


def test_what_workers_do_after_the_last_call_of_a_step_counts_as_its_work() -> None:
    time = timed("host")
    copied = sum(task.num_bytes for task in time.events if task.resource == UP)
    assert copied >= 0.9 * time.num_bytes[UP]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stage 3", "host, after the norm"])
def test_the_time_of_few_blocks_gives_that_of_all(name: str) -> None:
    many = 40
    few, whole = _time_of_blocks(*arguments(name, many), None, True), timed(name, layers=many)
    assert few.num_blocks is not None
    assert few.num_blocks < many / 2
    assert few.seconds == pytest.approx(whole.seconds, rel=0.02)
    assert few.num_bytes == whole.num_bytes
    assert few.model_flops == pytest.approx(whole.model_flops)
    assert exposed(few) == pytest.approx(exposed(whole), rel=0.05, abs=0.02 * whole.seconds)


def exposed(time: StepTime) -> dict[str, float]:
    """Return the waits by resource, those for links together: which hop of a collective is the last one varies."""
    found: dict[str, float] = {}
    for name, one in time.by_resource.items():
        kind = "links" if name in (INSIDE, BETWEEN) else name
        found[kind] = found.get(kind, 0.0) + one.exposed
    return found


def test_a_report_says_time_speed_and_cost_in_words_and_values() -> None:
    report = planned("stage 3")
    time = report.time
    assert time is not None
    assert time.tokens == 4 * 2 * 64
    found = json.loads(report.json())["time"]
    assert found["seconds"] == time.seconds
    assert found["tokens_per_second"] == pytest.approx(time.tokens / time.seconds)
    assert 0 < found["mfu"] < 1
    assert found["by_resource"][COMPUTE]["busy"] > 0
    assert {"name", "resource", "begin", "end", "num_bytes"} == set(found["events"][0])
    assert "tokens a second" in str(report)
    assert any("NVIDIA H100 datasheet" in one and "72% of it" in one for one in report.assumptions)
    money = cost(time, 10**6, 4, 2.5)
    assert money["steps"] == -(-(10**6) // time.tokens)
    assert money["price"] == pytest.approx(money["steps"] * time.seconds / 3600 * 4 * 2.5)


def test_a_planned_step_is_a_timeline_like_a_recorded_one() -> None:
    time = timed("disk, parameters")
    timeline = time.timeline()
    assert {span.row for span in timeline.spans} <= set(ROWS)
    assert {"compute", "wait", "all-gather", "reduce-scatter", "copy up", "copy down", "host update", "disk"} == {
        span.row for span in timeline.spans
    }
    assert timeline.chrome_trace()["traceEvents"]
    assert "compute" in str(timeline)


def test_without_speeds_a_plan_has_no_time() -> None:
    report = planned("stage 3")
    machine = replace(report.machine, speeds=None)
    plain = estimate(decoder("small", SIZES, 2, 64, recomputes=False), report.config, machine)
    assert plain.time is None
    assert plain.costs == report.costs  # time changes no byte
    assert json.loads(plain.json())["time"] is None


def test_all_figures_have_a_source_and_a_year() -> None:
    wanted = ("a100-80gb", "h100-80gb", "h200", "b200", "mi300x", "rtx-4090", "rtx-5090", "v100-32gb", "l40s", "t4")
    assert set(wanted) <= set(gpus())
    for one in gpus().values():
        assert one.bus in links()
        assert one.node_link in links()
        for figure in (one.memory_mib, one.matmul_tflops, one.gpu_link_gbs, one.fp32_tflops, one.memory_gbs):
            assert figure.value > 0
            assert figure.source
            assert figure.kind in ("measured", "stated")
            assert 2010 <= figure.year <= 2026
        assert speeds_of(one).matmul_in("bf16").peak == one.matmul_tflops.value * 1e12
    assert all(read.value >= write.value for read, write in drives().values())


@pytest.mark.parametrize(
    ("case", "rate", "is_said"),
    [("host, at once", 1e9, True), ("host, at once", 1e13, False), ("host, after the norm", 1e9, False)],
)
def test_a_plan_says_where_gradients_wait_on_the_device_for_a_slow_host(case: str, rate: float, is_said: bool) -> None:
    model, config, machine = arguments(case)
    report = estimate(model, config, replace(machine, speeds=replace(H100, host_update=rate)), verified=False)
    assert any("2.3 GiB of them (3.1% of the device) may wait there" in note for note in report.notes) is is_said
