"""`DeepSpeedEngine` in one process: its loop, its answers, its files and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.as_deepspeed import MARK, results, run_python

LOOP = f"""
import json, math, os, warnings
import shardwell.compat.deepspeed
import deepspeed, torch
from deepspeed.runtime.lr_schedules import WarmupLR

said = {{}}


def config(stage=0, **others):
    return {{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1,
            "zero_optimization": {{"stage": stage}}, **others}}


def make(stage=0, optimizer=torch.optim.SGD, lr=0.1, **others):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    made = optimizer(model.parameters(), lr=lr)
    return deepspeed.initialize(model=model, optimizer=made, config=config(stage, **others))


def error(function, kind=Exception):
    try:
        function()
    except kind as found:
        return f"{{type(found).__name__}}: {{found}}"
    return None


x = torch.ones(2, 4)

# DeepSpeed's default clips to 1, and a step that is not finite is skipped without an error
engine, optimizer, loader, schedule = make()
before = torch.cat([p.detach().flatten().clone() for p in engine.module.parameters()])
loss = engine(x).sum() * 100
engine.backward(loss)
engine.step()
after = torch.cat([p.detach().flatten() for p in engine.module.parameters()])
said["clipped"] = [float((after - before).norm()) / 0.1, engine.get_global_grad_norm() > 1, engine.gradient_clipping()]
engine.backward(engine(x).sum() * math.inf)
engine.step()
said["skipped"] = [engine.was_step_applied(), optimizer.overflow, engine.skipped_steps, engine.global_steps]
same = torch.cat([p.detach().flatten() for p in engine.module.parameters()])
said["kept"] = bool(torch.equal(after, same))
said["none"] = [loader, schedule]

# the answers of the engine
said["answers"] = [
    engine.get_lr(), engine.get_mom(), engine.get_type(), engine.train_batch_size(), engine.get_batch_info(),
    engine.zero_optimization(), engine.zero_optimization_stage(), engine.fp16_enabled(), engine.bfloat16_enabled(),
    engine.zero_offload_optimizer(), engine.zero_reduce_bucket_size(), engine.local_rank, engine.dp_world_size,
    engine.loss_scale(), engine.dynamic_loss_scale(), engine.autotuning_enabled(), optimizer.cur_scale,
    engine.config is not engine.settings, engine.scheduler_name(), engine.optimizer_name(),
]
engine.set_lr(0.5)
said["lr"] = engine.get_lr()
engine.set_train_batch_size(8)
said["sizes"] = list(engine.get_batch_info())
said["bad size"] = error(lambda: engine.set_train_batch_size(7), ValueError)
said["no size"] = error(lambda: engine.set_train_micro_batch_size("x"), ValueError)
said["no rate"] = error(lambda: engine.set_lr(float("nan")), ValueError)
engine.set_train_micro_batch_size(4)
said["more sizes"] = list(engine.get_batch_info())
for _ in range(2):  # two micro-steps are done: the next boundary is the second one from here
    engine.backward(engine(x).sum())
    engine.step()
said["accumulated"] = [engine.was_step_applied(), engine.global_steps]
said["unknown"] = error(lambda: engine.no_such_attribute, AttributeError)
said["replaced"] = error(lambda: engine.timers, AttributeError)
said["has"] = [hasattr(engine, "timers"), hasattr(engine, "no_such_attribute")]
said["not stage 3"] = error(getattr(engine, "_zero3_consolidated_16bit_state_dict"), ValueError)
engine.set_train_batch_size(4)
engine.optimizer.param_groups[0]["lr"] = 0.0
both = []
for times in (2, 1):
    with engine.no_sync():
        for _ in range(times - 1):
            engine.backward(engine(x).sum() * 0.01)
        if times == 2:
            said["no_sync step"] = error(engine.step, AssertionError)
    engine.backward(engine(x).sum() * 0.01)
    engine.step()
    both.append(engine.get_global_grad_norm())
said["no_sync"] = [both[0] / both[1], 1.0]
said["id below stage 3"] = any(hasattr(p, "ds_id") for p in engine.module.parameters())
engine.destroy()

# arguments of initialize
model = torch.nn.Linear(4, 1)
said["no model"] = error(lambda: deepspeed.initialize(config=config()), AssertionError)
said["no config"] = error(lambda: deepspeed.initialize(model=model), AssertionError)


class Arguments:
    deepspeed_config = "file.json"
    local_rank = 0


