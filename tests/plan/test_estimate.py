"""Plans by the engine's own code: formulas of the literature, extrapolation over depth, and what is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwell
from shardwell import activation_checkpointing
from shardwell.memory import Tier
from shardwell.plan import BlockModel, PlanReport, SimulatedMachine, SimulatedRanks, estimate, tokens
from shardwell.plan.decoder import Decoder, DecoderSizes
from shardwell.plan.devices import gpu, speeds_of
from shardwell.plan.estimate import _run
from shardwell.plan.models import PRESETS, decoder

SMALL = DecoderSizes(16, 64, 4, 100, mlp=128, kv_heads=2, gated=True)


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    adam = {"type": "AdamW", "params": {"lr": 1e-4}}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": adam,
        **more,
    }


def machine(ranks: int, per_node: int = 8, **more: Any) -> SimulatedMachine:
    return SimulatedMachine(ranks=SimulatedRanks(0, ranks, per_node), **more)


# Bytes per parameter of each rank that the ZeRO paper's table (figure 1 and section 5) has: 2 for parameters, 2 for
# gradients, 12 for optimizer state, each divided by the ranks as the stage says. Gradients are gone between steps here.
# All stages on one number of ranks; `test_literature.py` has all cells by formula, and simulations on other numbers.
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_of_7_5b_follow_the_table_of_the_zero_paper(stage: int) -> None:
    ranks = 64
    model = decoder("7.5B", PRESETS["zero-7.5b"], 1, 16, recomputes=True)
    report = estimate(model, config(stage), machine(ranks))
    size = report.costs.num_parameters
    assert 7.3e9 < size < 7.6e9
    shared = ranks if stage else 1
    # bf16 parameters are the upper half of their fp32 masters: 4 + 8 bytes with the moments, and not 2 + 12
    expected = {0: 12 * size, 1: 2 * size + 10 * size / shared, 2: 2 * size + 10 * size / shared, 3: 12 * size / shared}
    assert report.at_rest(Tier.DEVICE) == pytest.approx(expected[stage], rel=0.001)


CODES = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
STATES_ON_HOST = {"offload_optimizer": {"device": "cpu", "ratio": 1.0}}


@pytest.mark.slow
@pytest.mark.parametrize(  # every pair of values
    ("stage", "zero", "recomputes"),
    [
        (2, {}, False),
        (3, {}, True),
        (3, CODES, False),
        (3, CODES, True),
        (2, STATES_ON_HOST, False),
        (2, STATES_ON_HOST, True),
    ],
)
def test_a_few_blocks_predict_all(stage: int, zero: dict[str, Any], recomputes: bool) -> None:
    layers = 20 if stage == 3 else 36  # at stage 2 peaks differ by a constant, which must be small beside all
    model = decoder("small", replace(SMALL, layers=layers), 1, 32, recomputes=recomputes)
    asked = config(stage, zero=zero, shardwell={"bundle_size": 0})  # how many small blocks a bundle has depends on all
    few = estimate(model, asked, machine(4, 2))
    assert any("identical blocks" in note for note in few.notes)
    whole, _ = _run(model.build(layers), asked, machine(4, 2), model.inputs, None)
    assert few.costs.rest == whole.rest
    assert few.costs.traffic == whole.traffic
    assert few.costs.calls == whole.calls
    assert few.costs.copies == whole.copies
    for key, size in whole.peaks.items():
        assert few.costs.peaks[key] == pytest.approx(size, rel=0.001)


def test_activations_are_kept_unless_blocks_are_recomputed() -> None:
    kept, again = (
        estimate(decoder("m", SMALL, 2, 64, recomputes=recomputes), config(3), machine(4)).costs.at_peak["activations"]
        for recomputes in (False, True)
    )
    assert again < kept / 2


def test_inputs_of_recomputed_blocks_wait_on_the_host_if_the_configuration_says_so() -> None:
    """Of all 16 blocks, though few are simulated: 2 sequences of 64 tokens, 64 wide, in bf16."""
    model = decoder("m", SMALL, 2, 64, recomputes=True)
    asked = {"activation_checkpointing": {"cpu_checkpointing": True}}
    here, there = (estimate(model, config(3, **more), machine(4)) for more in ({}, asked))
    assert here.peak(Tier.HOST) == 0
    assert there.peak(Tier.HOST) == 16 * (2 * 64 * 64 * 2)
    assert there.peak(Tier.DEVICE) < here.peak(Tier.DEVICE)


def test_attention_makes_no_matrix_of_scores() -> None:
    sizes = replace(SMALL, layers=4)
    short, long = (
        estimate(decoder("m", sizes, 1, length, recomputes=False), config(2), machine(2)).costs.at_peak["activations"]
        for length in (1024, 2048)
    )
    assert long < 2.1 * short


class KeepsInputs(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = activation_checkpointing.checkpoint(block, x)
        return self.head(self.norm(x)).float().mean()


def test_inputs_of_checkpoints_are_counted_where_they_are() -> None:
    with torch.device("meta"):
        model = KeepsInputs(replace(SMALL, layers=8))

    def planned(on_host: bool) -> PlanReport:
        asked = config(3, activation_checkpointing={"cpu_checkpointing": on_host})
        return estimate(model, asked, machine(4), (tokens(2, 512),))

    kept, sent = planned(False), planned(True)
    inputs = 8 * 2 * 512 * SMALL.hidden * 2
    assert (kept.peak(Tier.HOST), sent.peak(Tier.HOST)) == (0, inputs)
    # the one that is used, one that leaves, and one that comes back ahead; the lower peak is at another moment
    at_most = inputs // 8 * 4
    assert inputs - at_most <= kept.peak(Tier.DEVICE) - sent.peak(Tier.DEVICE) <= inputs


def test_a_module_with_bytes_is_planned_and_left_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
    before = [parameter.clone() for parameter in model.parameters()]
    report = estimate(model, config(3), machine(2), (torch.zeros(4, 8),), loss=lambda out: out.sum())
    assert report.costs.num_parameters == sum(parameter.numel() for parameter in before)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert not any(parameter.is_meta for parameter in model.parameters())


class AsksForValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 0:
            x = -x
        return self.layer(x).sum()


class AsksForAnArray(AsksForValues):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found.sum() * float(found.detach().numpy().sum())


@pytest.mark.parametrize(("kind", "word"), [(AsksForValues, "item"), (AsksForAnArray, "numpy")])
def test_a_model_that_asks_for_values_is_told_its_line(kind: type[nn.Module], word: str) -> None:
    with pytest.raises(shardwell.ShardwellError, match=rf"test_estimate\.py:\d+ .*{word}.*asks for the value"):
        estimate(kind(), config(2), machine(2), (torch.zeros(2, 4),))


def test_fused_updates_that_a_configuration_asks_for_are_planned() -> None:
    def planned(**options: bool) -> int:
        asked = config(2, optimizer={"type": "AdamW", "params": {"lr": 1e-4, **options}})
        return estimate(nn.Linear(64, 64), asked, machine(2), (torch.zeros(2, 64),), torch.sum).peak(Tier.DEVICE)

    assert planned(fused=True) == planned()


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(shardwell.ShardwellError, match="inputs of one micro-step"):
        estimate(nn.Linear(4, 4), config(2), machine(2))
    with pytest.raises(shardwell.ShardwellError, match="no loss was found"):
        estimate(nn.Linear(4, 4), config(2), machine(2), (torch.zeros(2, 4),))
    with pytest.raises(shardwell.ShardwellError, match="expected 1 or more"):
        tokens(0, 8)


def test_a_plan_that_the_engine_would_refuse_says_so_with_numbers() -> None:
    zero = {"offload_optimizer": {"device": "cpu"}}
    model = decoder("m", SMALL, 1, 32, recomputes=True)
    report = estimate(model, config(2, zero=zero), machine(2, host_bytes=1000.0))
    assert not report.fits
    assert "does not fit" in report.sentence()
    assert any("would refuse to start" in note for note in report.assumptions)


def test_secondary_shards_over_other_ranks_than_those_of_a_node_are_said() -> None:
    def said(size: int) -> bool:
        zero = {"stage": 3, "zero_hpz_partition_size": size}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {}},
            "zero_optimization": zero,
        }
        model = decoder("tiny", DecoderSizes(2, 32, 2, 100), 1, 8, recomputes=False)
        notes = estimate(model, config, SimulatedMachine(ranks=SimulatedRanks(0, 8, 4))).notes
        return any("ranks count as a node" in one for one in notes)

    assert [said(size) for size in (1, 2, 4)] == [False, True, False]


def test_reports_are_text_json_and_html() -> None:
    model = BlockModel("tiny", 2, lambda layers: Decoder(replace(SMALL, layers=layers)).to("meta"), (tokens(1, 8),))
    report = estimate(model, config(3), machine(4, device_bytes=1e9))
    found = json.loads(report.json())
    assert found["fits"] is True
    assert found["ranks"] == 4
    assert found["rest"]["parameters device"] == report.costs.rest["parameters device"]
    assert "peak in backward" in str(report)
    assert report._repr_html_().startswith("<pre>")


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("axes", [{}, {"tensor_parallel": {"autotp_size": 2}}, {"sequence_parallel_size": 2}])
def test_transformers_are_answered_that_rows_are_whole_so_that_no_mask_is_made(
    masks: bool, axes: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 8}
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes, **heads))

    def activations(length: int) -> int:
        ids = torch.zeros(1, length, dtype=torch.long)
        inputs = {"input_ids": ids, "labels": ids, "use_cache": False, **({"attention_mask": ids + 1} if masks else {})}
        return estimate(model, config(2, **axes), machine(4), inputs).costs.at_peak["activations"]

    assert activations(4096) < 2.1 * activations(2048)  # with masks it would be four times as much


def test_blocks_that_are_recomputed_under_autocast_have_a_time() -> None:
    asked = {**config(3), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "bf16": {"enabled": False}}
    there = machine(2, speeds=speeds_of(gpu("h100")))
    report = estimate(decoder("m", replace(SMALL, layers=2), 1, 32, recomputes=True), asked, there)
    assert report.time is not None
    assert report.time.seconds > 0


@pytest.mark.slow
def test_compiled_models_are_planned_as_they_are_without_compilation() -> None:
    plain = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
    found = [
        estimate(model, config(3), machine(2), (torch.zeros(4, 8),), loss=lambda out: out.sum())
        for model in (plain, torch.compile(plain))
    ]
    assert found[0].costs.peaks == found[1].costs.peaks
    assert found[0].costs.traffic == found[1].costs.traffic


def test_more_ranks_than_a_simulation_can_list_are_refused() -> None:
    with pytest.raises(shardwell.ShardwellError, match="expected at most"):
        machine(1 << 40)


@pytest.mark.parametrize("more", [{"moments": "8bit"}, "Adagrad", "Lion"], ids=str)
def test_state_on_the_host_takes_nothing_of_the_device(more: Any) -> None:
    """Whatever the optimizer: its state, and what its step computes there, are in host memory."""
    model = decoder("small", SMALL, 1, 16, recomputes=True)
    zero = {"zero": {"offload_optimizer": {"device": "cpu", "ratio": 1.0}}, "gradient_clipping": 1.0}
    other = config(2, **zero)
    if isinstance(more, str):
        other["optimizer"] = {"type": more, "params": {"lr": 1e-4}}
    else:
        other["shardwell"] = more
    adam, found = (estimate(model, one, SimulatedMachine(1e9, 1e9)).costs for one in (config(2, **zero), other))
    for moment in ("forward device", "backward device", "step device"):
        assert found.peaks[moment] == pytest.approx(adam.peaks[moment], rel=0.02), moment
    assert found.copies["to host"] == pytest.approx(adam.copies["to host"], rel=0.01)


def test_optimizers_without_a_kernel_step_in_host_memory_with_gradients_that_wait_on_the_device() -> None:
    model = decoder("small", DecoderSizes(4, 256, 4, 512, mlp=512, gated=True), 1, 16, recomputes=True)
    lamb = config(2, zero={"offload_optimizer": {"device": "cpu", "ratio": 1.0}})
    lamb["optimizer"] = {"type": "Lamb", "params": {"lr": 1e-4}}
    report = estimate(model, lamb, SimulatedMachine(1e9, 1e9))
    gradients = 2 * report.costs.num_parameters
    assert report.costs.peaks["step device"] - report.at_rest(Tier.DEVICE) < 1.2 * gradients
    assert report.costs.copies["to host"] == pytest.approx(gradients, rel=0.01)


@pytest.mark.parametrize("zero", [{}, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}])
def test_many_micro_steps_are_planned_from_few(zero: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, speeds = decoder("small", replace(SMALL, layers=3), 1, 16, recomputes=True), speeds_of(gpu("h100-80gb"))
    asked = config(3, zero=zero, gradient_accumulation_steps=9)
    few = estimate(model, asked, machine(8, speeds=speeds))
    assert any("4 of 9 micro-steps were simulated" in one for one in few.notes)
    monkeypatch.setattr(sys.modules["shardwell.plan.estimate"], "_FEW_MICRO_STEPS", (3, 9))
    whole = estimate(model, asked, machine(8, speeds=speeds))
    assert few.costs == whole.costs
    assert few.config == whole.config
    assert few.time is not None
    assert whole.time is not None
    assert (few.time.samples, few.time.tokens) == (whole.time.samples, whole.time.tokens)
    assert few.time.seconds == pytest.approx(whole.time.seconds, rel=0.001)
