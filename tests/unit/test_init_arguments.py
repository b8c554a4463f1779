"""What `zero.Init` is told: configuration, dtype, tiers, DeepSpeed's other arguments, and parameters of other kinds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.errors import ConfigError, ShardwellError
from shardwell.memory import Tier
from shardwell.sharding import released, sharded_init
from shardwell.sharding.init_parameters import InitParameter
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.ranks import Ranks


@pytest.fixture(autouse=True)
def nothing_was_said() -> None:
    sharded_init._said.clear()


def is_split(model: nn.Module) -> bool:
    return all(released.is_released(parameter) for parameter in model.parameters())


def resting(model: nn.Module) -> set[tuple[Tier, int]]:
    """Tier and bytes an element of each shard."""
    found = set()
    for parameter in model.parameters():
        owner = released.owner_of(parameter)
        assert isinstance(owner, InitParameter)
        assert owner._shard is not None
        found.add((owner.tier_and_bytes[0], owner._shard.tensor.element_size()))
    return found


def test_init_without_a_configuration_splits() -> None:
    with shardwell.zero.Init(device="cpu"):
        model = Gpt()
    assert is_split(model)


def test_below_stage_3_it_does_nothing_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shardwell"):
        for _ in range(2):
            with shardwell.zero.Init(config=zero(2), device="cpu"):
                model = Gpt()
            assert not any(released.is_owned(parameter) for parameter in model.parameters())
    assert [record.message for record in caplog.records if "zero.Init does nothing" in record.message] == [
        "zero.Init does nothing: its configuration has ZeRO stage 2, which keeps parameters unsharded. Set "
        "zero_optimization.stage to 3, or leave zero.Init out."
    ]


def test_the_configuration_s_offload_is_where_shards_rest(tmp_path: Path) -> None:
    for device, tier in (("cpu", Tier.HOST), ("nvme", Tier.DISK)):
        block = {"device": device, "nvme_path": str(tmp_path)}
        config = zero(3, zero_optimization={"offload_param": block})
        with shardwell.zero.Init(config=config, device="cpu"):
            model = Gpt()
        assert resting(model) == {(tier, 4)}
        with shardwell.zero.Init(config=config, device="cpu", remote_device="none"):
            model = Gpt()
        assert resting(model) == {(Tier.DEVICE, 4)}


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_shards_rest_in_the_configured_dtype(name: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    torch.manual_seed(0)
    plain = dict(Gpt().to(dtype).named_parameters())
    config = zero(3, **{name: {"enabled": True}})
    with shardwell.zero.Init(config=config, device="cpu"):
        torch.manual_seed(0)
        model = Gpt()
        assert model.head.weight.dtype == torch.float32  # while it is built
    assert resting(model) == {(Tier.DEVICE, 2)}
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    for key, values in whole_parameters(model).items():
        assert torch.equal(values, plain[key]), key


def test_the_dtype_of_the_caller_counts_more_than_the_configuration() -> None:
    config = zero(3, bf16={"enabled": True})
    with shardwell.zero.Init(config=config, device="cpu", dtype=torch.float32):
        model = Gpt()
    assert resting(model) == {(Tier.DEVICE, 4)}
    with pytest.raises(ConfigError, match="floating-point"):
        shardwell.zero.Init(dtype=torch.int8)


def trained_in_bf16() -> list[dict[str, Tensor]]:
    """Masters after two steps: born in `Init`, and from a model that was rounded first."""
    config = zero(3, bf16={"enabled": True}, train_micro_batch_size_per_gpu=2)
    found = []
    for born in (True, False):
        with shardwell.zero.Init(config=config, enabled=born):
            torch.manual_seed(0)
            model = Gpt()
        if not born:
            model = model.bfloat16().float()
        engine, *_ = shardwell.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config
        )
        for batch in batches(2, 4):
            engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
            engine.step()
        found.append({n: shardwell.utils.safe_get_full_fp32_param(p).clone() for n, p in model.named_parameters()})
    return found


def test_masters_start_from_the_rounded_values(ranks: Ranks) -> None:
    for born, rounded in ranks.run(2, trained_in_bf16):
        for name, values in rounded.items():
            assert (torch.as_tensor(born[name]) == torch.as_tensor(values)).all(), name


def initialised_in_fp32() -> bool:
    """Initialisers that 16 bits do not know run on parameters that came back, and what they leave is rounded."""
    config = zero(3, bf16={"enabled": True})

    def build() -> Gpt:
        torch.manual_seed(0)
        model = Gpt()
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight)
        return model

    with shardwell.zero.Init(config=config):
        model = build()
    plain = dict(build().bfloat16().named_parameters())
    return all(torch.equal(values, plain[name]) for name, values in whole_parameters(model).items())


def test_initialisers_run_in_the_dtype_of_the_model(ranks: Ranks) -> None:
    assert ranks.run(2, initialised_in_fp32) == [True, True]


# --------------------------------------------------------------------------------------- DeepSpeed's other arguments


class Mpu:
    def __init__(self, group: Any) -> None:
        self.group = group

    def get_data_parallel_group(self) -> Any:
        return self.group


def groups() -> list[str]:
    said = []
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    for given in (
        {"data_parallel_group": dist.group.WORLD},
        {"mpu": Mpu(dist.group.WORLD)},
        {"data_parallel_group": alone},
        {"sequence_data_parallel_group": alone},
        {"mpu": Mpu(alone)},
    ):
        try:
            with shardwell.zero.Init(**given):
                assert released.is_owned(nn.Linear(2, 2).weight)
            said.append("")
        except ConfigError as error:
            said.append(str(error))
    return said


def test_groups_of_some_of_the_ranks_are_refused(ranks: Ranks) -> None:
    for said in ranks.run(2, groups):
        assert said[:2] == ["", ""]
        assert all("names 1 of 2 ranks" in words for words in said[2:])


def test_arguments_without_effect_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "shardwell"),
        shardwell.zero.Init(device="cpu", mem_efficient_linear=True, zero_quantized_weights=True, pin_memory=True),
    ):
        nn.Linear(2, 2)
    assert any("mem_efficient_linear" in r.message and "zero_quantized_weights" in r.message for r in caplog.records)
    with pytest.raises(ConfigError, match=r"param_swapper.*nvme"):
        shardwell.zero.Init(param_swapper=object())
    with pytest.raises(TypeError, match="no_such_argument"):
        shardwell.zero.Init(no_such_argument=1)


# --------------------------------------------------------------------------------- other kinds of parameters


class Params4bit(nn.Parameter):
    """As bitsandbytes' does, it becomes codes when it goes to a device."""

    def to(self, *args: Any, **kwargs: Any) -> Params4bit:  # type: ignore[override]
        self.data = (self.data * 7).to(torch.int8)
        return self