other = torch.optim.SGD([torch.zeros(1)], lr=1.0)
late = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1.0)
said["foreign schedule"] = error(lambda: deepspeed.initialize(model=model, lr_scheduler=late, config=config()))
said["two configs"] = error(lambda: deepspeed.initialize(args=Arguments, model=model, config=config()), AssertionError)
said["mesh"] = error(lambda: deepspeed.initialize(model=model, config=config(), mesh_param=(1, 2)))
import base64
text = base64.urlsafe_b64encode(json.dumps(config(1)).encode()).decode()
engine, _, _, made = deepspeed.initialize(
    model=model,
    model_parameters=[{{"params": [model.weight], "lr": 0.25}}, {{"params": [model.bias]}}],
    optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.5),
    lr_scheduler=lambda optimizer: WarmupLR(optimizer, 0.0, 1.0, warmup_num_steps=4, warmup_type="linear"),
    config=text,
)
said["base64"] = [engine.zero_optimization_stage(), engine.config["zero_optimization"]["stage"]]
said["groups"] = len(engine.optimizer.param_groups)
said["callable schedule"] = [type(made).__name__, made is engine.lr_scheduler]
engine.backward(engine(x).sum())
engine.step(lr_kwargs={{"last_batch_iteration": 3}})
said["lr_kwargs"] = engine.get_lr()
engine.lr_scheduler = None
engine.backward(engine(x).sum())
engine.step()
said["no schedule"] = engine.get_lr()
engine.destroy()

# the schedule of the file has DeepSpeed's numbers: the first two steps have the rate of step 0
engine, _, _, schedule = make(
    scheduler={{"type": "WarmupLR", "params": {{"warmup_min_lr": 0.0, "warmup_max_lr": 1.0, "warmup_num_steps": 4,
               "warmup_type": "linear"}}}}
)
rates = []
for _ in range(4):
    rates.append(engine.get_lr()[0])
    engine.backward(engine(x).sum())
    engine.step()
said["rates"] = rates
said["schedule"] = [engine.scheduler_name(), engine.scheduler_params()["warmup_num_steps"]]
# a client moves the model when it is done: shards stay with the engine
moved = make(3, shardwell={{"shard_at_world_one": True}}, zero_optimization={{
    "stage": 3, "stage3_param_persistence_threshold": 0}})[0]
moved.module.register_buffer("count", torch.zeros(1))
from shardwell.zero import is_released
moved.module.cpu()
moved.module.double()
said["moved"] = [moved.module.count.dtype == torch.float64, all(map(is_released, moved.module.parameters())),
                 str(moved(x).dtype)]
# an evaluation without an optimizer keeps a schedule out
settings = config(3, scheduler={{"type": "WarmupLR", "params": {{}}}})
only = deepspeed.initialize(model=torch.nn.Linear(4, 1), config=settings)
said["evaluation"] = [only[1], only[3], float(only[0](x).sum()) is not None]
said["no optimizer"] = error(lambda: only[0].backward(only[0](x).sum()), AssertionError)
print({MARK!r} + json.dumps(said, default=str))
"""

FILES = f"""
import inspect, json, os, sys
import shardwell.compat.deepspeed
import deepspeed, torch
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

folder = sys.argv[1]
said = {{}}


