"""The stock `Accelerator` with a `DeepSpeedPlugin` trains on shardwell as it does in DDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.as_deepspeed import results, run_ranks

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SCRIPT = """
import json, os, sys
import torch, accelerate
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin

def forget():
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_CPU", None)

def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    rows = torch.randn(14, 4, generator=torch.Generator().manual_seed(1))
    return model, optimizer, DataLoader(TensorDataset(rows), batch_size=2), scheduler

def train(accelerator, prepared, clip, epochs=1):
    model, optimizer, loader, scheduler = prepared
    losses, norms, rates = [], [], []
    for _ in range(epochs):
        for (rows,) in loader:
            with accelerator.accumulate(model):
                loss = model(rows).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach().reshape(1)).mean()))
            rates.append(scheduler.get_last_lr()[0])
    return losses + norms + rates

def compare(stage, micro, clip, offload, folder):
    os.makedirs(folder, exist_ok=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro)
    prepared = accelerator.prepare(*parts())
    expected = train(accelerator, prepared, clip, 2)
    weights = {name: value.clone() for name, value in accelerator.unwrap_model(prepared[0]).state_dict().items()}
    forget()
    options = dict(zero_stage=stage, gradient_accumulation_steps=micro, zero3_save_16bit_model=True)
    if clip:
        options["gradient_clipping"] = clip
    if offload:
        options["offload_optimizer_device"] = offload
        if offload == "nvme":
            options["offload_optimizer_nvme_path"] = folder
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(**options))
    assert accelerator.num_processes == 2
    prepared = accelerator.prepare(*parts())
    assert type(prepared[0]).__name__ == "DeepSpeedEngine"
    found = train(accelerator, prepared, clip)
    accelerator.save_state(folder + "/state")
    found_again = train(accelerator, prepared, clip)
    whole = accelerator.get_state_dict(prepared[0]) or {}
    accelerator.load_state(folder + "/state")
    resumed = train(accelerator, prepared, clip)
    forget()
    worst = max(abs(a - b) for a, b in zip(sorted(found + found_again), sorted(expected), strict=True))
    apart = max([float((whole[name].float() - weights[name]).abs().max()) for name in whole] or [0])
    again = max(abs(a - b) for a, b in zip(resumed, found_again, strict=True))
    return [worst, apart, again, len(whole)]

for case in json.loads(sys.argv[1]):
    result = compare(*case, f"{sys.argv[2]}/{'-'.join(map(str, case))}")
    if os.environ["RANK"] == "0":
        print("RESULT " + json.dumps(result), flush=True)
"""

CASES: list[list[Any]] = [
    [0, 1, 0.0, None],
    [1, 2, 0.05, None],
    [3, 2, 0.05, None],
    [2, 2, 0.0, "cpu"],
    [3, 1, 0.05, "nvme"],
]


def test_all_stages_accumulation_clipping_and_offloading_give_the_numbers_of_ddp(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = results(run_ranks(script, json.dumps(CASES), str(tmp_path)))
    assert len(found) == len(CASES)
    for case, (worst, apart, again, saved) in zip(CASES, found, strict=True):
        assert saved == 6, case
        assert worst < 1e-5, case
        assert apart < 1e-5, case
        assert again < 1e-6, f"{case}: load_state does not lead back to where save_state was"
