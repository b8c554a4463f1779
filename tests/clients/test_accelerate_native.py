"""`shardwell.integrations.accelerate`: Accelerate's loop trains sharded as it does in DDP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shardwell
from tests.support.command import environment
from tests.support.models import zero
from tests.support.patience import HANG
from tests.support.ranks import Ranks

accelerate = pytest.importorskip("accelerate")
ROWS = 22  # the last batch of an epoch is smaller, and does not complete an accumulation


def forget() -> None:
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def parts(dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    model = net(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    rows = torch.randn(ROWS, 4, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return model, optimizer, DataLoader(TensorDataset(rows), batch_size=2), scheduler


def epochs(accelerator: Any, prepared: tuple[Any, ...], count: int, clip: str) -> dict[str, list[Any]]:
    """The loop of Accelerate's own pages."""
    model, optimizer, loader, scheduler = prepared
    seen: dict[str, list[Any]] = {"losses": [], "norms": [], "rates": []}
    for _ in range(count):
        for (rows,) in loader:
            with accelerator.accumulate(model):
                loss = model(rows).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip == "norm":
                    seen["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.05)))
                if accelerator.sync_gradients and clip == "value":
                    accelerator.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen["losses"].append(float(accelerator.gather(loss.detach().reshape(1)).mean()))
            seen["rates"].append(scheduler.get_last_lr()[0])
    return seen


def stock(micro: int, clip: str, dtype: torch.dtype) -> tuple[dict[str, list[Any]], dict[str, Tensor]]:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=micro)
    try:
        prepared = accelerator.prepare(*parts(dtype))
        assert isinstance(prepared[0], nn.parallel.DistributedDataParallel)
        seen = epochs(accelerator, prepared, 2, clip)
        return seen, {name: value.clone() for name, value in accelerator.unwrap_model(prepared[0]).state_dict().items()}
    finally:
        forget()


def native(config: dict[str, Any], **options: Any) -> Any:
    from shardwell.integrations.accelerate import Accelerator

    return Accelerator(config=config, cpu=True, **options)


def both(config: dict[str, Any], micro: int, clip: str, dtype: torch.dtype = torch.float64) -> float:
    """The largest difference between a sharded run and DDP: losses, norms, rates and final weights."""
    expected, weights = stock(micro, clip, dtype)
    accelerator = native(config, gradient_accumulation_steps=micro)
    try:
        prepared = accelerator.prepare(*parts(dtype))
        assert isinstance(prepared[0], shardwell.Engine)
        seen = epochs(accelerator, prepared, 2, clip)
        found = accelerator.get_state_dict(prepared[0])
        assert set(found) == (set() if dist.get_rank() else set(weights))
        assert {name: len(numbers) for name, numbers in seen.items()} == {n: len(s) for n, s in expected.items()}
        differences = [abs(a - b) for name in seen for a, b in zip(seen[name], expected[name], strict=True)]
        differences += [float((found[name] - value).abs().max()) for name, value in weights.items() if name in found]
        assert prepared[0].global_steps == (len(seen["losses"]) if micro == 1 else 6)  # an epoch's end is a boundary
        return max(differences)
    finally:
        forget()


@pytest.mark.parametrize(
    ("stage", "micro", "clip"),
    [(0, 1, "norm"), (1, 2, "value"), (2, 2, "norm"), (3, 2, "norm"), (3, 1, "value"), (2, 1, ""), (0, 2, "")],
)
def test_the_loop_gives_the_numbers_of_ddp(ranks: Ranks, stage: int, micro: int, clip: str) -> None:
    assert max(ranks.run(2, both, zero(stage), micro, clip)) < 1e-10


@pytest.mark.parametrize(("stage", "device"), [(2, "cpu"), (3, "nvme")])
def test_with_offloading_too(ranks: Ranks, tmp_path: Path, stage: int, device: str) -> None:
    where = {"device": device, "nvme_path": str(tmp_path)} if device == "nvme" else {"device": device}
    block = {"offload_optimizer": where, **({"offload_param": where} if stage == 3 else {})}
    kernels_have = torch.float32  # for state on disk there are no others
    assert max(ranks.run(2, both, zero(stage, zero_optimization=block), 2, "norm", kernels_have)) < 2e-6


