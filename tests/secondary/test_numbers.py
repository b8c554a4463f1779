"""Training with a second copy of the parameters in each node gives the bits of training without, whatever is done.

Each scene is played twice on the same ranks. What changes parameters comes after a forward, when there are copies that
have to be forgotten.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.errors import ShardwellError
from shardwell.parallel import Work
from shardwell.utils import safe_set_full_fp32_param, safe_set_local_fp32_param
from shardwell.zero import GatheredParameters, TiledLinear
from tests.support.internals import groups_of
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.offload_cases import AIO, quickly
from tests.support.ranks import Ranks

ROWS, STEPS = 60, 3


class Play:
    """One training run, and what it has seen."""

    def __init__(self, model: nn.Module, config: dict[str, Any], partition: int) -> None:
        config = copy.deepcopy(config)
        config.setdefault("zero_optimization", {})["zero_hpz_partition_size"] = partition
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        config = zero(3, train_micro_batch_size_per_gpu=1, **config)
        self.engine = shardwell.initialize(model=model, optimizer=optimizer, config=config).engine
        self.model: Any = model
        self.losses: list[float] = []
        self.num_inside = 0  # gathers from second copies
        for group in [group for group in groups_of(self.engine) if group.secondary is not None]:
            group.secondary.gather = self._counted(group.secondary.gather)

    def _counted(self, gather: Callable[..., Work]) -> Callable[..., Work]:
        def counted(*args: Any) -> Work:
            self.num_inside += 1
            return gather(*args)

        return counted

    def loss(self, number: int, micro: int = 0, num_micro: int = 1) -> Tensor:
        rows = batches(number + 1, ROWS)[number]
        return self.engine(share(rows, dist.get_rank(), dist.get_world_size(), micro, num_micro))

    def evaluate(self) -> None:
        with torch.no_grad():
            self.losses.append(float(self.loss(9)))

    def step(self, number: int, num_micro: int = 1) -> None:
        for micro in range(num_micro):
            self.backward(self.loss(number, micro, num_micro))
            self.engine.step()

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)
        self.losses.append(float(loss.detach()))


Scene = Callable[[int, str], Play]
SCENES: dict[str, Scene] = {}


def scene(of: Scene) -> Scene:
    SCENES[of.__name__] = of
    return of


def begin(partition: int, config: dict[str, Any] | None = None, **model: Any) -> Play:
    torch.manual_seed(0)
    return Play(Gpt(**{"blocks": 2, **model}), config or {}, partition)


def train(play: Play, steps: int = STEPS, num_micro: int = 1) -> Play:
    for number in range(steps):
        play.step(number, num_micro)
    return play


def play_twice(name: str, partition: int, path: str) -> list[dict[str, Any]]:
    found = []
    for size in (1, partition):
        play = SCENES[name](size, path)
        found.append({"losses": play.losses, "inside": play.num_inside, "whole": whole_parameters(play.model)})
        play.engine.destroy(whole=False)
    return found


def play_all(names: list[str], partition: int, path: str) -> list[list[dict[str, Any]]]:
    quickly()
    return [play_twice(name, partition, path) for name in names]


def check(ranks: Ranks, names: list[str], num_ranks: int, partition: int, path: Path) -> None:
    for answers in ranks.run(num_ranks, play_all, names, partition, str(path)):
        for name, (without, with_copies) in zip(names, answers, strict=True):
            assert without["inside"] == 0 < with_copies["inside"], name
            assert with_copies["losses"] == without["losses"], name
            assert without["whole"].keys() == with_copies["whole"].keys()
            for key, value in without["whole"].items():
                assert np.array_equal(value, with_copies["whole"][key]), (name, key)


# ------------------------------------------------------------------------------------------------------ precisions


@scene
def fp16_with_an_overflow(partition: int, path: str) -> Play:
    play = begin(partition, {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}})
    train(play)
    assert play.engine.optimizer is not None
    assert play.engine.optimizer.skipped_steps > 0
    return play


@scene
def accumulation(partition: int, path: str) -> Play:
    return train(begin(partition, {"bf16": {"enabled": True}, "gradient_accumulation_steps": 3}), num_micro=3)


# ------------------------------------------------------------------------------------------------- uses of a model


@scene
def reentrant_with_small_parameters_that_stay_whole(partition: int, path: str) -> Play:
    config = {"gradient_clipping": 0.5, "zero_optimization": {"stage3_param_persistence_threshold": 100}}
    return train(begin(partition, config, recompute="reentrant"))


@scene
def evaluation_and_parts_called_between_steps(partition: int, path: str) -> Play:
    """As a generation loop may do: also pieces of the model, without the engine's forward."""
    play = begin(partition, {"gradient_accumulation_steps": 2})
    for number in range(STEPS):
        play.evaluate()
        play.step(number, 2)
        with torch.no_grad():
            x = play.model.embed(torch.arange(6)[None])
            for block in play.model.blocks:
                x = block(x)
            play.losses += [float(v) for v in play.model.head(play.model.norm(x))[0, -1]]
    play.evaluate()
    return play


