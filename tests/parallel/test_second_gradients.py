"""Gradients of gradients over axes of the model, and the checks of parts where weight gradients are computed late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardwell
from shardwell import sequence_parallel
from shardwell.errors import ShardwellError
from tests.support import expert_models
from tests.support.models import zero
from tests.support.ranks import Ranks
from tests.support.training import distance

WIDTH = 8
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
KINDS: list[dict[str, Any]] = [
    {},
    {"sequence_parallel": True},
    {"tp_overlap_comm": True},
    {"sequence_parallel": True, "tp_overlap_comm": True},
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Gated(Block):
    """Gates an output by `glu`, which divides it as a whole one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.glu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Three blocks, of which two share a layer."""

    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        self.first, self.blocks, self.last = (
            nn.Linear(3, WIDTH),
            nn.ModuleList(kind() for _ in range(3)),
            nn.Linear(WIDTH, 1),
        )
        self.blocks[2].down = self.blocks[1].down

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def inputs(step: int) -> Tensor:
    return torch.randn(4, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def penalised(model: Any, x: Tensor) -> Tensor:
    """A loss with a penalty on the gradient of the inputs, as WGAN-GP has it."""
    x = x.clone().requires_grad_()
    found = model(x)
    (grad,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
    loss: Tensor = found.square().mean() + grad.square().mean()
    return loss


def built() -> Stack:
    torch.manual_seed(0)
    return Stack().double()


def trained(tensor: dict[str, Any], stage: int) -> dict[str, Tensor]:
    model = built()
    config = zero(
        stage,
        train_micro_batch_size_per_gpu=1,
        gradient_clipping=0.1,
        tensor_parallel={"autotp_size": 2, "plan": PLAN, **tensor},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config).engine
    for step in range(4):
        x = inputs(step)
        engine.backward(penalised(engine, x) if step != 1 else engine(x).square().mean())
        engine.step()
    found = engine.state_dict()
    engine.destroy(whole=False)
    return found


def test_penalties_on_gradients_follow_one_process(ranks: Ranks) -> None:
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        (penalised(model, inputs(step)) if step != 1 else model(inputs(step)).square().mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    expected = dict(model.state_dict())
    for number, tensor in enumerate(KINDS):
        for found in ranks.run(2, trained, tensor, number % 3):
            assert distance(found, expected)[0] < 1e-10, tensor


class Routed(nn.Module):
    """Experts behind a router, and attention before them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, expert_models.WIDTH), nn.Linear(expert_models.WIDTH, 1)
        self.block = expert_models.Block(listed=False, skew=0.0)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        heads = hidden.unflatten(-1, (2, -1)).transpose(1, 2)
        # scores that are written out: torch's fused attention has no second gradient
        mixed = written_attention(heads).transpose(1, 2).flatten(2)
        return self.last(self.block(hidden + mixed))


def written_attention(heads: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return sequence_parallel.scaled_dot_product_attention(heads, heads, heads)


def routed(axis: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Routed().double()
    config = zero(1, train_micro_batch_size_per_gpu=1, gradient_clipping=0.1)
    config |= {"sequence_parallel_size": 2} if axis == "sequence" else {}
    config |= {"shardwell": {"expert_parallel_size": 2}} if axis == "expert" else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config).engine
    size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(3):
        mine = inputs(step).chunk(size, 1 if axis == "sequence" else 0)[rank]
        engine.backward(penalised(engine, mine))
        engine.step()
    found = engine.state_dict()
    engine.destroy(whole=False)
    return found


@pytest.mark.parametrize("axis", ["sequence", "expert"])
def test_penalties_follow_one_process_over_sequence_and_expert_axes(ranks: Ranks, axis: str) -> None:
    expected = ranks.run(1, routed, "none")[0]
    for found in ranks.run(2, routed, axis):
        assert distance(found, {name: torch.as_tensor(value) for name, value in expected.items()})[0] < 1e-10


def gated(way: str) -> str:
    """Return what is said to a model that divides an output of a cut layer."""
    model: Any = Stack(Gated)
    config = zero(1, tensor_parallel={"autotp_size": 2, "plan": PLAN}, train_micro_batch_size_per_gpu=1)
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    if way == "overlap":
        config["tensor_parallel"]["tp_overlap_comm"] = True
    else:
        config |= {"pipeline": {"stages": 2, "schedule": "zb-h1"}, "gradient_accumulation_steps": 2}
        model.blocks[2].down = nn.Linear(16, WIDTH)
        model = shardwell.pipeline.split(model, loss_fn=F.mse_loss)
    engine: Any = shardwell.initialize(model=model, config=config).engine
    batches = iter([(inputs(step).float(), torch.zeros(4, 6, 1)) for step in range(2)])
    with pytest.raises(ShardwellError) as error:
        engine(inputs(0).float()) if way == "overlap" else engine.train_batch(batches)
    return str(error.value)


@pytest.mark.parametrize("way", ["overlap", "zb-h1"])
def test_late_weight_gradients_hide_nothing_from_the_checks_of_parts(ranks: Ranks, way: str) -> None:
    for words in ranks.run(2 if way == "overlap" else 4, gated, way):
        assert "glu is over the outputs of 'blocks." in words
