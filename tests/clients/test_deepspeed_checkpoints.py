"""Checkpoints of a `DeepSpeedEngine`: what is saved comes back, at every stage, with the files that clients expect."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwell.compat.deepspeed_api import universal
from shardwell.compat.deepspeed_api.checkpoint_names import UNIVERSAL_CHECKPOINT_INFO
from shardwell.compat.deepspeed_api.initialization import initialize
from shardwell.compat.deepspeed_api.optimizer import DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3
from shardwell.compat.deepspeed_api.optimizers import DeepSpeedCPUAdam, FusedAdam, FusedLion
from shardwell.errors import CheckpointError
from shardwell.utils import safe_get_full_optimizer_state
from tests.support.ranks import Ranks

ADAM = {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.999], "weight_decay": 3e-7}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 100}}


class Counting(torch.optim.Optimizer):
    """SGD whose state is a number and a tensor of one element, neither of a parameter's shape."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    state = self.state[tensor]
                    state["calls"] = state.get("calls", 0) + 1
                    state["as_tensor"] = state.get("as_tensor", torch.zeros(1)) + 1
                    tensor.add_(tensor.grad, alpha=-group["lr"])


def net(seed: int, frozen: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    if frozen:
        model[0].requires_grad_(False)
    return model


def engine_of(config: dict[str, Any], seed: int = 0, frozen: bool = False, optimizer: Any = None) -> Any:
    model = net(seed, frozen)
    trained = [{"params": [p for p in model.parameters() if p.requires_grad], "name": "all"}]
    made = optimizer(trained[0]["params"]) if optimizer is not None else None
    return initialize(model=model, model_parameters=trained, optimizer=made, config=config)[0]


def settings(stage: int, **others: Any) -> dict[str, Any]:
    zero = {"stage": stage, **others.pop("zero", {})}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, "zero_optimization": zero, **others}


def train(engine: Any, steps: int, seed: int = 5) -> None:
    torch.manual_seed(seed + dist.get_rank())
    for _ in range(steps):
        engine.backward(engine(torch.randn(2, 6)).pow(2).sum())
        engine.step()


def state_of(engine: Any) -> dict[str, Tensor]:
    """Return weights, and Adam's moments, whole."""
    found = {name: value.float() for name, value in engine.module_state_dict().items()}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            moment = safe_get_full_optimizer_state(parameter, "exp_avg")
            if moment is not None:
                found[f"{name}/exp_avg"] = moment
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def round_trip(folder: str, config: dict[str, Any], frozen: bool) -> list[Any]:
    """Return whether everything, and then whether the weights alone, come back in engines of other weights."""
    engine = engine_of(config, frozen=frozen)
    train(engine, 3)
    saved = state_of(engine)
    engine.save_checkpoint(folder, tag="one")
    seen = [(Path(folder) / file).is_file() for file in ("zero_to_fp32.py", "zero_to_torch.py", "latest")]
    other = engine_of(config, seed=1, frozen=frozen)
    other.load_checkpoint(folder, tag="one")
    masters = [engine.optimizer.fp32_partitioned_groups_flat, other.optimizer.single_partition_of_fp32_groups]
    back = [
        same(saved, state_of(other)),
        all(torch.equal(a, b) for a, b in zip(*masters, strict=True)),
        (other.global_steps, other.skipped_steps, other.sparse_tensor_module_names) == (3, 0, frozenset()),
        other.lr_scheduler.state_dict() == engine.lr_scheduler.state_dict(),
    ]
    train(engine, 2, seed=9)
    train(other, 2, seed=9)
    back.append(same(state_of(engine), state_of(other)))
    bare = engine_of(config, seed=2, frozen=frozen)
    bare.load_checkpoint(folder, tag="one", load_optimizer_states=False, load_lr_scheduler_states=False)
    weights = {name: value for name, value in saved.items() if "/" not in name}
    back.append(same(weights, {name: value.float() for name, value in bare.module_state_dict().items()}))
    return [*back, *seen]


