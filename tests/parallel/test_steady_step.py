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
from tests.support.pipelines import chain, next_token_loss, pipeline_config, stream
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


def steady_steps(stage: int, blocks: int, frozen: bool = False, **block: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Gpt(blocks=blocks)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and ".up." in name))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3)  # AdamW reads its own counters, which are on the host
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
        block = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}} if on_host else {}
        few, many = (ranks.run(2, steady_steps, stage, blocks, **block) for blocks in (2, 6))
        for answer in (*few, *many):
            assert answer["asked"] == []
        reads = {tuple(answer["reads"]) for answer in (*few, *many)}
        # Hyperparameters and the norm; once updates on the host go at once, also how many ranks found a conflict.
        assert reads == {(2, 3) if on_host else (2, 2)}, (stage, on_host)


HOST = {"offload_optimizer": {"device": "cpu"}}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "clipping": (3, {"gradient_clipping": 0.1}),
    "clipping, state on the host": (2, {"gradient_clipping": 0.1, "zero_optimization": HOST}),
    "parameters on the host": (3, {"zero_optimization": {**HOST, "offload_param": {"device": "cpu"}}}),
    "loss scale": (3, {"fp16": {"enabled": True, "initial_scale_power": 4}}),
    "loss scale, state on the host": (
        1,
        {"fp16": {"enabled": True, "initial_scale_power": 4}, "zero_optimization": HOST},
    ),
    "bf16": (2, {"bf16": {"enabled": True}}),
    "frozen and trainable groups": (3, {"frozen": True, "gradient_clipping": 0.1}),
    "codecs": (3, {"zero_optimization": {"zero_quantized_weights": True, "zero_quantized_gradients": True}}),
    "secondary shards": (3, {"zero_optimization": {"zero_hpz_partition_size": 2}}),
    "micro-steps": (2, {"gradient_accumulation_steps": 2}),
}


def every_way(blocks: int) -> dict[str, dict[str, Any]]:
    return {name: steady_steps(stage, blocks, **block) for name, (stage, block) in WAYS.items()}


def test_no_way_to_train_asks_the_store_or_reads_back_more_with_more_blocks(ranks: Ranks) -> None:
    """On CPU torch reads the clipping factor, and with bf16 looks for NaN in each unit: on CUDA it does neither."""
    few, many = (ranks.run(2, every_way, blocks) for blocks in (2, 4))
    for name in WAYS:
        for answer in (*few, *many):
            assert answer[name]["asked"] == [], name
        assert len({tuple(answer[name]["reads"]) for answer in (*few, *many)}) == 1 or name == "bf16", name
        assert max(few[0][name]["reads"]) <= 6, name


def pipeline_steps(schedule: str) -> dict[str, Any]:
    """What the two stages of a pipeline ask the store from its fourth batch on."""
    torch.manual_seed(0)
    config = pipeline_config(1, schedule, gradient_clipping=0.5)
    model = shardwell.pipeline.split(chain(), loss_fn=next_token_loss)
    engine: Any = shardwell.initialize(model=model, config=config).engine
    asked: list[str] = []
    batches_of_all, agreement = stream(6, 0), roles_of(engine).agreement
    for number in range(6):
        if number == 3:
            board = board_of(engine)
            board._ask = partial(note, asked, agreement, board._ask)  # type: ignore[method-assign]
        engine.train_batch(batches_of_all)
    engine.destroy()
    return {"asked": asked}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_steady_batch_of_a_pipeline_asks_no_store(ranks: Ranks, schedule: str) -> None:
    assert ranks.run(2, pipeline_steps, schedule) == [{"asked": []}] * 2
