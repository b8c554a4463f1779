"""Optimizer state on the host: the numbers of state on the device, whenever updates commit."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell.errors import ConfigError, NonFiniteError, ShardwellError
from shardwell.memory import StateKind
from shardwell.offload import host_updates
from shardwell.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from tests.support.before_step_loops import Net, rows
from tests.support.checkpoint_legs import Leg, everything, run_leg
from tests.support.internals import groups_of
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.offload_cases import HOST, OPTIMIZERS, PRECISIONS, check_equal, host_case
from tests.support.ranks import Ranks
from tests.support.training import Case, all_sharded, distance, plainly

# --------------------------------------------------------------------------------------------------------- numbers


def steps_apart(name: str, precision: str, stage: int, clip: float) -> dict[str, float]:
    """Each step on device and host from the same state and gradients: how many ulps the masters are apart."""
    engines = []
    for tier in ({}, HOST):
        torch.manual_seed(0)
        model = Net()  # all values of each parameter are gathered, one after the other
        config = zero(stage, gradient_clipping=clip, zero_optimization=tier, **PRECISIONS[precision])
        optimizer = OPTIMIZERS[name](model.parameters())
        engines.append(shardwell.initialize(model=model, optimizer=optimizer, config=config).engine)
    device, host = engines
    worst = {}
    for number in range(3):
        mine = share(rows(number), dist.get_rank(), dist.get_world_size())
        before = {key: safe_get_full_fp32_param(p) for key, p in device.module.named_parameters()}
        for engine in engines:
            engine.backward(engine(mine.to(engine.module.blocks[0].weight.dtype)).float().square().mean())
            engine.step()
        apart = 0.0
        for (key, here), (_, there) in zip(
            device.module.named_parameters(), host.module.named_parameters(), strict=True
        ):
            one, other = safe_get_full_fp32_param(here), safe_get_full_fp32_param(there)
            # Moments cancel: what rounds in them is of the size of the largest update, not of the element's own.
            size = torch.maximum(before[key].abs(), one.abs()).clamp(min=float((one - before[key]).abs().max()))
            ulp = torch.nextafter(size, torch.tensor(torch.inf)) - size
            apart = max(apart, float(((one - other).abs() / ulp).max()))
            shardwell.utils.safe_set_full_fp32_param(there, one)  # so that the next step starts alike
            for state in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum"):
                value = safe_get_full_optimizer_state(here, state)
                if value is not None:
                    mine = safe_get_full_optimizer_state(there, state)
                    torch.testing.assert_close(
                        mine, value, rtol=1e-6, atol=float(value.abs().max()) * 1e-6, msg=f"{key} {state}"
                    )
                    shardwell.utils.safe_set_full_optimizer_state(there, value, state)
        worst[f"step {number}"] = apart
    return worst


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_step_on_the_host_is_within_ulps_of_a_step_on_the_device(ranks: Ranks, name: str) -> None:
    for apart in ranks.run(2, steps_apart, name, "fp32", 3, 0.0):
        assert max(apart.values()) <= 1.0, apart


# Every pair of a precision, a stage and clipping is met.
@pytest.mark.parametrize(
    ("precision", "stage", "clip"),
    [("bf16", 1, 0.0), ("bf16", 2, 0.01), ("fp16", 2, 0.0), ("fp16", 1, 0.01), ("bf16", 3, 0.01), ("fp16", 3, 0.0)],
)
def test_half_precision_clipped_or_not_is_within_ulps(ranks: Ranks, precision: str, stage: int, clip: float) -> None:
    for apart in ranks.run(2, steps_apart, "AdamW", precision, stage, clip):
        assert max(apart.values()) <= 2.0, apart  # 0, but for a tensor's last elements: torch rounds those otherwise


@pytest.mark.parametrize(
    ("stage", "num_ranks", "accumulation"), [*((stage, 3, 2) for stage in range(4)), (0, 1, 3), (2, 1, 1), (3, 1, 3)]
)
def test_training_in_fp32_follows_plain_pytorch(ranks: Ranks, stage: int, num_ranks: int, accumulation: int) -> None:
    options = {"lr": 1e-2, "momentum": 0.9}
    case = host_case("auto", "fp32", optimizer="SGD", options=options, steps=4, accumulation=accumulation)
    difference, name = distance(ranks.run(num_ranks, all_sharded, [case], stage)[0][0], plainly(case)[0])
    assert difference < 1e-5, f"{name} differs by {difference}"


@pytest.mark.parametrize(
    ("stage", "clip"),
    [*((stage, 0.0) for stage in range(4)), (0, 0.01), (1, 1.2), (2, 1.2), (3, 1e-4)],
)
def test_commit_policies_give_the_same_bits(ranks: Ranks, stage: int, clip: float) -> None:
    """Clipped in no step, in all (0.01, 1e-4), and in some (1.2)."""
    policies = ["after_norm", "shadow"] + (["at_once"] if clip == 0.0 else [])
    cases = [host_case(policy, clip=clip, accumulation=2, groups=True) for policy in policies]
    first, *others = ranks.run(2 if clip in (0.0, 1.2) else 1, all_sharded, cases, stage)[0]
    for other in others:
        for name in first:
            assert (first[name] == other[name]).all(), name


@pytest.mark.parametrize("clip", [0.0, 1.2], ids=["never", "sometimes"])
def test_units_with_small_parameters_that_stay_whole_are_updated_once(ranks: Ranks, clip: float) -> None:
    cases = []
    for policy in ("after_norm", "shadow" if clip else "at_once"):
        case = host_case(policy, clip=clip, steps=4)
        block = {**HOST, "stage3_param_persistence_threshold": 100}
        cases.append(replace(case, config={**case.config, "zero_optimization": block}))
    first, other = ranks.run(2, all_sharded, cases, 3)[0]
    for name in first:
        assert (first[name] == other[name]).all(), name


def placed(case: Case, parameters: str, optimizer: str, chunk: int | None = None) -> dict[str, torch.Tensor]:
    """Stage 3 with parameters and optimizer on a tier each."""
    blocks = {"offload_param": {"device": parameters}, "offload_optimizer": {"device": optimizer}}
    if chunk is not None:
        host_updates._CHUNK = chunk
    try:
        return all_sharded([replace(case, config={**case.config, "zero_optimization": blocks})], 3)[0]
    finally:
        host_updates._CHUNK = 1 << 23


@pytest.mark.parametrize(("num_ranks", "precision"), [(1, "fp32"), (2, "bf16"), (1, "fp16")])
def test_where_parameters_and_state_rest_makes_no_difference(ranks: Ranks, num_ranks: int, precision: str) -> None:
    options = {"lr": 0.1, "momentum": 0.9}
    case = host_case("auto", precision, steps=3, clip=0.5, accumulation=2, optimizer="SGD", options=options)
    on_device = ranks.run(num_ranks, placed, case, "none", "none")[0]
    above = ranks.run(num_ranks, placed, case, "cpu", "none")[0]
    below = ranks.run(num_ranks, placed, case, "none", "cpu")[0]
    all_below = ranks.run(num_ranks, placed, case, "cpu", "cpu")[0]
    in_chunks = ranks.run(num_ranks, placed, case, "cpu", "cpu", 512)[0]
    for name, value in on_device.items():
        assert (above[name] == value).all(), name
        assert (all_below[name] == below[name]).all(), name
        assert (in_chunks[name] == below[name]).all(), name
        assert np.allclose(below[name], value, atol=1e-6 if precision == "fp32" else 1e-3), name


@pytest.mark.parametrize("clip", [0.0, 1.2], ids=["never", "sometimes"])
def test_commit_policies_give_the_same_bits_with_8_bit_moments(ranks: Ranks, clip: float) -> None:
    policies = ["after_norm", "shadow"] + (["at_once"] if clip == 0.0 else [])
    cases = [host_case(policy, moments="8bit", clip=clip, groups=True) for policy in policies]
    first, *others = ranks.run(2, all_sharded, cases, 2)[0]
    for other in others:
        for name in first:
            assert (first[name] == other[name]).all(), name


def losses(moments: str) -> list[float]:
    torch.manual_seed(0)
    model = Gpt()
    config = zero(2, zero_optimization=HOST, shardwell={"moments": moments})
    engine, *_ = shardwell.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config
    )
    found = []
    for batch in batches(4, 8) * 10:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def test_8_bit_moments_train_as_well(ranks: Ranks) -> None:
    wide, narrow = (np.array(ranks.run(1, losses, moments)[0]) for moments in ("fp32", "8bit"))
    assert wide[-4:].mean() < 0.7 * wide[:4].mean()
    assert narrow[-4:].mean() < wide[-4:].mean() + 0.1 * (wide[:4].mean() - wide[-4:].mean())


# ------------------------------------------------------------------------------------------------------- not finite


def after_nan(commit: str, nonfinite: str) -> tuple[bool, str]:
    torch.manual_seed(0)
    model = Gpt()
    config = zero(
        2, zero_optimization=HOST, shardwell={"commit": commit, "nonfinite": nonfinite}, bf16={"enabled": True}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)
    rows = share(batches(1, 4)[0], dist.get_rank(), dist.get_world_size())
    engine.backward(engine(rows))
    engine.step()
    before, message = everything(engine), ""
    engine.backward(engine(rows) * float("nan"))
    try:
        engine.step()
    except NonFiniteError as error:
        message = str(error)
    after = everything(engine)
    same = all(torch.equal(torch.as_tensor(before[n]), torch.as_tensor(after[n])) for n in before)
    engine.backward(engine(rows))
    engine.step()
    finite = all(bool(torch.isfinite(value).all()) for value in whole_parameters(model).values())
    return same and finite and engine.skipped_steps == 1, message


@pytest.mark.parametrize(
    ("commit", "nonfinite"), [("after_norm", "error"), ("shadow", "skip"), ("at_once", "skip"), ("at_once", "error")]
)
def test_gradients_that_are_not_finite_change_nothing(ranks: Ranks, commit: str, nonfinite: str) -> None:
    for same, message in ranks.run(2, after_nan, commit, nonfinite):
        assert same
        assert ("not finite" in message) == (nonfinite == "error")


# ----------------------------------------------------------------------------------------------- around the update


def looked_at(stage: int) -> list[bool]:
    """Whoever looks after a step sees its result, however he looks."""
    engines = []
    for commit in ("after_norm", "at_once"):
        torch.manual_seed(0)
        model = Gpt()
        config = zero(stage, zero_optimization=HOST, shardwell={"commit": commit}, bf16={"enabled": True})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engines.append(shardwell.initialize(model=model, optimizer=optimizer, config=config).engine)
    rows = share(batches(1, 4)[0], dist.get_rank(), dist.get_world_size())
    looks: list[Any] = [
        lambda e: whole_parameters(e.module)["blocks.1.up.weight"],
        lambda e: e.state_dict()["blocks.1.up.weight"],
        lambda e: safe_get_full_fp32_param(e.module.blocks[1].up.weight),
        lambda e: safe_get_full_optimizer_state(e.module.blocks[1].up.weight, "exp_avg"),
        lambda e: e.eval()(rows).detach(),
    ]
    found = []
    for look in looks:
        values = []
        for engine in engines:
            engine.train()
            loss = engine(rows)
            engine.backward(loss)
            gradient = safe_get_full_grad(engine.module.blocks[1].up.weight)
            assert gradient is not None
            engine.step()
            values.append(look(engine))
        found.append(bool(torch.equal(values[0], values[1])))
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_whoever_looks_sees_the_update(ranks: Ranks, stage: int) -> None:
    assert all(ranks.run(2, looked_at, stage)[0])


def test_part_of_the_state_stays_on_the_device(ranks: Ranks) -> None:
    for held in ranks.run(2, bytes_by_tier, 0.5):
        host, device = (
            held["host"] / 12,
            held["device"] / 8,
        )  # masters at stage 3 count as parameters on the device
        assert 0.25 < host / (host + device) <= 0.5
    for held in ranks.run(2, bytes_by_tier, 1.0):
        assert held["device"] == 0
        assert held["host"] == pytest.approx(12 * held["own"], rel=0.01)


def test_8_bit_moments_and_masters_take_6_bytes(ranks: Ranks) -> None:
    for held in ranks.run(2, bytes_by_tier, 1.0, "8bit"):
        assert held["host"] == pytest.approx((6 + 2 / 256) * held["own"], rel=0.01)


def bytes_by_tier(ratio: float, moments: str = "fp32") -> dict[str, float]:
    torch.manual_seed(0)
    model = Gpt(blocks=6)
    block = {"offload_optimizer": {"device": "cpu", "ratio": ratio}}
    config = zero(3, zero_optimization=block, bf16={"enabled": True}, shardwell={"moments": moments})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)
    for batch in batches(2, 4):
        engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
        engine.step()
    whole_parameters(model)
    held = {"host": 0.0, "device": 0.0}
    for (state, _, tier), size in engine.memory().now.items():
        if state is StateKind.OPTIMIZER:
            held[tier.value] += size
    groups = groups_of(engine)
    return {**held, "own": float(sum(group.local_numel for group in groups))}


def test_state_that_will_not_fit_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = type("Memory", (), {"available": 100_000})
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    model = Gpt()
    numel = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    # 12 bytes of state and 2 of gradients that wait for the norm; with a CPU as device, 90 % of the memory count
    with pytest.raises(ShardwellError, match=rf"needs .* 14 bytes for each of {numel:,} parameters.* KiB may be used"):
        shardwell.initialize(
            model=model,
            optimizer=optimizer,
            config=zero(1, zero_optimization=HOST, bf16={"enabled": True}),
            device="cpu",
        )


def test_8_bit_moments_are_for_adam_on_the_host() -> None:
    model = Gpt()
    block = zero(1, shardwell={"moments": "8bit"})
    with pytest.raises(ConfigError, match='"8bit" is for optimizer state on the host'):
        shardwell.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=block, device="cpu")
    block = zero(1, zero_optimization=HOST, shardwell={"moments": "8bit"})
    model = Gpt()
    with pytest.raises(ShardwellError, match="is for Adam and AdamW; the optimizer is SGD"):
        shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=block, device="cpu")


@pytest.mark.parametrize("block", [{}, HOST], ids=["none", "cpu"])
def test_gradients_wait_on_disk_only_for_state_on_disk(block: dict[str, Any]) -> None:
    model = Gpt()
    config = zero(1, zero_optimization=block, shardwell={"gradients": "disk"})
    with pytest.raises(ConfigError, match='"disk" is for gradients of optimizer state on disk'):
        shardwell.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config, device="cpu")


@pytest.mark.parametrize("config", [{"gradient_clipping": 1.0}, {"fp16": {"enabled": True}}], ids=["clip", "fp16"])
def test_updates_at_once_contradict_what_needs_the_norm(config: dict[str, Any]) -> None:
    model = Gpt()
    block = zero(1, zero_optimization=HOST, shardwell={"commit": "at_once"}, **config)
    with pytest.raises(ConfigError, match='"at_once" contradicts'):
        shardwell.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=block, device="cpu")


# ------------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_go_from_the_device_to_the_host_and_back(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    case, device = Case(dtype=torch.float32), PRECISIONS["bf16"]
    host = {**device, "zero_optimization": HOST}
    saved = ranks.run(2, run_leg, Leg(stage, 0, 2, case, device, loads=False), str(tmp_path))[0]["ended"]
    middle = ranks.run(3, run_leg, Leg(3, 2, 4, case, host, options={"asynchronous": True}), str(tmp_path))[0]
    check_equal(middle["loaded"], saved)
    last = ranks.run(2, run_leg, Leg(stage, 4, 4, case, device, saves=False), str(tmp_path))[0]
    check_equal(last["loaded"], middle["ended"])


def loaded_in_between(commit: str) -> dict[str, torch.Tensor]:
    """Training in the middle of which the optimizer gets its own state again, as torch gives and takes it."""
    torch.manual_seed(0)
    model = Gpt()
    config = zero(2, zero_optimization=HOST, bf16={"enabled": True}, shardwell={"commit": commit})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)
    for number, batch in enumerate(batches(4, 4)):
        if number == 2:
            engine.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
        engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
        engine.step()
    return {**whole_parameters(model), "moment": safe_get_full_optimizer_state(model.head.weight, "exp_avg")}


def test_state_that_torch_loads_is_what_is_stepped(ranks: Ranks) -> None:
    expected, found = (ranks.run(2, loaded_in_between, commit)[0] for commit in ("after_norm", "shadow"))
    for name in expected:
        assert (expected[name] == found[name]).all(), name


def set_before_the_first_step() -> list[float]:
    torch.manual_seed(0)
    model = Gpt()
    config = zero(2, zero_optimization=HOST, shardwell={"moments": "8bit"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)
    weight = model.head.weight
    for key in ("exp_avg", "exp_avg_sq"):
        shardwell.utils.safe_set_full_optimizer_state(weight, torch.ones_like(weight), key)
    shardwell.utils.safe_set_full_optimizer_state(weight, torch.tensor(1.0), "step")
    found = float(safe_get_full_optimizer_state(weight, "exp_avg_sq").mean())
    for batch in batches(2, 4):
        engine.backward(engine(batch))
        engine.step()
    return [found, float(safe_get_full_optimizer_state(weight, "exp_avg_sq").mean())]


def test_8_bit_moments_can_be_set_where_there_were_none(ranks: Ranks) -> None:
    before, after = ranks.run(1, set_before_the_first_step)[0]
    assert before == 1.0
    assert after == pytest.approx(0.999**2, rel=0.01)


def test_checkpoints_go_to_8_bit_moments_and_back(ranks: Ranks, tmp_path: Path) -> None:
    case, wide = Case(dtype=torch.float32), {**PRECISIONS["bf16"], "zero_optimization": HOST}
    narrow = {**wide, "shardwell": {"moments": "8bit"}}
    saved = ranks.run(2, run_leg, Leg(2, 0, 2, case, wide, loads=False), str(tmp_path))[0]["ended"]
    middle = ranks.run(3, run_leg, Leg(3, 2, 4, case, narrow), str(tmp_path))[0]
    last = ranks.run(2, run_leg, Leg(2, 4, 4, case, wide, saves=False), str(tmp_path))[0]
    for name, value in saved.items():
        if "exp_avg" in name:
            error = np.abs(middle["loaded"][name] - value)
            assert (error <= np.abs(value) / 8 + np.abs(value).max() / 2**13).all(), name  # blocks span parameters
        else:
            assert np.array_equal(middle["loaded"][name], value), name
    check_equal(last["loaded"], middle["ended"])