@scene
def no_sync_after_parameters_were_opened(partition: int, path: str) -> Play:
    play = begin(partition)
    with GatheredParameters(play.model.parameters()), torch.no_grad():
        play.model.head.weight.zero_()
    for number in range(STEPS):
        with play.engine.no_sync():
            play.backward(play.loss(number + 1))
        play.step(number)
    return play


@scene
def a_weight_used_outside_its_module(partition: int, path: str) -> Play:
    play = begin(partition, {"gradient_accumulation_steps": 2}, tied=True)
    for number in range(STEPS):
        for micro in range(2):
            play.backward(play.loss(number, micro, 2) + play.model.blocks[1].up.weight.square().mean())
            play.engine.step()
    return play


class Restless(nn.Module):
    """Changes its own weight while it runs: without an update that lasts until the unit is released."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.embed = nn.Embedding(29, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            y = block(x)
            x = torch.tanh(y) + x
        with torch.no_grad():
            self.embed.weight.data.mul_(1.5)
        return x.square().mean()


@scene
def weights_changed_by_a_forward(partition: int, path: str) -> Play:
    torch.manual_seed(0)
    return train(Play(Restless(), {"gradient_accumulation_steps": 2}, partition), num_micro=2)


@scene
def tiles_that_are_recomputed_in_bf16(partition: int, path: str) -> Play:
    torch.manual_seed(0)
    model = Gpt(blocks=2, recompute="non-reentrant")
    for block in model.blocks:
        block.up = TiledLinear(16, 49, in_splits=2, out_splits=3, init_linear=block.up)
    return train(Play(model, {"bf16": {"enabled": True}}, partition))


@scene
def units_that_stay_whole_until_backward(partition: int, path: str) -> Play:
    config = {"zero_optimization": {"stage3_max_reuse_distance": 3000}, "gradient_accumulation_steps": 2}
    return train(begin(partition, config), num_micro=2)


# ----------------------------------------------------------------------------------------------------------- frozen


def freeze(model: Gpt) -> Gpt:
    model.blocks[0].requires_grad_(False)
    model.blocks[1].qkv.requires_grad_(False)
    return model


@scene
def frozen_and_kept(partition: int, path: str) -> Play:
    torch.manual_seed(0)
    return train(Play(freeze(Gpt(blocks=2)), {"shardwell": {"keep_frozen": 2500}}, partition))


@scene
def frozen_and_thawed(partition: int, path: str) -> Play:
    torch.manual_seed(0)
    config = {"bf16": {"enabled": True}, "shardwell": {"keep_frozen": 0}}
    play = train(Play(freeze(Gpt(blocks=2)), config, partition))
    play.evaluate()
    play.model.requires_grad_(True)
    return train(play, 2)


# ------------------------------------------------------------------------------------------------------------ tiers


def below(parameters: str, optimizer: str, path: str, **others: Any) -> dict[str, Any]:
    named = {"nvme_path": path}
    return {
        "bf16": {"enabled": True},
        "aio": AIO,
        "zero_optimization": {
            "offload_param": {"device": parameters, "max_in_cpu": 0, **(named if parameters == "nvme" else {})},
            "offload_optimizer": {"device": optimizer, **(named if optimizer == "nvme" else {})},
        },
        **others,
    }


@scene
def parameters_on_the_host(partition: int, path: str) -> Play:
    config = below("cpu", "cpu", path, gradient_accumulation_steps=2)
    return train(begin(partition, config), num_micro=2)


@scene
def parameters_on_disk(partition: int, path: str) -> Play:
    """Updates come after the norm of all gradients."""
    own = {"gradient_clipping": 0.5, "shardwell": {"commit": "after_norm"}}
    config = below("nvme", "nvme", path, gradient_accumulation_steps=2, **own)
    return train(begin(partition, config), num_micro=2)


@scene
def updates_in_a_shadow(partition: int, path: str) -> Play:
    config = below("none", "cpu", path, gradient_clipping=0.5, shardwell={"commit": "shadow"})
    return train(begin(partition, config))


@scene
def placed_as_there_is_room(partition: int, path: str) -> Play:
    own = {"placement": "auto", "memory": {"device": 60_000, "host": 200_000}}
    return train(begin(partition, below("nvme", "nvme", path, shardwell=own), blocks=3))


@scene
def a_step_that_is_left_out_in_part(partition: int, path: str) -> Play:
    """Updates at once, and gradients of the first units that are not finite: the last ones were updated."""
    own = {"placement": "auto", "memory": {"device": 10**9}, "nonfinite": "skip"}
    play = begin(partition, {"shardwell": own})
    for number in range(STEPS):
        handle = play.model.position.register_hook(lambda grad, n=number: grad * float("inf") if n == 1 else grad)
        play.backward(play.loss(number))
        play.engine.step()
        handle.remove()
    assert play.engine.optimizer is not None
    assert play.engine.optimizer.skipped_steps == 1
    return play


# ---------------------------------------------------------------------------------------------------- changes by users


@scene
def opened_and_set(partition: int, path: str) -> Play:
    """Reading changes nothing, also if somebody writes; what the modifier writes counts, and a master that is set."""
    play = begin(partition, {"bf16": {"enabled": True}})
    for number in range(STEPS):
        play.step(number)
        play.evaluate()
        with GatheredParameters(play.model.blocks[0].parameters()), torch.no_grad():
            play.losses.append(float(play.model.blocks[0].up.weight.sum()))
            play.model.blocks[0].up.weight.mul_(3.0)
        play.evaluate()
        with GatheredParameters(play.model.blocks[1].parameters(), modifier_rank=1), torch.no_grad():
            if dist.get_rank() == 1:
                play.model.blocks[1].up.weight.mul_(1.5)
        play.evaluate()
        weight = play.model.blocks[1].down.weight
        safe_set_full_fp32_param(weight, torch.full(weight.shape, 0.01 * number))
        play.evaluate()
    return play


def opened_before_the_step(play: Play) -> Play:
    """Somebody writes what he sees between backward and step, when units were updated already."""
    for number in range(STEPS):
        play.backward(play.loss(number))
        with GatheredParameters(play.model.blocks[1].up.bias, modifier_rank=0), torch.no_grad():
            play.losses.append(float(play.model.blocks[1].up.weight.float().sum()))
            play.model.blocks[1].up.bias.mul_(0.5)
        play.engine.step()
        play.evaluate()
    return play


@scene
def opened_after_updates_at_once_on_the_host(partition: int, path: str) -> Play:
    return opened_before_the_step(begin(partition, below("none", "cpu", path, shardwell={"commit": "at_once"})))


@scene
def opened_after_updates_at_once_on_the_device(partition: int, path: str) -> Play:
    own = {"placement": "auto", "memory": {"device": 10**9}}
    return opened_before_the_step(begin(partition, {"bf16": {"enabled": True}, "shardwell": own}))


@scene
def opened_between_micro_steps(partition: int, path: str) -> Play:
    play = begin(partition, {"gradient_accumulation_steps": 2})
    for number in range(STEPS):
        play.backward(play.loss(number, 0, 2))
        play.engine.step()
        with GatheredParameters(play.model.head.weight, modifier_rank=0), torch.no_grad():
            play.model.head.weight.add_(0.1)
        play.backward(play.loss(number, 1, 2))
        play.engine.step()
    return play


@scene
def a_state_and_a_checkpoint_loaded(partition: int, path: str) -> Play:
    play = begin(partition, {"bf16": {"enabled": True}})
    before = play.engine.state_dict()
    train(play, 2)
    play.engine.save_checkpoint(f"{path}/{partition}")
    play.evaluate()
    play.engine.load_state_dict(before)
    play.evaluate()
    train(play, 1)
    play.evaluate()
    play.engine.load_checkpoint(f"{path}/{partition}")
    play.evaluate()
    return train(play, 2)


@scene
def the_model_changed(partition: int, path: str) -> Play:
    """One unit is built anew, the others stay."""
    play = train(begin(partition), 2)
    play.evaluate()
    with GatheredParameters(play.model.blocks[0].down.weight, modifier_rank=0):
        value = play.model.blocks[0].down.weight.detach() * 0.5
    play.model.blocks[0].down.weight = nn.Parameter(value)
    return train(play)


ON_ANY_NODES = ["accumulation", "parameters_on_disk", "opened_and_set"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCENES if name not in ON_ANY_NODES])
def test_two_nodes_of_two_ranks_give_the_bits_of_four(ranks: Ranks, tmp_path: Path, name: str) -> None:
    check(ranks, [name], 4, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "partition", "names"),
    [
        (2, 2, ON_ANY_NODES[:1]),
        (3, 2, ON_ANY_NODES),  # nodes of different sizes play all scenes
        (4, 3, ON_ANY_NODES[1:2]),
        (4, 4, ON_ANY_NODES[2:]),
        (2, 8, ON_ANY_NODES[:1]),
        (5, 3, ON_ANY_NODES[:1]),
    ],
    ids=["one node", "2 and 1", "3 and 1", "one node of 4", "more than there are", "3 and 2"],
)
def test_any_number_of_ranks_divides_into_nodes_of_any_size(
    ranks: Ranks, tmp_path: Path, num_ranks: int, partition: int, names: list[str]
) -> None:
    check(ranks, names, num_ranks, partition, tmp_path)


# ------------------------------------------------------------------------------------------------------ local changes


def set_local() -> dict[str, Any]:
    play = begin(2)
    weight = play.model.head.weight
    play.evaluate()
    with pytest.raises(ShardwellError, match="secondary shard in each node") as refused:
        safe_set_local_fp32_param(weight, torch.zeros(1))
    play.step(0)
    part = shardwell.utils.safe_get_local_fp32_param(weight)
    if dist.get_rank() == 1 and part is not None:
        safe_set_local_fp32_param(weight, torch.full_like(part, 7.0))
    play.evaluate()
    return {"text": str(refused.value), "sevens": int((whole_parameters(play.model)["head.weight"] == 7.0).sum())}


def test_a_local_change_is_refused_while_others_have_a_copy_of_it(ranks: Ranks) -> None:
    for answer in ranks.run(4, set_local):
        assert "'head.weight'" in answer["text"]
        assert "use safe_set_full_fp32_param, or change it after a step" in answer["text"]
        assert answer["sevens"] > 0