def make(stage, gather=True):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    zero = {{"stage": stage, "stage3_gather_16bit_weights_on_model_save": gather}}
    adam = {{"type": "Adam", "params": {{"lr": 0.1}}}}
    settings = {{"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "optimizer": adam}}
    trained = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=settings)[0]


def train(engine):
    engine.backward(engine(torch.ones(2, 4)).pow(2).sum())
    engine.step()


for stage in (1, 3):
    root = os.path.join(folder, str(stage))
    engine = make(stage)
    said[f"nothing {{stage}}"] = engine.load_checkpoint(os.path.join(folder, "none"))
    train(engine)
    train(engine)
    saved = engine.save_checkpoint(root, client_state={{"epoch": 3}})
    tags = sorted(name for name in os.listdir(root) if os.path.isdir(os.path.join(root, name)))
    with open(os.path.join(root, "latest")) as file:
        said[f"saved {{stage}}"] = [saved, tags, file.read().strip(), os.access(root + "/zero_to_fp32.py", os.X_OK)]
    engine.save_checkpoint(root, tag="lean", exclude_frozen_parameters=True)
    whole = engine.module_state_dict()
    said[f"lean {{stage}}"] = sorted(engine.module_state_dict(exclude_frozen_parameters=True))
    train(engine)
    other = engine.module_state_dict()
    path, state = engine.load_checkpoint(root, tag=tags[0])
    back = engine.module_state_dict()
    same = all(torch.equal(back[n], whole[n]) for n in whole)
    said[f"loaded {{stage}}"] = [path.endswith(tags[0]), state, engine.global_steps, same]
    said[f"moved {{stage}}"] = any(not torch.equal(other[n], whole[n]) for n in whole)
    said[f"16bit {{stage}}"] = engine.save_16bit_model(root, "weights.bin")
    found = torch.load(os.path.join(root, "weights.bin"), weights_only=True)
    said[f"weights {{stage}}"] = all(torch.equal(found[n], whole[n]) for n in whole) and set(found) == set(whole)
    engine.load_module_state_dict({{"module": other}})
    said[f"module {{stage}}"] = all(torch.equal(engine.module_state_dict()[n], other[n]) for n in other)
    engine.destroy()
engine = make(3, gather=False)
wrote = engine.save_16bit_model(folder, "no.bin")
said["told not to"] = [engine.zero_gather_16bit_weights_on_model_save(), wrote, os.path.exists(folder + "/no.bin")]
said["signature"] = "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters
part = torch.arange(100.0)[10:12]
clone = clone_tensors_for_torch_save({{"a": [part]}})["a"][0]
said["clone"] = [clone.tolist(), clone.untyped_storage().nbytes()]
loader = engine.deepspeed_io(torch.utils.data.TensorDataset(torch.arange(8.0)), route="eval")
said["loader"] = [[batch[0].tolist() for batch in loader], len(loader)]
print({MARK!r} + json.dumps(said, default=str))
"""


def _say(script: str, folder: Path, *args: str) -> Any:
    done = run_python("-c", script, *args, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    [said] = results(done.stdout)
    return said


@pytest.mark.slow
def test_the_loop_and_the_answers_are_deepspeeds(tmp_path: Path) -> None:
    said = _say(LOOP, tmp_path)
    assert said["clipped"][0] == pytest.approx(1.0, rel=1e-4)
    assert said["clipped"][1:] == [True, 1.0]
    assert said["skipped"] == [False, True, 1, 2]
    assert said["kept"]
    assert said["none"] == [None, None]
    answers = [[0.1], [0.0], [0.0], 2, [2, 2, 1], False, 0, False, False, None, 500000000, 0, 1, 0.0, False, False, 1.0]
    assert said["answers"] == [*answers, True, None, "SGD"]
    assert said["lr"] == [0.5]
    assert said["sizes"] == [8, 2, 4]
    assert "multiple of 2" in said["bad size"]
    assert said["no size"] == "ValueError: set_train_micro_batch_size(x): expected a whole number"
    assert said["no rate"] == "ValueError: set_lr(nan): expected a finite number"
    assert said["more sizes"] == [16, 4, 4]
    assert said["accumulated"] == [True, 3]
    assert said["unknown"] == "AttributeError: 'DeepSpeedEngine' object has no attribute 'no_such_attribute'"
    assert "wall_clock_breakdown" in said["replaced"]
    assert said["has"] == [False, False]
    assert "stage 3" in said["not stage 3"]
    assert not said["id below stage 3"]
    assert all(said[name] for name in ("no model", "no config", "two configs"))
    assert "1 data-parallel ranks x 2 that share sequences are not the 1 rank(s)" in said["mesh"]
    assert "rates that nothing reads" in said["foreign schedule"]
    assert "inside no_sync" in said["no_sync step"]
    assert said["no_sync"] == pytest.approx([2.0, 1.0], rel=1e-4)
    assert (said["base64"], said["groups"], said["callable schedule"]) == ([1, 1], 2, ["WarmupLR", True])
    assert said["lr_kwargs"] == [0.75, 0.75]
    assert said["no schedule"] == said["lr_kwargs"]
    assert said["rates"] == pytest.approx([0.0, 0.0, 0.25, 0.5])
    assert said["schedule"] == ["WarmupLR", 4]
    assert said["evaluation"] == [None, None, True]
    assert "no optimizer" in said["no optimizer"]
    assert said["moved"] == [True, True, "torch.float32"]


@pytest.mark.slow
def test_files_are_a_contract(tmp_path: Path) -> None:
    said = _say(FILES, tmp_path, str(tmp_path))
    for stage in (1, 3):
        assert said[f"nothing {stage}"] == [None, None]
        assert said[f"saved {stage}"] == [True, ["global_step2"], "global_step2", True]
        assert said[f"lean {stage}"] == ["0.bias", "1.bias", "1.weight"]
        assert said[f"loaded {stage}"] == [True, {"epoch": 3}, 2, True]
        assert said[f"moved {stage}"]
        assert said[f"16bit {stage}"]
        assert said[f"weights {stage}"]
        assert said[f"module {stage}"]
    assert said["told not to"] == [False, False, False]
    assert said["signature"]
    assert said["clone"] == [[10.0, 11.0], 8]
    assert said["loader"] == [[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]], 4]
