"""Manifests with a right checksum that say what no engine has written: refused, and nothing is changed."""

from __future__ import annotations

import json
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwell
from shardwell.errors import CheckpointError
from tests.support.checkpoint_legs import everything
from tests.support.internals import loss_scale_of
from tests.support.models import Gpt, batches, zero

TAG = "global_step2"
ABSENT = object()


class Counting(nn.Module):
    """A module with extra state, which must be a count."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 3

    def forward(self, x: Tensor) -> Tensor:
        return x

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = int(state["count"])


def engine_of(**more: Any) -> shardwell.Engine:
    torch.manual_seed(0)
    model = Gpt(blocks=1)
    model.extra = Counting()
    config = zero(
        2,
        fp16={"enabled": True, "initial_scale_power": 4},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        **more,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine


def step(engine: shardwell.Engine, number: int) -> None:
    engine.backward(engine(batches(number + 1, 4)[number]))
    engine.step()


def all_of(engine: shardwell.Engine) -> dict[str, Any]:
    """Whatever a load may change."""
    return {
        **everything(engine),
        "counters": (engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups],
        "schedule": engine.lr_scheduler.state_dict(),
        "scale": loss_scale_of(engine).state_dict(),
        "extra": engine.module.extra.count,
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "numpy": [value if isinstance(value, (int, str, float)) else value.tolist() for value in np.random.get_state()],
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def put(content: Any, path: str, value: Any) -> None:
    *way, last = path.split("|")
    for key in way:
        content = content[int(key) if isinstance(content, list) else key]
    last = int(last) if isinstance(content, list) else last  # type: ignore[assignment]
    if value is ABSENT:
        del content[last]
    else:
        content[last] = value


def forge(folder: Path, path: str, value: Any) -> None:
    """Changes a value of a manifest, and makes its checksum right."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["checksum"]
    put(content["values"], path, value)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["checksum"] = f"{zlib.crc32(text.encode()):08x}"
    (folder / "manifest.json").write_text(json.dumps(content))


NUMBERS = ["x", None, [], {}, -1, True, 1.5, 10**300]
FORGERIES: list[tuple[str, Any]] = [
    *((f"counters|{key}", value) for key in ("global_steps", "micro_steps", "skipped_steps") for value in NUMBERS),
    *(("counters", value) for value in ("x", [], 3)),
    ("counters|accumulation_steps", "4"),
    ("rng/0", []),
    ("rng/0", {"python": 3}),
    ("rng/0|python", ABSENT),
    ("rng/0|python", {"$tuple": [3, {"$tuple": [1, 2, 3]}, None]}),
    ("rng/0|python", {"$tuple": [9, {"$tuple": [1] * 625}, None]}),
    ("rng/0|python", {"$tuple": [3, {"$tuple": [-(2**70)] * 625}, None]}),
    ("rng/0|python|$tuple|1|$tuple|624", 10**6),
    ("rng/0|torch", "state"),
    ("rng/0|torch", {"$tensor": "model/head.weight"}),
    ("rng/0|torch", {"$tensor": "nowhere"}),
    ("rng/0|numpy", {"$tuple": ["MT19937", 1, 2, 3, 4]}),
    ("rng/0|numpy", 7),
    ("optimizer", "AdamW"),
    ("optimizer", {"param_groups": 3}),
    ("optimizer|kind", "SGD"),
    ("optimizer|param_groups|0", []),
    *((f"optimizer|param_groups|0|{key}", value) for key in ("lr", "eps", "weight_decay") for value in NUMBERS[:6]),
    ("optimizer|param_groups|0|lr", {"$float": "nan"}),
    ("optimizer|param_groups|0|lr", {"$float": "inf"}),
    ("optimizer|param_groups|0|betas", {"$tuple": [0.9]}),
    ("optimizer|param_groups|0|betas", {"$tuple": [0.9, 1.5]}),
    ("optimizer|param_groups|0|betas", {"$tuple": [0.9, "x"]}),
    ("optimizer|param_groups|0|betas", 0.9),
    ("optimizer|param_groups|0|amsgrad", "yes"),
    ("optimizer|param_groups|0|foreach", "x"),
    ("optimizer|param_groups|0|fused", 1e300),
    ("scheduler", 5),
    ("scheduler", "x"),
    ("scheduler|last_batch_iteration", True),
    ("scheduler|last_batch_iteration", "x"),
    ("scheduler|last_batch_iteration", []),
    ("scheduler|last_batch_iteration", {"$odd": 1}),
    ("loss_scale", 5),
    ("loss_scale|value", 0),
    ("loss_scale|value", -2.0),
    ("loss_scale|value", "big"),
    ("loss_scale|left", -1),
    ("loss_scale|clean", "x"),
    ("extra", 5),
    ("extra", {"extra._extra_state": {"count": "x"}}),
    ("extra", {"nowhere._extra_state": {"count": 1}}),
    ("extra", {"head._extra_state": {"count": 1}}),
    ("client", 5),
    ("aliases", 5),
    ("aliases", {"head.weight": 3}),
    ("scalar/head.weight/step", "x"),
    ("scalar/head.weight/step", -1),
    ("scalar/head.weight/step", True),
    ("scalar/head.weight/step", None),
    ("scalar/head.weight/step", {"kept": {"$tensor": "float32 2 00"}}),
    ("scalar/head.weight/step", {"other": 1}),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("saved")
    engine = engine_of()
    for number in range(2):
        step(engine, number)
    engine.save_checkpoint(root)
    return root


@pytest.fixture(scope="module")
def engine() -> shardwell.Engine:
    engine = engine_of()
    step(engine, 3)
    return engine


@pytest.mark.slow
def test_a_forged_value_is_refused_and_nothing_is_changed(
    saved: Path, engine: shardwell.Engine, tmp_path: Path
) -> None:
    wrong = []
    before = all_of(engine)
    for number, (path, value) in enumerate(FORGERIES):
        root = tmp_path / str(number)
        shutil.copytree(saved, root)
        forge(root / TAG, path, value)
        try:
            engine.load_checkpoint(root)
            wrong.append(f"{path} = {value!r:.60}: loaded")
            break
        except CheckpointError as error:
            if TAG not in str(error):
                wrong.append(f"{path} = {value!r:.60}: {error}")
        except Exception as error:
            wrong.append(f"{path} = {value!r:.60}: {type(error).__name__}: {error}")
        shutil.rmtree(root)
        after = all_of(engine)
        changed = [key for key in before if not same(before[key], after[key])]
        if changed:
            wrong.append(f"{path} = {value!r:.60}: changed {changed}")
            break
    assert wrong == []
    step(engine, 4)


def test_what_was_saved_is_taken_over(saved: Path) -> None:
    first, second = engine_of(), engine_of()
    step(second, 5)
    second.module.extra.count = 9
    first.load_checkpoint(saved)
    expected = all_of(first)
    second.load_checkpoint(saved)
    found = all_of(second)
    assert [key for key in expected if not same(expected[key], found[key])] == []
    assert second.global_steps == 2
    assert second.module.extra.count == 3
