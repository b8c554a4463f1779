"""Makes the DeepSpeed checkpoints beside this file, and `truth.safetensors` in each: what DeepSpeed says they hold.

    PYTHONPATH=src python tests/checkpoint/deepspeed/make.py [CASE ...]

Needs DeepSpeed, on the CPU. Those that are committed were made with DeepSpeed 0.19.8 and torch 2.13.0.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FOLDER = Path(__file__).parent
VOCABULARY, WIDTH, STEPS = 11, 6, 3  # odd numbers of elements: partitions cut through parameters and need padding

BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 17, "hysteresis": 1}}
CASES: dict[str, dict[str, Any]] = {
    "stage0-fp32": {"stage": 0, "tied": True},
    "stage1-fp32": {"stage": 1, "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.01}}},
    "stage1-bf16": {"stage": 1, **BF16},
    "stage1-bf16-three-ranks": {"stage": 1, "ranks": 3, **BF16},
    "stage1-bf16-wide-gradients": {"stage": 1, "data_types": {"grad_accum_dtype": "fp32"}, **BF16},
    "stage2-bf16": {"stage": 2, "tied": True, "zero": {"round_robin_gradients": True}, **BF16},
    "stage2-bf16-aligned": {"stage": 2, "zero": {"parameter_alignment": True}, **BF16},
    "stage2-fp16-elastic": {"stage": 2, "zero": {"elastic_checkpoint": True}, **FP16},
    "stage3-bf16": {"stage": 3, "tied": True, "zero": {"sub_group_size": 60}, **BF16},
    "stage3-bf16-three-ranks": {"stage": 3, "ranks": 3, **BF16},
    "stage3-bf16-no-frozen": {"stage": 3, "exclude_frozen": True, **BF16},
    "stage3-fp16": {"stage": 3, **FP16},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH + 1), nn.Linear(WIDTH + 1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH - 1), requires_grad=False)
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("secret", torch.zeros(2), persistent=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.embedding(tokens)
        x = x * self.scale.to(x.dtype) + nn.functional.pad(self.shift, (0, 1))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens.flatten())


def configuration(case: dict[str, Any]) -> dict[str, Any]:
    extra = {key: case[key] for key in ("bf16", "fp16", "data_types", "optimizer") if key in case}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.01}},
        "zero_optimization": {"stage": case["stage"], "stage3_param_persistence_threshold": 0, **case.get("zero", {})},
        **extra,
    }


def train(name: str, rank: int) -> None:
    """One rank of one case: a few steps, a checkpoint, and what is true."""
    import deepspeed

    case = CASES[name]
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does the work; nothing need be compiled
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # slow there, but torch can do it
    torch.manual_seed(0)
    model = Model(case.get("tied", False))
    trained = [(key, parameter) for key, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [item for item in trained if item[1].dim() > 1], "weight_decay": 0.1},
        {"params": [item for item in trained if item[1].dim() == 1], "weight_decay": 0.0},
    ]
    if "optimizer" in case:
        given: dict[str, Any] = {"model_parameters": [parameter for _, parameter in trained]}
    else:
        given = {"optimizer": torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))}
    engine, *_ = deepspeed.initialize(model=model, config=configuration(case), **given)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        engine.backward(engine(torch.randint(VOCABULARY, (2, 5), generator=generator)))
        engine.step()
    client = {"epoch": 2, "best": [0.5, None], "note": "mine", "generator": torch.get_rng_state()[:8]}
    engine.save_checkpoint(
        str(FOLDER / name), client_state=client, exclude_frozen_parameters=case.get("exclude_frozen", False)
    )
    record(name, engine, rank)


def record(name: str, engine: Any, rank: int) -> None:
    """Writes what DeepSpeed's own functions give for each parameter."""
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from shardwell.checkpoint.files import write

    case = CASES[name]
    if case["stage"] in (1, 2):  # DeepSpeed links the state when the first group was stepped, before the second has any
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    truth = {f"model/{key}": value.clone() for key, value in engine.module.named_buffers() if key != "secret"}
    for key, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            current = parameter.detach().clone()
        if not parameter.requires_grad:
            truth |= {} if case.get("exclude_frozen") else {f"model/{key}": current}
            continue
        truth[f"model/{key}"] = whole(engine, parameter, None)
        truth |= {f"state/{key}/{state}": whole(engine, parameter, state) for state in ("exp_avg", "exp_avg_sq")}
        assert torch.equal(truth[f"model/{key}"].to(current.dtype), current)
    facts = {
        "counters": {key: getattr(engine, key) for key in ("global_steps", "global_samples", "skipped_steps")},
        "steps": STEPS - engine.skipped_steps,
        "loss_scale": getattr(engine.optimizer, "cur_scale", 1.0),
        "lr": engine.get_lr(),
    }
    if rank == 0:
        if case["stage"] > 0 and "data_types" not in case:  # its reader does not know those
            for key, value in get_fp32_state_dict_from_zero_checkpoint(str(FOLDER / name)).items():
                assert key == "head.weight" or torch.equal(truth[f"model/{key}"].to(value.dtype), value), key
        write(FOLDER / name / "truth.safetensors", truth, {"facts": json.dumps(facts)})


def whole(engine: Any, parameter: nn.Parameter, state: str | None) -> Tensor:
    """The master of a parameter, or its state, from the live optimizer."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() == 0:
        return (parameter if state is None else engine.optimizer.state[parameter][state]).detach().clone()
    if not engine.zero_round_robin_gradients():
        found = safe_get_full_optimizer_state(parameter, state) if state else safe_get_full_fp32_param(parameter)
        return found.detach().clone()
    # DeepSpeed's functions know no parameters in another order: the flat tensors of all ranks, cut in that order.
    optimizer = engine.optimizer
    for group, flat in zip(optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
        if any(one is parameter for one in group):
            own = flat.detach() if state is None else optimizer.optimizer.state[flat][state]
            parts = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(parts, own.contiguous())
            cut = torch.cat(parts)[: sum(one.numel() for one in group)].split([one.numel() for one in group])
            index = next(index for index, one in enumerate(group) if one is parameter)
            return cut[index].view(parameter.shape).clone()
    raise AssertionError("a parameter that is in no group")


def launch(name: str) -> None:
    """Runs the ranks of a case, each in a process of its own."""
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = CASES[name].get("ranks", 2)
    shared = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    processes = [
        subprocess.Popen([sys.executable, __file__, "--rank", name], env={**shared, "RANK": rank, "LOCAL_RANK": rank})
        for rank in map(str, range(ranks))
    ]
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise SystemExit(f"{name}: failed")
    for script in (FOLDER / name).glob("*.py"):  # DeepSpeed's own, for its own way of reading
        script.unlink()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        train(sys.argv[2], int(os.environ["RANK"]))
    else:
        for chosen in sys.argv[1:] or CASES:
            launch(chosen)
