"""LAMB and Muon, which need whole tensors, over tensor ranks and pipeline stages, as in one plain process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwell
from shardwell.optim.lamb import Lamb
from shardwell.optim.muon import Muon
from tests.support import pipelines
from tests.support.models import batches, zero
from tests.support.ranks import Ranks
from tests.support.tensor_models import HEAD, PLAN, ROWS, TensorCase, train
from tests.support.training import distance

STEPS, CLIP = 8, 0.05
CASE = TensorCase(plan={**PLAN, **HEAD}, steps=STEPS, clip=CLIP)


def is_muon(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and name.startswith("blocks")


def made(kind: str, model: nn.Module) -> Optimizer:
    if kind == "Lamb":
        return Lamb(model.parameters(), lr=1e-2)
    both = [[p for name, p in model.named_parameters() if is_muon(name, p) is which] for which in (True, False)]
    groups = [{"params": group, "use_muon": which} for group, which in zip(both, (True, False), strict=True)]
    return Muon(groups, lr=1e-2)


def plain_optimizers(kind: str, model: nn.Module) -> list[Optimizer]:
    """Return torch's own Muon, with AdamW for what is no matrix, whose settings are those of shardwell's; or LAMB."""
    if kind == "Lamb":
        return [made(kind, model)]
    both = [[p for name, p in model.named_parameters() if is_muon(name, p) is which] for which in (True, False)]
    ours = made(kind, model).param_groups
    shared = {name: ours[0][name] for name in ("lr", "momentum", "nesterov", "weight_decay", "ns_steps", "eps")}
    rest = {name: ours[1][name] for name in ("lr", "betas", "weight_decay")}
    return [torch.optim.Muon(both[0], **shared), torch.optim.AdamW(both[1], eps=ours[1]["adam_eps"], **rest)]


def plainly(kind: str, model: nn.Module, losses: Iterator[list[Tensor]]) -> dict[str, Tensor]:
    optimizers = plain_optimizers(kind, model)
    for parts in losses:
        sum(parts).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def over_tensor_ranks(kind: str, stage: int) -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    model = CASE.build()
    block = {"autotp_size": 2, "plan": CASE.plan}
    config = zero(stage, train_micro_batch_size_per_gpu=1, gradient_clipping=CLIP, tensor_parallel=block)
    engine = shardwell.initialize(model=model, optimizer=made(kind, model), config=config).engine
    train(engine, CASE)
    return engine.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stage"), [("Lamb", 0), ("Lamb", 3), ("Muon", 1), ("Muon", 3)])
def test_tensor_ranks_follow_one_process(ranks: Ranks, kind: str, stage: int) -> None:
    torch.manual_seed(0)
    model = CASE.build()
    expected = plainly(kind, model, ([model(batch)] for batch in batches(STEPS, ROWS)))
    for found in ranks.run(4, over_tensor_ranks, kind, stage)[::3]:
        assert distance(found, expected)[0] < 1e-10


def over_stages(kind: str, stage: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = pipelines.Decoder().double()
    config = pipelines.pipeline_config(stage, "1f1b", gradient_clipping=CLIP)
    del config["optimizer"]
    divided = shardwell.pipeline.split(model, loss_fn=pipelines.next_token_loss)
    engine = shardwell.initialize(model=divided, optimizer=made(kind, model), config=config).engine
    rows = pipelines.stream(STEPS, engine.data_rank)
    for _ in range(STEPS):
        engine.train_batch(rows)
    return engine.parameters_snapshot()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stage"), [("Lamb", 1), ("Muon", 3)])
def test_pipeline_stages_follow_one_process(ranks: Ranks, kind: str, stage: int) -> None:
    torch.manual_seed(0)
    model = pipelines.Decoder().double()
    steps = ([batch for rank in range(2) for batch in pipelines.micro_batches(step, rank)] for step in range(STEPS))
    losses = ([pipelines.next_token_loss(model(ids), labels) / len(rows) for ids, labels in rows] for rows in steps)
    expected = plainly(kind, model, losses)
    found = ranks.run(4, over_stages, kind, stage)
    assert {name for one in found for name in one} == set(expected)
    for one in found:
        assert distance(one, {name: expected[name] for name in one})[0] < 1e-10
