"""Frozen weights in codes on CUDA: the bits of a plain model of the codes, on the device and from the host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell.kernels.quantize import Codec
from tests.support.frozen_codes import below, looked_at, run, saved
from tests.support.ranks import Ranks

pytestmark = pytest.mark.gpu


def on_the_gpu(function: Any, *args: Any) -> Any:
    os.environ["SHARDWELL_DEVICE"] = "cuda:0"
    torch.backends.cuda.matmul.allow_tf32 = False
    return function(*args)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("kind", "bf16"), [("int8", True), ("int4", True), ("fp8", False)])
def test_bytes_and_numbers(ranks: Ranks, num_ranks: int, kind: str, bf16: bool) -> None:
    size, width = Codec(kind).num_bytes, 2 if bf16 else 4
    for answer in ranks.run(num_ranks, on_the_gpu, run, kind, bf16, False):
        frozen, trained = (answer[name] for name in ("frozen", "trained"))
        assert answer["same"]
        assert answer["rest"] == sum(size(n) for n in frozen) + 4 * sum(trained)
        assert answer["gathered"] == 2 * (num_ranks - 1) * (sum(size(n) for n in frozen) + width * sum(trained))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_from_the_host_and_from_disk(ranks: Ranks, tmp_path: Path, tier: str) -> None:
    for answer in ranks.run(1, on_the_gpu, below, tier, str(tmp_path), "int8"):
        assert answer["same"]
        for name, value in answer["expected"].items():
            assert (answer["masters"][name] == value).all(), name


def test_whoever_looks_or_writes(ranks: Ranks) -> None:
    for answer in ranks.run(1, on_the_gpu, looked_at):
        assert all(answer.values()), answer


def test_a_checkpoint_gives_the_same_codes_back(ranks: Ranks, tmp_path: Path) -> None:
    for answer in ranks.run(1, on_the_gpu, saved, str(tmp_path), "int8", True):
        assert all(answer.values()), answer
