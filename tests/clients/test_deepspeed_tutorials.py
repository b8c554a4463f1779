"""Configurations of DeepSpeed's tutorials, as they are printed there, train on two ranks as plain PyTorch does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.as_deepspeed import MARK, results, run_ranks

pytestmark = pytest.mark.slow

SCRIPT = f"""
import copy, json, os, sys
import deepspeed, torch
from torch import nn

rank, folder = int(os.environ["RANK"]), sys.argv[1]
deepspeed.init_distributed(dist_backend="gloo")
TUTORIAL = {{
    "train_batch_size": 8, "steps_per_print": 2000, "gradient_clipping": 1.0, "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "optimizer": {{"type": "Adam", "params": {{"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}}},
    "scheduler": {{"type": "WarmupLR",
                  "params": {{"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10}}}},
}}
BUCKETS = {{"allgather_partitions": True, "reduce_scatter": True, "allgather_bucket_size": 50000000,
           "reduce_bucket_size": 50000000, "overlap_comm": True, "contiguous_gradients": True, "cpu_offload": False}}
FP16 = {{"enabled": True, "fp16_master_weights_and_grads": False, "loss_scale": 0, "loss_scale_window": 500,
        "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 10}}
BF16 = {{"enabled": True}}
LIMITS = {{"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9, "stage3_prefetch_bucket_size": 1e7,
          "reduce_bucket_size": 1e7, "sub_group_size": 1e9, "stage3_param_persistence_threshold": 10}}
NVME = {{"device": "nvme", "nvme_path": folder, "pin_memory": True}}
INFINITY = {{"stage": 3, "contiguous_gradients": True, **LIMITS,
            "offload_optimizer": {{**NVME, "buffer_count": 4, "pipeline_read": False, "pipeline_write": False}},
            "offload_param": {{**NVME, "max_in_cpu": 0, "buffer_count": 5, "buffer_size": 1e8}}}}
AIO = {{"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True}}
OFFLOAD = {{"stage": 3, **LIMITS, "offload_optimizer": {{"device": "cpu", "pin_memory": True}},
           "offload_param": {{"device": "cpu", "pin_memory": True}}, "overlap_comm": True}}
CASES = {{
    **{{f"fp16 at stage {{s}}": {{"fp16": FP16, "zero_optimization": {{"stage": s, **BUCKETS}}}} for s in range(4)}},
    **{{f"bf16 at stage {{s}}": {{"bf16": BF16, "zero_optimization": {{"stage": s}}}} for s in range(4)}},
    "no block": {{}},
    "ZeRO-Offload": {{"zero_optimization": {{"stage": 2, "offload_optimizer": {{"device": "cpu"}}}}}},
    "ZeRO-Offload, old spelling": {{"zero_optimization": {{"stage": 2, "cpu_offload": True}}}},
    "ZeRO-3 Offload": {{"zero_optimization": OFFLOAD}},
    "ZeRO-Infinity": {{"zero_optimization": INFINITY, "aio": AIO}},
    "ZeRO-Infinity, fp16": {{"zero_optimization": INFINITY, "aio": AIO, "fp16": FP16}},
}}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def batches(of):
    rows = torch.Generator().manual_seed(of)
    for _ in range(5):
        yield torch.randn(4, 16, generator=rows), torch.randint(0, 4, (4,), generator=rows)


def plain(rates):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.8, 0.999), weight_decay=3e-7)
    found = []
    for rate, (mine, others) in zip(rates, zip(batches(0), batches(1))):
        optimizer.param_groups[0]["lr"] = rate
        losses = [nn.functional.cross_entropy(model(x), y) for x, y in (mine, others)]
        optimizer.zero_grad()
        (sum(losses) / 2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append([losses[0].item(), norm.item()])
    return found


def sharded(config):
    stage = config.get("zero_optimization", {{}}).get("stage", 0)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = build()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    kind = torch.half if engine.fp16_enabled() else torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    found, rates = [], []
    for x, y in batches(rank):
        loss = nn.functional.cross_entropy(engine(x.to(kind)).float(), y)
        rates.append(engine.get_lr()[0])
        engine.backward(loss)
        engine.step()
        found.append([loss.item(), float(engine.get_global_grad_norm())])
    skipped = engine.skipped_steps
    engine.destroy()
    return {{"found": found, "rates": rates, "skipped": skipped}}


said = {{}}
for name, case in CASES.items():
    said[name] = sharded(copy.deepcopy({{**TUTORIAL, **case}}))
if rank == 0:
    print({MARK!r} + json.dumps({{"plain": plain(said["no block"]["rates"]), "cases": said}}), flush=True)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tutorials")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "nvme").mkdir()
    (said,) = results(run_ranks(folder / "script.py", str(folder / "nvme")))
    return dict(said)


def test_losses_and_norms_are_those_of_plain_pytorch(found: dict[str, Any]) -> None:
    far = {}
    for name, case in found["cases"].items():
        tolerance = 0.03 if "16" in name else 1e-4  # bf16 has 8 bits; a norm over its gradients is off by more
        for (loss, norm), (expected, expected_norm) in zip(case["found"], found["plain"], strict=True):
            if abs(loss - expected) > tolerance * expected or abs(norm - expected_norm) > tolerance * expected_norm:
                far[name] = (loss, expected, norm, expected_norm)
    assert far == {}


def test_rates_are_those_of_the_warm_up_and_no_step_was_skipped(found: dict[str, Any]) -> None:
    rates = {tuple(case["rates"]) for case in found["cases"].values()}
    assert len(rates) == 1
    assert {case["skipped"] for case in found["cases"].values()} == {0}
    first = next(iter(rates))
    assert list(first) == sorted(first)
    assert 0 < first[-1] < 1e-3