# ------------------------------------------------------------------------------------------------ saving and loading


def weights_of(accelerator: Any, model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def saved(folder: str, stage: int) -> dict[str, Tensor]:
    accelerator = native(zero(stage), gradient_accumulation_steps=2)
    try:
        prepared = accelerator.prepare(*parts())
        epochs(accelerator, prepared, 1, "norm")
        calls: list[tuple[int, int]] = []
        accelerator.register_save_state_pre_hook(lambda models, weights, _: calls.append((len(models), len(weights))))
        accelerator.save_state(folder)
        assert calls == [(1, 0)]
        assert not list(Path(folder).glob("optimizer*")), "the engine saves its optimizer itself"
        epochs(accelerator, prepared, 1, "norm")
        return weights_of(accelerator, prepared[0])
    finally:
        forget()


def resumed(folder: str, stage: int) -> tuple[dict[str, Tensor], list[float]]:
    accelerator = native(zero(stage), gradient_accumulation_steps=2)
    try:
        model, optimizer, loader, scheduler = parts()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        prepared = accelerator.prepare(model, optimizer, loader, scheduler)
        accelerator.load_state(folder)
        seen = epochs(accelerator, prepared, 1, "norm")
        return weights_of(accelerator, prepared[0]), seen["rates"]
    finally:
        forget()


@pytest.mark.parametrize(("stage", "then"), [(3, 3), (2, 1), (0, 3)])
def test_a_saved_state_is_resumed_bit_by_bit_also_at_another_stage(
    ranks: Ranks, tmp_path: Path, stage: int, then: int
) -> None:
    expected = ranks.run(2, saved, str(tmp_path), stage)[0]
    for found, _ in ranks.run(2, resumed, str(tmp_path), then):
        for name, value in expected.items():
            assert abs(found[name] - value).max() < 1e-12, name


def test_a_saved_state_is_loaded_by_one_process(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, saved, str(tmp_path), 3)
    found, rates = ranks.run(1, resumed, str(tmp_path), 3)[0]
    assert all(abs(value).max() > 0 for value in found.values())
    assert rates[0] < 0.02, "the schedule goes on, and does not begin again"


def exported(folder: str) -> tuple[bool, bool, list[str]]:
    accelerator = native(zero(3))
    try:
        model = net()
        engine, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.save_model(engine, folder)
        accelerator.wait_for_everyone()
        unwrapped = accelerator.unwrap_model(engine) is model
        accelerator.free_memory()
        is_plain = all(type(parameter) is nn.Parameter for parameter in model.parameters())
        return unwrapped, is_plain, sorted(os.listdir(folder))
    finally:
        forget()


def test_save_model_writes_the_whole_model_and_free_memory_gives_it_back(ranks: Ranks, tmp_path: Path) -> None:
    for unwrapped, is_plain, files in ranks.run(2, exported, str(tmp_path)):
        assert unwrapped
        assert is_plain
        assert files == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    for name, value in net().state_dict().items():
        assert torch.equal(found[name], value)


# ----------------------------------------------------------------------------------------------- precision and models


def in_16_bits(way: str) -> tuple[str, list[float], list[float]]:
    config: dict[str, Any] = zero(3)
    if way == "auto":
        config["bf16"] = {"enabled": "auto"}
    accelerator = native(config, mixed_precision="bf16")
    try:
        prepared = accelerator.prepare(*parts(torch.float32))
        seen = epochs(accelerator, prepared, 1, "")
    finally:
        forget()
    model, optimizer, loader, scheduler = parts(torch.float32)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(3, bf16={"enabled": True})).engine
    plain = []
    for batch in list(loader)[dist.get_rank() :: 2][:5]:
        loss = engine(batch[0]).square().mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        plain.append(float(mean) / 2)
        scheduler.step()
        scheduler.step()
    return accelerator.mixed_precision, seen["losses"][:5], plain


