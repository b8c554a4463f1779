"""What `initialize` takes and returns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

import shardwell
from shardwell.engine import TraceAction, TraceEvent
from tests.support.models import Gpt, batches, whole_parameters, zero
from tests.support.ranks import Ranks


class Rows(Dataset[Tensor]):
    def __init__(self, num_rows: int) -> None:
        self.rows = batches(1, num_rows)[0]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "betas": [0.8, 0.9]}}


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9), fused=True)


def train(config: Any, **kwargs: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Gpt()
    if kwargs.get("optimizer") == "object":
        kwargs["optimizer"] = adamw(model.parameters())
    engine, *_ = shardwell.initialize(model=model, config=config, device="cpu", **kwargs)
    for batch in batches(3, 4):
        engine.backward(engine(batch))
        engine.step()
    return whole_parameters(model)


def test_object_factory_and_config_block_give_the_same_optimizer(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(zero(2, optimizer=ADAMW)))
    expected = train(zero(2), optimizer="object")
    for found in (train(zero(2), optimizer=adamw), train(zero(2, optimizer=ADAMW)), train(str(file))):
        assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


def test_adam_in_a_file_decouples_weight_decay_unless_told_otherwise() -> None:
    params = {"lr": 1e-2, "weight_decay": 0.1}
    decoupled = train(zero(1, optimizer={"type": "Adam", "params": params}))
    adamw = train(zero(1, optimizer={"type": "AdamW", "params": params}))
    classic = train(zero(1, optimizer={"type": "Adam", "params": {**params, "adam_w_mode": False}}))
    assert all(torch.equal(decoupled[name], adamw[name]) for name in adamw)
    assert not torch.equal(classic["head.weight"], adamw["head.weight"])


def test_a_named_optimizer_uses_the_fused_kernel() -> None:
    optimizer = shardwell.initialize(model=Gpt(), config=zero(1, optimizer=ADAMW), device="cpu").optimizer
    assert optimizer.inner.defaults["fused"]


def test_the_result_is_a_named_tuple_of_four() -> None:
    result = shardwell.initialize(model=Gpt(), config=zero(1, optimizer=ADAMW), training_data=Rows(8), device="cpu")
    engine, optimizer, loader, scheduler = result
    assert result.engine is engine
    assert result.optimizer is optimizer is engine.optimizer
    assert result.training_dataloader is loader
    assert scheduler is None


def test_schedulers_attach_and_the_engine_steps_them() -> None:
    engine, optimizer, _, scheduler = shardwell.initialize(
        model=Gpt(),
        config=zero(2, optimizer=ADAMW, gradient_accumulation_steps=2),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        device="cpu",
    )
    assert scheduler is engine.lr_scheduler
    for batch in batches(4, 4):
        engine.backward(engine(batch))
        engine.step()
    assert engine.get_lr() == [1e-2 * 0.25]
    assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.25


def test_parameter_groups_keep_their_own_learning_rate() -> None:
    model = Gpt()
    groups = [{"params": [model.head.weight], "lr": 0.0}, {"params": list(model.blocks.parameters()), "lr": 1e-2}]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine, *_ = shardwell.initialize(
        model=model,
        optimizer=lambda groups: torch.optim.SGD(groups),
        model_parameters=groups,
        config=zero(3),
        device="cpu",
    )
    engine.backward(engine(batches(1, 4)[0]))
    engine.step()
    after = whole_parameters(model)
    assert torch.equal(before["head.weight"], after["head.weight"])
    assert torch.equal(before["embed.weight"], after["embed.weight"])  # in no group: never stepped
    assert not torch.equal(before["blocks.0.qkv.weight"], after["blocks.0.qkv.weight"])


def loaded(num_rows: int, epochs: int) -> list[list[list[int]]]:
    loader = shardwell.initialize(
        model=Gpt(), config=zero(1, train_micro_batch_size_per_gpu=2), training_data=Rows(num_rows)
    ).training_dataloader
    return [[row.tolist() for batch in loader for row in batch] for _ in range(epochs)]


def test_the_loader_gives_every_rank_its_own_rows_and_shuffles_anew(ranks: Ranks) -> None:
    first, second = ranks.run(2, loaded, 12, 2)
    every = sorted(Rows(12).rows.tolist())
    for epoch in (0, 1):
        assert sorted(first[epoch] + second[epoch]) == every
    assert first[0] != first[1]


def test_without_a_model_the_error_says_so() -> None:
    with pytest.raises(shardwell.ShardwellError, match="needs a model"):
        shardwell.initialize(config=zero(1))


def test_without_an_optimizer_the_engine_evaluates_and_refuses_to_step() -> None:
    engine = shardwell.initialize(model=Gpt(), config=zero(3), device="cpu").engine
    with torch.no_grad():
        assert torch.isfinite(engine(batches(1, 4)[0]))
    with pytest.raises(shardwell.ShardwellError, match="no optimizer"):
        engine.step()


def weights_after_initialize(seed_by_rank: bool) -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank() if seed_by_rank else 0)
    model = Gpt()
    shardwell.initialize(model=model, config=zero(3))
    return {**whole_parameters(model), "temperature": model.temperature}


def test_rank_0_weights_are_everyones(ranks: Ranks) -> None:
    mixed, plain = (ranks.run(2, weights_after_initialize, seed_by_rank) for seed_by_rank in (True, False))
    for name in plain[0]:
        assert (mixed[0][name] == mixed[1][name]).all()
        assert (mixed[0][name] == plain[0][name]).all()


def test_the_step_is_recorded_as_short_tokens() -> None:
    torch.manual_seed(0)
    config = zero(3, optimizer=ADAMW, shardwell={"shard_at_world_one": True})
    engine, *_ = shardwell.initialize(model=Gpt(blocks=2), config=config, device="cpu")
    for batch in batches(2, 4):
        with engine.record() as trace:
            engine.backward(engine(batch))
            engine.step()
    tokens, legend = str(trace).split("\n")
    assert legend == "0=(root)  1=embed  2=blocks.0  3=blocks.1"
    assert tokens == (
        "G0 G1 F0 G2 F1 L1 G3 F2 L2 F3 L3 L0 "  # forward: each gather runs under the forward before it
        "B0 G0 G3 B3 G2 R3 L3 B2 R2 L2 B1 G1 R1 L1 R0 L0 "  # backward, in reverse; 1 and 0 end with the graph task
        "S0 S1 S2 S3"
    )
    assert [TraceEvent.parse(token) for token in tokens.split()] == list(trace)
    assert trace.count(TraceAction.ALL_GATHER, 3) == 2


@pytest.mark.parametrize(
    "limit",
    [{"stage3_prefetch_bucket_size": 0}, {"stage3_max_live_parameters": 1}],
    ids=lambda limit: next(iter(limit)),
)
def test_without_room_for_it_nothing_is_prefetched(limit: dict[str, int]) -> None:
    config = zero(3, optimizer=ADAMW, shardwell={"shard_at_world_one": True})
    config["zero_optimization"].update(limit)
    engine, *_ = shardwell.initialize(model=Gpt(blocks=2), config=config, device="cpu")
    with engine.record() as trace:
        engine.backward(engine(batches(1, 4)[0]))
        engine.step()
    assert str(trace).startswith("G0 F0 G1 F1 L1 G2 F2 L2 G3 F3 L3 L0 B0 G0 B3 G3 R3 L3 B2 G2 R2 L2")


def test_a_unit_is_prefetched_whatever_its_size() -> None:
    """A number that is meant for single weights would else leave large units without."""
    config = zero(3, optimizer=ADAMW, shardwell={"shard_at_world_one": True})
    config["zero_optimization"]["stage3_prefetch_bucket_size"] = 1
    engine, *_ = shardwell.initialize(model=Gpt(blocks=2), config=config, device="cpu")
    with engine.record() as trace:
        engine(batches(1, 4)[0])
    assert str(trace).startswith("G0 G1 F0 G2 F1")


@pytest.mark.parametrize(("live", "is_told"), [(10**9, False), (100, True), (0, False)])
def test_who_lets_too_little_be_whole_for_a_prefetch_is_told(
    caplog: pytest.LogCaptureFixture, live: int, is_told: bool
) -> None:
    config = zero(3, optimizer=ADAMW, shardwell={"shard_at_world_one": True})
    config["zero_optimization"]["stage3_max_live_parameters"] = live
    shardwell.initialize(model=Gpt(blocks=2), config=config, device="cpu")
    told = re.search(r"takes up to (\d+) whole parameters", caplog.text)
    assert (told is not None) is is_told
    if told is not None:
        config["zero_optimization"]["stage3_max_live_parameters"] = int(told[1])
        caplog.clear()
        engine, *_ = shardwell.initialize(model=Gpt(blocks=2), config=config, device="cpu")
        with engine.record() as trace:
            engine(batches(1, 4)[0])
        assert str(trace).startswith("G0 G1 F0 G2 F1 L1 G3 F2")  # what was told is enough
        assert caplog.text == ""


def test_a_destroyed_engine_leaves_the_model_unhooked(ranks: Ranks) -> None:
    assert ranks.run(2, destroy_and_build_again) == [True, True]


def destroy_and_build_again() -> bool:
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        engine = shardwell.initialize(model=Gpt(), config=zero(3, optimizer=ADAMW)).engine
        loss = engine(batches(1, 4)[0])
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        engine.destroy()
        assert not engine.module.blocks[0]._forward_hooks
    return losses[0] == losses[1]


def test_steps_per_print_prints_that_often(capsys: pytest.CaptureFixture[str]) -> None:
    engine, *_ = shardwell.initialize(model=Gpt(), config=zero(1, optimizer=ADAMW, steps_per_print=2), device="cpu")
    for batch in batches(4, 4):
        engine.backward(engine(batch))
        engine.step()
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("Gpt: 9,443 parameters in 5 units on 1 rank (cpu), stage 1, parameters on device")
    assert [line.split("  ")[0] for line in lines] == ["step 2", "step 4"]


def test_reports_print_as_tables() -> None:
    engine, *_ = shardwell.initialize(model=Gpt(), config=zero(2, optimizer=ADAMW), device="cpu")
    engine.backward(engine(batches(1, 4)[0]))
    engine.step()
    assert "optimizer" in str(engine.memory())
    assert "received by this rank" in str(engine.traffic())
    assert set(engine.memory().by_unit()) == {"", "embed", "blocks.0", "blocks.1", "blocks.2"}


def test_the_model_shows_through_the_engine() -> None:
    engine = shardwell.initialize(model=Gpt(), config=zero(1), device="cpu").engine
    assert engine.recompute == ""
    assert engine.blocks is engine.module.blocks
    with pytest.raises(AttributeError):
        _ = engine.no_such_thing


def born_from_an_existing_model() -> bool:
    torch.manual_seed(0)
    model = Gpt()
    plain = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    shardwell.zero.Init(module=model, config_dict_or_path=zero(3), remote_device="cpu")
    away = sum(type(parameter) is not torch.nn.Parameter for parameter in model.parameters())
    shardwell.initialize(model=model, config=zero(3))
    found = whole_parameters(model)
    return away >= len(plain) - 2 and all(torch.equal(found[name], plain[name]) for name in plain)


def test_an_existing_model_can_be_split_by_init(ranks: Ranks) -> None:
    assert ranks.run(2, born_from_an_existing_model) == [True, True]


def test_init_does_nothing_when_disabled_or_below_stage_3() -> None:
    for settings in ({"config": zero(3), "enabled": False}, {"config": zero(2)}):
        with shardwell.zero.Init(**settings):
            model = Gpt()
        assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
