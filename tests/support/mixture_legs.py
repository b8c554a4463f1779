"""A mixture of experts that trains on any axis, in legs that hand checkpoints on, and the same in one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwell
from shardwell import sequence_parallel
from shardwell.utils import safe_get_full_optimizer_state
from tests.support.packed_models import handed_on
from tests.support.sequence_models import TOKENS, VOCABULARY, pretrained

ROWS, NUM_BATCHES = 1, 4  # rows of a micro-batch; micro-batches of a step, over all ranks
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Leg:
    """One step in one layout, and the format in which its checkpoint goes to the next one."""

    stage: int = 1
    expert: int = 1
    tensor: int = 1
    sequence: int = 1
    pipe: int = 1
    hands_on: str = "own"  # "own", "hf", "dcp", "deepspeed"


def built(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"num_local_experts": 4, "num_key_value_heads": 4, "experts_implementation": "eager"}
    return pretrained("Mixtral", **sizes).double()


def loss_of(output: Any, labels: Tensor) -> Tensor:
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def micro_batches(step: int) -> Tensor:
    shape = NUM_BATCHES, ROWS, TOKENS
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(step))


class Plain:
    """Plain PyTorch in one process, with an optimizer that may begin again."""

    def __init__(self) -> None:
        self.model = built(0)
        self.begin_again()

    def begin_again(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        for ids in micro_batches(number):
            (loss_of(self.model(ids), ids) / NUM_BATCHES).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()

    def states(self) -> dict[str, Tensor]:
        """Return values and moments by name."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach()
            found |= {f"{name} {key}": self.optimizer.state[parameter][key] for key in MOMENTS}
        return found


def engine_of(leg: Leg, seed: int) -> Any:
    ranks = leg.tensor * leg.sequence * leg.pipe
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": NUM_BATCHES * ranks // dist.get_world_size(),
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": leg.stage, "stage3_param_persistence_threshold": 0},
        "sequence_parallel_size": leg.sequence,
        "shardwell": {"expert_parallel_size": leg.expert},
    }
    if leg.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": leg.tensor}
    model: Any = built(seed)
    if leg.pipe > 1:
        config["pipeline"] = {"stages": leg.pipe}
        model = shardwell.pipeline.split(model, loss_fn=loss_of)
    return shardwell.initialize(model=model, config=config).engine


def train_step(engine: Any, leg: Leg, number: int) -> None:
    mine = micro_batches(number)[engine.data_rank :: engine.data_size]
    if leg.pipe > 1:
        engine.train_batch(iter([(ids, ids) for ids in mine]))
        return
    for ids in mine:
        if leg.sequence > 1:
            part = sequence_parallel.shard_batch({"input_ids": ids, "labels": ids}, engine)
            logits = engine(input_ids=part["input_ids"], position_ids=part["position_ids"]).logits
            loss = sequence_parallel.cross_entropy(logits, part["shift_labels"], part["num_items_in_batch"])
        else:
            loss = loss_of(engine(ids), ids)
        engine.backward(loss)
        engine.step()


def states_of(engine: Any) -> dict[str, Tensor]:
    """Return values and moments of a model that is not cut."""
    found = dict(engine.state_dict())
    for name, parameter in engine.module.named_parameters():
        for key in MOMENTS:
            found[f"{name} {key}"] = safe_get_full_optimizer_state(parameter, key)
    return found


def run_leg(leg: Leg, number: int, at: str, kind: str, folder: str) -> str:
    """Load what is there, train a step and save; return the path at which the checkpoint goes to the next leg."""
    engine = engine_of(leg, number)
    if at and kind == "hf":
        engine.load_model(at)
    elif at:
        engine.load_checkpoint(at, strict=True)
    train_step(engine, leg, number)
    path = str(Path(folder) / f"{number}")
    engine.save_checkpoint(path)
    engine.finish_saving()
    dist.barrier()
    engine.destroy(whole=False)
    return handed_on(path, leg.hands_on)


def read_alone(at: str, number: int) -> dict[str, Tensor]:
    """Return what an engine without axes reads."""
    engine = engine_of(Leg(3), number)
    engine.load_checkpoint(at, strict=True)
    found = states_of(engine)
    engine.destroy(whole=False)
    return found


def run_chain(legs: list[Leg], folder: Path) -> dict[str, Tensor]:
    """Train a step in each layout after the other; return what an engine without axes reads at the end."""
    folder.mkdir(exist_ok=True)
    at, kind = "", "own"
    for number, leg in enumerate(legs):
        at, kind = run_leg(leg, number, at, kind, str(folder)), leg.hands_on
    return read_alone(at, len(legs))


def alone(legs: list[Leg]) -> dict[str, Tensor]:
    """Return what plain PyTorch makes of the same steps."""
    plain = Plain()
    for number, leg in enumerate(legs):
        plain.step(number)
        if leg.hands_on == "hf" and number + 1 < len(legs):
            plain.begin_again()
    return plain.states()