@pytest.mark.parametrize("way", ["argument", "auto"])
def test_mixed_precision_is_the_engines(ranks: Ranks, way: str) -> None:
    for precision, found, plain in ranks.run(2, in_16_bits, way):
        assert precision == "bf16"
        assert found == pytest.approx(plain, rel=1e-6)


def adversaries(separately: bool) -> tuple[float, float]:
    """Two models with an optimizer each: one loss goes through both."""
    outcomes = []
    for kind in ("stock", "native"):
        accelerator = accelerate.Accelerator(cpu=True) if kind == "stock" else native(zero(2))
        try:
            first, second = net(), nn.Linear(2, 1).double()
            with torch.no_grad():
                second.weight.fill_(0.5)
                second.bias.fill_(0.1)
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
            if separately:
                a, b = accelerator.prepare(first), accelerator.prepare(second)
                one, two = accelerator.prepare(optimizers[0]), accelerator.prepare(optimizers[1])
            else:
                a, b, one, two = accelerator.prepare(first, second, *optimizers)
            for rows in torch.randn(3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)):
                accelerator.backward(b(a(rows[dist.get_rank()])).square().mean())
                one.step(), two.step()
                one.zero_grad(), two.zero_grad()
            outcomes.append([float(sum(p.detach().double().sum() for p in m.parameters())) for m in (first, second)])
        finally:
            forget()
    return max(abs(x - y) for x, y in zip(*outcomes, strict=True)), abs(outcomes[0][0])


@pytest.mark.parametrize("separately", [False, True])
def test_two_models_train_together(ranks: Ranks, separately: bool) -> None:
    for difference, size in ranks.run(2, adversaries, separately):
        assert size > 0
        assert difference < 1e-12


# ---------------------------------------------------------------------------------------------------------- refusals


def refusal(act: Callable[[], Any]) -> str:
    try:
        with pytest.raises(shardwell.ShardwellError) as caught:
            act()
        return str(caught.value)
    finally:
        forget()


def test_an_engine_that_is_handed_to_an_accelerator_is_an_error_with_the_way_out() -> None:
    engine = shardwell.initialize(model=net(), config=zero(1), device="cpu").engine
    assert "shardwell.integrations.accelerate import Accelerator" in refusal(
        lambda: accelerate.Accelerator(cpu=True).prepare(engine)
    )
    assert "hand the model and its optimizer to prepare()" in refusal(lambda: native(zero(1)).prepare(engine))


def test_what_cannot_be_honoured_is_refused() -> None:
    model = net()
    shared = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
    assert "make one optimizer for each model" in refusal(lambda: native({}).prepare(model, shared))
    assert "Leave it out of the configuration" in refusal(
        lambda: native({"gradient_accumulation_steps": 4}, gradient_accumulation_steps=2).prepare(net())
    )
    assert "fsdp_plugin: this Accelerator" in refusal(lambda: native({}, fsdp_plugin=object()))
    assert "say it in one place" in refusal(lambda: native({"bf16": {"enabled": True}}, mixed_precision="fp16"))
    assert "engines compute in 'no', 'bf16' or 'fp16'" in refusal(lambda: native({}, mixed_precision="fp8"))
    assert "with model.join()" in refusal(lambda: native({}).join_uneven_inputs([]))
    assert "expected a path or a dictionary" in refusal(lambda: native([1]))  # type: ignore[arg-type]


SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader
from shardwell.integrations.accelerate import Accelerator
accelerator = Accelerator(config=sys.argv[1])
model = nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.ones(8, 4), batch_size=2))
for rows in loader:
    accelerator.backward(model(rows).sum())
    optimizer.step()
    optimizer.zero_grad()
stage, rows = model.zero_optimization_stage(), model.train_batch_size()
accelerator.print(accelerator.num_processes, model.global_steps, rows, stage)
"""


@pytest.mark.slow
def test_the_launcher_starts_a_script_that_uses_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "config.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    command = [sys.executable, "-m", "shardwell", "run", "-n", "2"]  # accelerate launch starts one process on a CPU
    command += [str(tmp_path / "script.py"), str(tmp_path / "config.json")]
    done = subprocess.run(command, env=environment(libraries=True), capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-4:] == ["2", "2", "4", "3"]