def kinds(config: dict[str, Any]) -> list[bool]:
    optimizer = engine_of(config).optimizer
    return [isinstance(optimizer, kind) for kind in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_goes_on_where_it_was_saved(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    plain = settings(stage, scheduler=WARMUP, bf16={"enabled": True})
    cases = [(plain, False), (plain, True)]
    if stage in (2, 3):
        cases.append((settings(stage, scheduler=WARMUP, zero={"cpu_offload": True}), False))
    for number, (config, frozen) in enumerate(cases):
        for rank in ranks.run(2, round_trip, str(tmp_path / str(number)), config, frozen):
            assert rank == [True] * len(rank)
    assert ranks.run(2, kinds, plain)[0] == [stage in (1, 2), stage == 3]


def odd_state(folder: str) -> list[Any]:
    config = settings(1, gradient_accumulation_steps=2, zero_allow_untested_optimizer=True)
    del config["optimizer"]
    engine = engine_of(config, optimizer=Counting)
    train(engine, 4)
    engine.save_checkpoint(folder)
    other = engine_of(config, seed=1, optimizer=Counting)
    other.load_checkpoint(folder)
    states = [list(one.optimizer.optimizer.state.values()) for one in (engine, other)]
    return [[(state["calls"], float(state["as_tensor"])) for state in found] for found in states]


def test_state_of_other_shapes_than_the_parameters_comes_back(ranks: Ranks, tmp_path: Path) -> None:
    for saved, loaded in ranks.run(2, odd_state, str(tmp_path)):
        assert saved
        assert saved == loaded
        assert set(map(tuple, saved)) == {(2, 2.0)}


def save_and_convert(folder: str, stage: int) -> None:
    engine = engine_of(settings(stage))
    train(engine, 3)
    engine.save_checkpoint(folder, tag="run", client_state={UNIVERSAL_CHECKPOINT_INFO: {"by": "me"}, "iteration": 3})
    if dist.get_rank() == 0:
        universal.main(SimpleNamespace(input_folder=f"{folder}/run", output_folder=f"{folder}/run_universal"))
        torch.save(state_of_one(folder), f"{folder}/expected.pt")
    dist.barrier()


def state_of_one(folder: str) -> dict[str, Tensor]:
    from shardwell.compat.deepspeed_api.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return dict(get_fp32_state_dict_from_zero_checkpoint(folder, tag="run"))


def load_universal(folder: str, stage: int) -> list[Any]:
    engine = engine_of(settings(stage, checkpoint={"load_universal": True}), seed=4)
    _, client = engine.load_checkpoint(folder)  # what `latest_universal` names, as in DeepSpeed
    weights = {name: value.float() for name, value in engine.module_state_dict().items()}
    moments = [name for name in state_of(engine) if "/" in name]
    train(engine, 1)
    expected = torch.load(f"{folder}/expected.pt", weights_only=True)
    return [same(weights, expected), len(moments), client["iteration"], client[UNIVERSAL_CHECKPOINT_INFO]]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_universal_checkpoint_loads_at_other_numbers_of_ranks(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    ranks.run(2, save_and_convert, str(tmp_path), stage)
    for size in (1, 2, 3):
        for found in ranks.run(size, load_universal, str(tmp_path), stage):
            assert found == [True, 4, 3, {"by": "me"}]


def different_tags(folder: str) -> str:
    engine = engine_of(settings(1))
    with pytest.raises(AssertionError) as caught:
        engine.save_checkpoint(folder, tag=f"tag-{dist.get_rank()}")
    assert isinstance(caught.value, CheckpointError)
    return str(caught.value)


def test_ranks_that_save_under_different_tags_are_told(ranks: Ranks, tmp_path: Path) -> None:
    for sentence in ranks.run(2, different_tags, str(tmp_path)):
        assert "rank 0 has 'tag-0', and rank 1 has 'tag-1'" in sentence


def of_the_file(kind: str, offload: bool, params: dict[str, Any]) -> tuple[str, Any]:
    config = settings(2, zero={"cpu_offload": offload}, fp16={"enabled": True})
    config["optimizer"] = {"type": kind, "params": {"lr": 0.01, **params}}
    inner = engine_of(config).optimizer.optimizer
    return type(inner).__name__, getattr(inner, "adam_w_mode", None)


def test_an_optimizer_of_the_file_is_deepspeeds_class_of_it(ranks: Ranks) -> None:
    expected = {
        ("AdamW", False, ()): (FusedAdam.__name__, True),
        ("Adam", False, (("adam_w_mode", False),)): (FusedAdam.__name__, False),
        ("Adam", True, ()): (DeepSpeedCPUAdam.__name__, True),
        ("AdamW", True, (("torch_adam", True),)): ("AdamW", None),
        ("Lion", False, ()): (FusedLion.__name__, None),
    }
    for (kind, offload, params), found in expected.items():
        assert ranks.run(1, of_the_file, kind, offload, dict(params)) == [found]


def onto_the_host(folder: str) -> bool:
    engine = engine_of(settings(2))
    train(engine, 2)
    engine.save_checkpoint(folder)
    other = engine_of(settings(2, zero={"cpu_offload": True}), seed=3)
    other.load_checkpoint(folder)
    return same(state_of(engine), state_of(other))


def test_a_checkpoint_of_one_adam_loads_into_another(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, onto_the_host, str(tmp_path)) == [True, True]
