"""`torch_autocast` in the configuration, and the user's own autocast around an engine, against plain loops."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.mixed_precision import STAGES, STEPS, build, initialize, loss_of, rows
from tests.support.models import whole_parameters
from tests.support.ranks import Ranks
from tests.support.training import distance

LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}
RECOMPUTE = ["", "non-reentrant", "reentrant"]


def autocast_plainly(dtype: str, num_ranks: int, recompute: str) -> tuple[dict[str, Tensor], str]:
    """The user's own context around a plain model; with fp16, the loss scale is 128."""
    scale = 128.0 if dtype == "fp16" else 1.0
    model = build(recompute=recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for (micro,) in rows(STEPS, num_ranks):
        optimizer.zero_grad()
        for own in micro:
            with torch.autocast("cpu", LOWER[dtype], cache_enabled=False):
                output = model(own.clone().requires_grad_())
            (loss_of(output) * scale / num_ranks).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, str(output.dtype)


def autocast_sharded(dtype: str, recompute: str, by_user: bool, stage: int) -> tuple[dict[str, Tensor], str, set[str]]:
    """By the configuration, or by the user around the engine (torch's cache of casts is on then)."""
    block = {"torch_autocast": {"enabled": True, "dtype": dtype}, "fp16": {"loss_scale": 128.0}}
    model = build(recompute=recompute)
    engine = initialize(model, stage, **({} if by_user else block))
    for (micro,) in rows(STEPS, dist.get_world_size()):
        context = torch.autocast("cpu", LOWER[dtype]) if by_user else contextlib.nullcontext()
        with context:
            output = engine(micro[dist.get_rank()].clone().requires_grad_())
        engine.backward(loss_of(output))
        engine.step()
    whole = whole_parameters(model)
    return whole, str(output.dtype), {str(p.dtype) for p in whole.values()}


def cases_of(dtype: str, by_user: bool) -> list[tuple[str, int]]:
    """Ways to recompute and stages: all of them are met by the configuration and the user together, in both dtypes."""
    first = (dtype == "bf16") == by_user
    return [(how, stage) for k, how in enumerate(RECOMPUTE) for stage in STAGES if (k + stage) % 2 == first]


def autocast_all(dtype: str, by_user: bool) -> list[Any]:
    return [autocast_sharded(dtype, how, by_user, stage) for how, stage in cases_of(dtype, by_user)]


@pytest.mark.parametrize("by_user", [False, True], ids=["by the configuration", "by the user"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_autocast_is_the_users_own_autocast(ranks: Ranks, dtype: str, by_user: bool) -> None:
    expected = {how: autocast_plainly(dtype, 2, how) for how in RECOMPUTE}
    answers = ranks.run(2, autocast_all, dtype, by_user)[0]
    for (how, stage), (found, output, weights) in zip(cases_of(dtype, by_user), answers, strict=True):
        difference, name = distance(found, expected[how][0])
        # the user's context has no loss scale: in fp16, gradients are rounded elsewhere
        limit = 1e-2 if by_user and dtype == "fp16" else 1e-5
        assert difference < limit, f"{how} at stage {stage}: {name} differs by {difference}"
        assert output == expected[how][1]
        assert weights == {"torch.float32"}
