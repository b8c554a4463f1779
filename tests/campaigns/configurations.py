"""Mutated configurations through `shardwell config` and `initialize`: each works, or is refused by one clear sentence.

    python -m tests.campaigns.configurations --count 20000 --seed 1 --minutes 30 --json results.json

They are tried in a worker process (`workers.py`).
"""

from __future__ import annotations

import copy
import json
import random
import sys
from typing import Any

from tests.campaigns.result import Result, command_line
from tests.campaigns.workers import try_cases, work

GOOD = ("works", "refused", "stopped")

_BASES: list[dict[str, Any]] = [
    {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}},
    {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "leaf_module": {"names": ["1"]}},
        "optimizer": {"type": "SGD", "params": {"lr": "1e-2", "momentum": 0.9, "nesterov": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 3}},
    },
    {
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 10},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5, "pin_memory": True}},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.01, "adam_w_mode": False}},
    },
    {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "zero_quantized_weights": True},
        "optimizer": {"type": "Lion", "params": {"lr": 1e-4}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.0, "cycle_max_lr": 0.1}},
        "shardwell": {"commit": "after_norm", "nonfinite": "skip", "shard_at_world_one": True},
    },
    {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "aio": {"block_size": 4096, "queue_depth": 2},
        "optimizer": {"type": "RMSprop", "params": {"lr": 0.01, "alpha": 0.9}},
        "zero_optimization": {"stage": 0},
    },
]
_ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 0.5, -0.5, 1.5, 1e-30, 1e30, 1e400, -1e400, float("nan"), 10**30, 10**400,
    -(10**400), 2**63, "", "auto", "none", "cpu", "nvme", "3e-5", "1e400", "nan", "true", "off", "x" * 5000, "a\0b",
    "\ud800", "/no/such/folder", "/dev/null", "../..", [], [1], [0.9, 0.99], [None, None], [[[]]], {}, {"a": 1},
    {"enabled": True}, {"params": {"params": {}}}, "AdamW", "adamw", "LBFGS", "Muon", "Lamb", "fp16", "bf16", "float64",
]  # fmt: skip

_LETTERS = [*"{}[],:\"'#/\\\0\n9eE-+.", "NaN", "Infinity", "9" * 5000]


def mutated(rng: random.Random) -> Any:
    """A configuration with a few things wrong, or right: a dictionary, or its text."""
    config = copy.deepcopy(rng.choice(_BASES))
    for _ in range(rng.choice([1, 1, 2, 3])):
        rng.choice([_replace, _replace, _replace, _remove, _add, _move])(config, rng)
    if rng.random() < 0.3:
        text = json.dumps(config, indent=rng.choice([None, 1]))
        return _scratched(text, rng) if rng.random() < 0.6 else text
    return config


def _spots(config: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    items = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, value in items:
        found.append((config, key))
        _spots(value, found)
    return found


def _replace(config: dict[str, Any], rng: random.Random) -> None:
    if spots := _spots(config, []):
        place, key = rng.choice(spots)
        place[key] = copy.deepcopy(rng.choice(_ODD))


def _remove(config: dict[str, Any], rng: random.Random) -> None:
    if spots := [(place, key) for place, key in _spots(config, []) if isinstance(place, dict)]:
        place, key = rng.choice(spots)
        del place[key]


def _add(config: dict[str, Any], rng: random.Random) -> None:
    from shardwell.config.suggestions import all_keys

    places = [config, *(place[key] for place, key in _spots(config, []) if isinstance(place[key], dict))]
    names = [key.rpartition(".")[2] for key in all_keys()]
    rng.choice(places)[rng.choice([*names, "_comment", "lrr", "", "a.b"])] = copy.deepcopy(rng.choice(_ODD))


def _move(config: dict[str, Any], rng: random.Random) -> None:
    """A whole block of another one."""
    other = copy.deepcopy(rng.choice(_BASES))
    key = rng.choice(list(other))
    config[key] = other[key]


def _scratched(text: str, rng: random.Random) -> str:
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.randrange(len(text) + 1)
        how = rng.randrange(4)
        if how == 0:
            text = text[:at] + text[at + 1 :]
        elif how == 1:
            text = text[:at] + rng.choice(_LETTERS) + text[at:]
        elif how == 2:
            text = text[:at] + text[at : at + 10] + text[at:]
        else:
            text = text[: max(at, 1)]
    return text if text.lstrip().startswith("{") else "{" + text


def outcome_of(config: Any) -> str:
    """What becomes of one: works, refused by a sentence, or something that must not be."""
    import torch

    import shardwell
    from shardwell.config import load, remarks, table, told

    try:
        found = load(config, world_size=1)
        table(found)
        told(remarks(found))
        json.dumps(found.to_dict())
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        engine, *_ = shardwell.initialize(model=model, config=config, device="cpu")
    except shardwell.ShardwellError as error:
        str(error).encode()
        return f"refused: {type(error).__name__}"
    except Exception as error:
        return f"raw: {type(error).__name__}: {str(error)[:200]}"
    try:
        for _ in range(2 * engine.gradient_accumulation_steps() if engine.gradient_accumulation_steps() < 5 else 0):
            loss = engine(torch.ones(2, 4)).float().square().mean()
            engine.backward(loss)
            if engine.optimizer is not None:
                engine.step()
    except shardwell.ShardwellError as error:
        return f"stopped: {type(error).__name__}"
    except Exception as error:
        return f"raw in a step: {type(error).__name__}: {str(error)[:200]}"
    finally:
        engine.destroy(whole=False)
    return "works"


def outcome_of_number(seed: int, number: int) -> str:
    return outcome_of(mutated(random.Random(f"{seed} {number}")))


def campaign(count: int, seed: int, seconds: float) -> Result:
    result = Result("configurations")
    return try_cases(result, "tests.campaigns.configurations", (count, seed, seconds), GOOD)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(outcome_of_number, *map(int, sys.argv[2:]))
    else:
        sys.exit(command_line(campaign, "tests.campaigns.configurations", __doc__))