class Linear4bit(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.weight = Params4bit(self.weight.data, requires_grad=False)


def test_parameters_with_rules_of_their_own_are_refused_in_words() -> None:
    with (
        pytest.raises(ShardwellError, match="'weight' of Linear4bit: its class Params4bit has its own to"),
        shardwell.zero.Init(device="cpu"),
    ):
        Linear4bit(4, 4)
    outside = Linear4bit(4, 4)
    with shardwell.zero.Init(device="cpu"):
        model = nn.Sequential(nn.Linear(4, 4), outside)
    assert type(model[1].weight) is Params4bit
    assert released.is_released(model[0].weight)


def test_lazy_modules_stay_whole_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shardwell"), shardwell.zero.Init(device="cpu"):
        model = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(5), nn.LazyLinear(6))
        model(torch.ones(2, 3))
    assert len([record for record in caplog.records if "LazyLinear" in record.message]) == 1
    engine = shardwell.initialize(model=model, config=zero(3), device="cpu").engine
    assert engine(torch.ones(2, 3)).shape == (2, 6)


class Named(nn.Parameter):
    """A harmless class."""


def test_a_harmless_class_is_kept_and_shows_while_away() -> None:
    with shardwell.zero.Init(device="cpu"):
        first = nn.Linear(3, 3)
        first.weight = Named(torch.ones(3, 3))
        first.weight.note = "mine"  # type: ignore[attr-defined]
        nn.Linear(2, 2)
        assert released.is_released(first.weight)
        assert isinstance(first.weight, Named)
    assert first.weight.note == "mine"  # type: ignore[attr-defined]
    with shardwell.zero.GatheredParameters(first.weight):
        assert type(first.weight) is Named


def test_parameters_that_share_memory_by_data_are_refused_in_words() -> None:
    with shardwell.zero.Init(device="cpu"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight.data = model[0].weight.data
    with pytest.raises(ShardwellError, match=r"had one memory, by `.data =`.*module.weight = other.weight"):
        shardwell.initialize(model=model, config=zero(3), device="cpu")


# -------------------------------------------------------------------------------------------------- TorchScript, meta


class Traced(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        if how == "trace":
            torch.jit.trace(nn.Sequential(self.first, self.second), torch.ones(1, 3))
        else:
            self.scripted = torch.jit.script(nn.Linear(3, 3))


@pytest.mark.parametrize(("how", "words"), [("trace", "torch.jit.trace cannot"), ("script", "scripted or traced")])
def test_torchscript_is_refused_in_words(how: str, words: str) -> None:
    with pytest.raises(ShardwellError, match=words), shardwell.zero.Init(device="cpu"):
        Traced(how)


def test_a_scripted_root_still_runs() -> None:
    """It is no module of another, so nobody is told of it; its memory must not be freed under it."""
    with shardwell.zero.Init(device="cpu"):
        scripted = torch.jit.script(nn.Linear(300, 300))
        nn.Linear(3, 3)
    assert torch.isfinite(scripted(torch.ones(2, 300))).all()


def test_meta_parameters_are_left_alone_until_they_have_values() -> None:
    with shardwell.zero.Init(device="cpu"):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        assert all(parameter.is_meta for parameter in model.parameters())
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        whole = nn.ModuleList([model])
    assert is_split(whole)
    assert all(bool((values == 1).all()) for values in whole_parameters(whole).values())
    with torch.device("meta"), shardwell.zero.Init(device="cpu"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_empty_weights_of_accelerate_stay_empty() -> None:
    accelerate = pytest.importorskip("accelerate")
    with shardwell.zero.Init(config=zero(3)), accelerate.init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    engine = shardwell.initialize(model=model, config=zero(3)).engine
    assert float(engine(torch.ones(1, 4)).detach().sum()) == 2 * (5 * 4 + 1)


def test_a_model_of_which_a_part_has_no_values_is_refused() -> None:
    with shardwell.zero.Init(device="cpu"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    with pytest.raises(ShardwellError, match=r"'1.weight' is on the meta device.*to_empty"):
        shardwell.initialize(model=model, config=zero(3))


def test_pickling_a_model_is_refused_in_words_and_its_state_can_be_saved(tmp_path: Path) -> None:
    with shardwell.zero.Init(device="cpu"):
        model = Gpt()
    with pytest.raises(ShardwellError, match=r"cannot be pickled.*state_dict"):
        torch.save(model, tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "state")
    assert torch.load(tmp_path / "state").keys() == model.state_dict().keys()


def test_layers_that_are_copied_are_split_too() -> None:
    with shardwell.zero.Init(device="cpu"):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), num_layers=3)
    assert all(released.is_owned(parameter) for parameter in model.parameters())
    assert is_split(model)
