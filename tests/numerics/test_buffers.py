"""Buffers under bf16 and fp16 are what `model.to(dtype)` makes of them, but for those that the configuration names."""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import shardwell
from tests.support.models import zero
from tests.support.ranks import Ranks

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Filtered(nn.Module):
    """A table of positions, a filter that runs along, a spectral norm, a batch norm, and what is no float."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        angles = torch.arange(16.0)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
        self.register_buffer("smooth", torch.zeros(width), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False] * (width // 2)))
        self.up, self.norm = spectral_norm(nn.Linear(width, width)), nn.BatchNorm1d(width)
        self.down = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.up(x + self.positions[: x.shape[0]])
        self.smooth.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        x = torch.where(self.mask, self.norm(x), x)
        return self.down(x + self.smooth).float().square().mean()


def built(stage: int, precision: str, **own: Any) -> shardwell.Engine:
    torch.manual_seed(0)
    model = Filtered()
    settings = {"shard_at_world_one": True, **own}
    config = zero(stage, shardwell=settings, **{precision: {"enabled": True}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_models_with_float_buffers_run_as_after_a_cast_of_the_model(stage: int, precision: str) -> None:
    torch.manual_seed(0)
    plain = Filtered().to(DTYPES[precision])
    engine = built(stage, precision)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(2):  # what the first forward wrote into buffers, the second reads
        expected, loss = plain(x.to(DTYPES[precision])), engine(x)
        torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    dtypes = {name: buffer.dtype for name, buffer in engine.module.named_buffers()}
    assert dtypes == {name: buffer.dtype for name, buffer in plain.named_buffers()}
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, engine.module.get_buffer(name)), name
    engine.backward(loss)
    engine.step()


def test_buffers_stay_as_they_are_without_mixed_precision() -> None:
    engine = built(3, "torch_autocast")
    assert engine.module.positions.dtype == engine.module.smooth.dtype == torch.float32


def test_named_buffers_keep_their_dtype(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shardwell"):
        engine = built(3, "bf16", keep_fp32_buffers=["positions", "norm.running_mean", "no.such"])
    kept = {name for name, buffer in engine.module.named_buffers() if buffer.dtype == torch.float32}
    assert kept == {"positions", "norm.running_mean"}
    assert "no buffer's name ends with 'no.such'" in caplog.text
    assert "positions" in caplog.text


def test_the_frequencies_of_rotary_embeddings_stay_exact_unless_told_otherwise() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary_emb = nn.Module()
            self.rotary_emb.register_buffer("inv_freq", torch.rand(4), persistent=False)
            self.register_buffer("window", torch.rand(4))
            self.layer = nn.Linear(4, 4)

    model = Rotary()
    for kept, dtype in ((None, torch.float32), ([], torch.bfloat16)):
        own = {} if kept is None else {"shardwell": {"keep_fp32_buffers": kept}}
        config = zero(2, bf16={"enabled": True}, **own)
        module = shardwell.initialize(model=copy.deepcopy(model), config=config, device="cpu").engine.module
        assert module.rotary_emb.inv_freq.dtype == dtype
        assert module.window.dtype == torch.bfloat16
        assert torch.equal(module.rotary_emb.inv_freq, model.rotary_emb.inv_freq.to(dtype))


def buffers_around_a_checkpoint(root: str, precision: str) -> list[Any]:
    engine = built(3, precision)
    engine.backward(engine(torch.randn(6, 8)))
    engine.step()
    engine.save_checkpoint(root)
    saved = {key: value for key, value in engine.module.state_dict(keep_vars=True).items() if "norm" in key}
    saved = {key: value.clone() for key, value in saved.items() if not isinstance(value, nn.Parameter)}
    other = built(1, precision)
    other.load_checkpoint(root, strict=True)
    wide = built(2, "torch_autocast")
    wide.load_checkpoint(root, strict=True)
    found = [
        other.module.get_buffer(key).dtype == value.dtype
        and torch.equal(other.module.get_buffer(key), value)
        and torch.equal(wide.module.get_buffer(key), value.to(wide.module.get_buffer(key).dtype))
        for key, value in saved.items()
    ]
    return [len(found) >= 3, all(found), torch.equal(other.module.mask, engine.module.mask)]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_buffers_come_back_from_checkpoints(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    assert ranks.run(2, buffers_around_a_checkpoint, str(tmp_path), precision)[0] == [True, True, True]
