"""A steady step asks the store nothing, and reads nothing back from the device but the norm."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import shardwell
from shardwell.parallel import Agreement
from tests.support.internals import board_of, roles_of
from tests.support.models import Gpt, batches, share, zero
from tests.support.ranks import Ranks


class ReadsBack(TorchDispatchMode):
    """Counts the calls that copy a number from a tensor to the host: `.item()`, `float(tensor)`, `if tensor`."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def note(asked: list[str], agreement: Agreement, ask: Callable[..., Any], call: Callable[..., Any], *args: Any) -> Any:
    if not agreement.is_waiting:  # who waits for more than half a second, for a slow rank, looks what keeps it
        asked.append(str(args))
    return ask(call, *args)


def steady_steps(stage: int, blocks: int, on_host: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Gpt(blocks=blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)  # AdamW reads its own counters, which are on the host
    # With clipping, torch reads the factor on CPU, and with bf16 the sum of halves there looks for NaN: on CUDA neither
    # does, which the tests of NCCL ranks show.
    block = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}} if on_host else {}
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage, **block)).engine
    asked: list[str] = []
    reads = []
    for number, batch in enumerate(batches(5, 4)):
        if number == 3:
            board, agreement = board_of(engine), roles_of(engine).agreement
            board._ask = partial(note, asked, agreement, board._ask)  # type: ignore[method-assign]
        mode = ReadsBack()
        with mode if number >= 3 else nullcontext():
            engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
            engine.step()
        reads.append(mode.num)
    return {"asked": asked, "reads": reads[3:]}


@pytest.mark.slow
def test_a_steady_step_asks_no_store_and_reads_back_as_much_with_many_blocks_as_with_few(ranks: Ranks) -> None:
    for stage, on_host in ((0, False), (1, False), (2, False), (3, False), (3, True)):
        few, many = (ranks.run(2, steady_steps, stage, blocks, on_host) for blocks in (2, 6))
        for answer in (*few, *many):
            assert answer["asked"] == []
        reads = {tuple(answer["reads"]) for answer in (*few, *many)}
        # Hyperparameters and the norm; once updates on the host go at once, also how many ranks found a conflict.
        assert reads == {(2, 3) if on_host else (2, 2)}, (stage, on_host)
