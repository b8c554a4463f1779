"""The same engine on CUDA: kernels, parity with several ranks on one GPU, lanes, and memory."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

import shardwell
from shardwell.optim.grad_norm import FIRST_STEPS
from tests.support.gpu import nccl_engine, on_the_gpu
from tests.support.internals import groups_of
from tests.support.models import Gpt, batches, whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.training import Case, distance, plainly

pytestmark = pytest.mark.gpu


def test_rounding_kernels_equal_the_reference_bit_for_bit() -> None:
    from shardwell.kernels.rounding import join, split, to_bf16

    bits = torch.randint(-(2**31), 2**31, (1_000_003,)).to(torch.int32)
    bits[:4] = torch.tensor([0x7FFFFFFF, -1, 0x7F7FFFFF, 0x8000]).to(torch.int32)
    number = bits.view(torch.float32)
    high, low = torch.empty_like(number, dtype=torch.bfloat16), torch.empty_like(number, dtype=torch.int16)
    split(number, high, low)
    there = number.cuda()
    high_there, low_there = high.cuda().zero_(), low.cuda().zero_()
    split(there, high_there, low_there)
    nan = number.isnan()
    assert torch.equal(high_there.cpu()[~nan].view(torch.int16), high[~nan].view(torch.int16))
    assert torch.equal(low_there.cpu(), low)
    assert high_there.cpu()[nan].isnan().all()
    back = join(high_there, low_there, torch.empty_like(there)).cpu()
    assert torch.equal(back[~nan].view(torch.int32), bits[~nan])
    assert back[nan].isnan().all()
    assert torch.equal(to_bf16(there, torch.empty_like(high_there))[~nan.cuda()], high_there[~nan.cuda()])


CASES = [Case(steps=8, clip=0.5, groups=True), Case(steps=8, accumulation=4)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_several_ranks_on_one_gpu_keep_parity(ranks: Ranks, stage: int, num_ranks: int) -> None:
    answers = ranks.run(num_ranks, on_the_gpu, CASES, stage)
    for case, found in zip(CASES, answers[0], strict=True):
        difference, name = distance(found, plainly(case)[0])
        assert difference < 1e-10, f"{name} differs by {difference}"


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_activation_checkpointing_on_the_gpu(ranks: Ranks, recompute: str) -> None:
    case = Case(steps=4, model={"recompute": recompute})
    difference, name = distance(ranks.run(2, on_the_gpu, [case], 3)[0][0], plainly(case)[0])
    assert difference < 1e-10, f"{name} differs by {difference}"


def test_a_second_copy_in_the_node_changes_no_bit_on_the_gpu(ranks: Ranks) -> None:
    for num_ranks in (3, 4):
        without, with_copies = ranks.run(num_ranks, on_the_gpu, [second_copy_case(1), second_copy_case(2)], 3)[0]
        for name in without:
            assert (without[name] == with_copies[name]).all(), (num_ranks, name)


def second_copy_case(partition: int) -> Case:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"zero_hpz_partition_size": partition}}
    return Case(dtype=torch.float32, steps=6, accumulation=2, clip=0.5, config=config)


def test_bf16_stages_agree_bit_for_bit_on_the_gpu(ranks: Ranks) -> None:
    case = Case(dtype=torch.float32, steps=6, config={"bf16": {"enabled": True}})
    one, two, three = (ranks.run(2, on_the_gpu, [case], stage)[0][0] for stage in (1, 2, 3))
    for name in one:
        assert (one[name] == two[name]).all(), name
        assert (one[name] == three[name]).all(), name


def test_born_sharded_on_the_gpu_gives_the_weights_of_a_model_made_there(ranks: Ranks) -> None:
    for same in ranks.run(2, born_on_the_gpu):
        assert all(same.values()), same


def born_on_the_gpu() -> dict[str, bool]:
    os.environ["SHARDWELL_DEVICE"] = "cuda:0"
    torch.manual_seed(0)
    with torch.device("cuda"):
        plain = {name: p.detach().clone() for name, p in Gpt().named_parameters()}
    torch.manual_seed(0)
    with shardwell.zero.Init(config_dict_or_path=zero(3)):
        model = Gpt()
    shardwell.initialize(model=model, config=zero(3))
    found = whole_parameters(model)
    return {name: bool(torch.equal(found[name], plain[name])) for name in plain}


def nccl_steps(stage: int, bf16: bool) -> dict[str, Any]:
    engine, data = nccl_engine(stage, bf16={"enabled": bf16}, gradient_clipping=1.0)
    for batch in data:
        engine.backward(engine(batch))
        engine.step()
    return whole_parameters(engine.module)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_one_nccl_rank_gives_the_same_bits_with_and_without_releasing(ranks: Ranks, bf16: bool) -> None:
    whole, released = (ranks.run(1, nccl_steps, stage, bf16)[0] for stage in (1, 3))
    for name in whole:
        assert (whole[name] == released[name]).all(), name


def nccl_nan() -> tuple[str, bool]:
    engine, data = nccl_engine(3)
    engine.backward(engine(data[0]))
    engine.step()
    before = whole_parameters(engine.module)
    engine.backward(engine(data[1]) * float("nan"))
    try:
        engine.step()  # the host does not wait for the verdict here ...
        engine.backward(engine(data[2]))
        engine.step()  # ... it hears it here
    except shardwell.NonFiniteError as error:
        after = whole_parameters(engine.module)
        return str(error), all(torch.equal(before[name], after[name]) for name in before)
    return "", False


def test_nan_leaves_parameters_untouched_without_waiting_for_the_device(ranks: Ranks) -> None:
    text, untouched = ranks.run(1, nccl_nan)[0]
    assert "not applied" in text
    assert untouched


def nccl_nan_later() -> tuple[list[int], bool, bool]:
    """Steps counted as left out behind each of three; and whether the bad one and the next one changed something."""
    engine, data = nccl_engine(3, bf16={"enabled": True})
    for _ in range(FIRST_STEPS):
        engine.backward(engine(data[0]))
        engine.step()
    before, counts, changed = whole_parameters(engine.module), [], []
    for factor in (float("nan"), 1.0, 1.0):
        engine.backward(engine(data[1]) * factor)
        engine.step()
        counts.append(engine.skipped_steps)
        after = whole_parameters(engine.module)
        changed.append(any(not torch.equal(before[name], after[name]) for name in before))
    return counts, changed[0], changed[1]


def test_a_bad_batch_later_is_left_out_and_counted_when_the_host_hears_of_it(ranks: Ranks) -> None:
    counts, bad_changed, good_changed = ranks.run(1, nccl_nan_later)[0]
    assert counts[1:] == [1, 1]  # heard at the step behind it, if nobody looked before
    assert not bad_changed
    assert good_changed


def resting_bytes(stage: int, bf16: bool) -> tuple[int, int]:
    warm_up = Gpt(width=64, blocks=4, vocab=160).cuda()  # whatever the math libraries keep is there before we count
    for model in (warm_up, warm_up.bfloat16()):
        model(batches(1, 4, 160)[0].cuda()).backward()
    del warm_up, model
    gc.collect()
    before = torch.cuda.memory_allocated()
    engine, data = nccl_engine(stage, bf16={"enabled": bf16})
    numel = sum(group.layout.numel for group in groups_of(engine))
    for batch in data[:2]:
        engine.backward(engine(batch))
        engine.step()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before, numel


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_twelve_bytes_a_parameter_at_rest_on_one_gpu(ranks: Ranks, stage: int, bf16: bool) -> None:
    allocated, numel = ranks.run(1, resting_bytes, stage, bf16)[0]
    assert 12 * numel <= allocated <= 12 * numel * 1.03  # the allocator rounds every tensor up to 512 bytes
