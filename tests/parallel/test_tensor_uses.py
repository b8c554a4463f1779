"""Uses of a tensor axis: models that come cut, meshes, random numbers, bytes, bits, failures, other optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwell
from shardwell.errors import DivergenceError, ShardwellError
from shardwell.parallel import TrafficKind
from tests.support.models import batches, zero
from tests.support.ranks import Ranks
from tests.support.tensor_models import (
    PLAN,
    ROWS,
    WIDTH,
    Decoder,
    TensorCase,
    grid_config,
    on_grid,
    plainly,
    started,
    train,
)
from tests.support.training import distance

# ------------------------------------------------------------------------------------------ models that come cut


class Summed(torch.autograd.Function):
    """Sums over a group, in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, in_forward: bool) -> Tensor:
        ctx.group, ctx.in_forward = group, in_forward
        found = x.clone()
        if in_forward:
            dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        if not ctx.in_forward:
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


class HandCut(nn.Module):
    """An MLP that its author has cut, with Megatron's attributes."""

    def __init__(self, group: Any, num_parts: int) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 24 // num_parts), nn.Linear(24 // num_parts, 8, bias=False)
        for parameter, dim in ((self.up.weight, 0), (self.up.bias, 0), (self.down.weight, 1)):
            parameter.tensor_model_parallel, parameter.partition_dim = num_parts > 1, dim

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.group is None:
            return x + self.down(torch.tanh(self.up(h)))
        h = torch.tanh(self.up(Summed.apply(h, self.group, False)))
        return x + Summed.apply(self.down(h), self.group, True)


class Mpu:
    """Megatron's getters for neighbouring tensor ranks."""

    def get_tensor_model_parallel_world_size(self) -> int:
        return 2

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank() % 2

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // 2

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() // 2


def hand_cut(stage: int, way: str) -> dict[str, Tensor]:
    """Train a model that comes cut; values of each part come from the first data rank that has it."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(100 + rank)
    model = HandCut(groups[rank // 2], 2).double()
    if rank < 2:
        torch.manual_seed(0)
        whole = HandCut(None, 1).double()
        with torch.no_grad():
            model.up.weight.copy_(whole.up.weight.chunk(2)[rank])
            model.up.bias.copy_(whole.up.bias.chunk(2)[rank])
            model.down.weight.copy_(whole.down.weight.chunk(2, 1)[rank])
            model.norm.load_state_dict(whole.norm.state_dict())
    axes: dict[str, Any] = {"mpu": Mpu()} if way == "mpu" else {}
    if way == "mesh":
        axes["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    config = zero(stage, gradient_clipping=0.1, train_micro_batch_size_per_gpu=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, **axes).engine
    for step in range(4):
        engine.backward(engine(inputs(step).chunk(2)[engine.data_rank]).square().mean())
        engine.step()
    return engine.state_dict()


def inputs(step: int) -> Tensor:
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def test_parameters_with_megatrons_attributes_are_taken_as_parts(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = HandCut(None, 1).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    for stage, way in ((3, "mesh"), (1, "mpu")):
        for found in ranks.run(4, hand_cut, stage, way):
            assert distance(found, model.state_dict())[0] < 1e-10


# ------------------------------------------------------------------------- zero.Init, other optimizers, layer_specs

LAYER_SPECS = {
    "layer_specs": [
        {
            "patterns": [r"blocks\..*\.attention\.[qkv]\.weight$", r"blocks\..*\.up\.weight$"],
            "partition_type": "column",
        },
        {"patterns": [r"blocks\..*\.(attention\.out|down)\.weight$"], "partition_type": "row"},
    ]
}
OTHERS = [
    TensorCase(born_sharded=True, steps=3),
    TensorCase(optimizer="SGD", tensor={"partition_config": LAYER_SPECS}, steps=3),
]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_init_and_layer_specs_follow_one_process(ranks: Ranks, stage: int) -> None:
    for case, values in zip(OTHERS, ranks.run(4, on_grid, OTHERS, stage)[3], strict=True):
        assert distance(values, plainly(case))[0] < 1e-10


# ---------------------------------------------------------------------- replicas, compiled units, another engine


def replicated(stage: int) -> dict[str, Tensor]:
    """Train on replicas of two shards of two tensor ranks."""
    case = TensorCase(steps=2, size=1)
    torch.manual_seed(dist.get_rank())
    model = case.build()
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    config, optimizer = grid_config(case, stage), case.make_optimizer(model)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, mesh=mesh).engine
    train(engine, case)
    return engine.state_dict()


@pytest.mark.slow
def test_replicas_of_tensor_ranks_follow_one_process(ranks: Ranks) -> None:
    for found in ranks.run(8, replicated, 3)[::7]:
        assert distance(found, plainly(TensorCase(steps=2)))[0] < 1e-10


def again() -> list[dict[str, Tensor]]:
    """Train compiled units, and hand the model to a second engine, which goes on and is destroyed."""
    case = TensorCase(steps=4, optimizer="SGD", config={"shardwell": {"shard_at_world_one": True}})
    engine, model = started(case, 3)
    engine.compile(backend="eager")
    train(engine, case, 0, 2)
    config, optimizer = grid_config(case, 2), case.make_optimizer(model)
    second = shardwell.initialize(model=model, optimizer=optimizer, config=config).engine
    train(second, case, 2, 4)
    trained = second.state_dict()
    second.destroy()
    return [trained, {name: value.detach() for name, value in model.state_dict().items()}]


@pytest.mark.slow
def test_a_cut_model_is_compiled_handed_on_and_made_whole(ranks: Ranks) -> None:
    for found in ranks.run(2, again):
        for values in found:
            assert distance(values, plainly(TensorCase(steps=4, optimizer="SGD")))[0] < 1e-10


# ------------------------------------------------------------------------------------------ precisions, tiers, codecs

TIERS: list[tuple[str, dict[str, Any], float]] = [
    ("bf16", {"bf16": {"enabled": True}}, 5e-2),
    ("fp16", {"fp16": {"enabled": True, "initial_scale_power": 8}}, 5e-2),
    ("host", {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, 1e-5),
    ("qwZ and qgZ", {"zero_optimization": {"zero_quantized_weights": True, "zero_quantized_gradients": True}}, 0.2),
]


def norms(stage: int, configs: list[dict[str, Any]]) -> list[list[float]]:
    found = []
    for config in configs:
        case = TensorCase(dtype=torch.float32, steps=2, config=config)
        engine, _ = started(case, stage)
        found.append(train(engine, case))
        engine.destroy(whole=False)
    return found


@pytest.mark.slow
def test_precisions_tiers_and_codecs_work_on_a_grid(ranks: Ranks) -> None:
    configs = [{}, *(config for _, config, _ in TIERS)]
    first, *others = ranks.run(4, norms, 3, configs)
    assert all(other == first for other in others)  # every rank of the grid has the same norm, to the bit
    plain, *rest = first
    for (name, _, tolerance), found in zip(TIERS, rest, strict=True):
        assert found == pytest.approx(plain, rel=tolerance), name


# ------------------------------------------------------------------------------------------------ bits, random numbers


def bits(stage: int, **extra: Any) -> dict[str, Tensor]:
    """Train in bf16; return the parameters that tensor ranks hold alike, and the losses."""
    case = TensorCase(dtype=torch.float32, steps=4, config={"bf16": {"enabled": True}}, **extra)
    engine, model = started(case, stage)
    train(engine, case)
    with shardwell.zero.GatheredParameters(model.parameters()):
        return {
            name: parameter.detach().float().clone()
            for name, parameter in model.named_parameters()
            if "norm" in name or name == "position" or name.endswith(("down.bias", "out.bias"))
        }


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_that_are_not_cut_keep_the_same_bits(ranks: Ranks, stage: int) -> None:
    tensor = {"sequence_parallel": stage == 2}
    first, *others = ranks.run(4, bits, stage, tensor=tensor)
    assert len(first) == 15
    for other in others:
        assert all((other[name] == value).all() for name, value in first.items())


def dropped(recompute: bool) -> dict[str, Any]:
    """Return what blocks put out with dropout, and the masks inside of a cut region."""
    case = TensorCase(model={"drop": 0.5, "recompute": recompute}, size=2)
    engine, model = started(case, 1)
    seen: dict[str, list[Tensor]] = {"out": [], "in": []}
    model.blocks[0].register_forward_hook(lambda *a: seen["out"].append(a[2].detach().clone()))
    model.blocks[0].attention.out.register_forward_pre_hook(lambda _, args: seen["in"].append(args[0].detach().clone()))
    batch = batches(1, 2)[0]
    loss = engine(batch)
    engine.backward(loss)
    engine.step()
    again = [one.equal(seen["in"][0]) for one in seen["in"]]
    return {
        "out": seen["out"][0],
        "in": seen["in"][0] != 0,
        "again": all(again),
        "times": len(again),
        "loss": loss.item(),
    }


def test_dropout_is_alike_outside_of_cut_regions_and_not_inside(ranks: Ranks) -> None:
    for recompute in (False, True):
        one, other = ranks.run(2, dropped, recompute)
        assert one["loss"] == other["loss"]
        assert (one["out"] == other["out"]).all()
        assert not (one["in"] == other["in"]).all()
        assert one["again"]
        assert one["times"] == 1 + recompute


# ------------------------------------------------------------------------------------------------------------- bytes


def counted(sequence: bool) -> dict[str, Any]:
    case = TensorCase(plan=PLAN, tensor={"sequence_parallel": sequence}, steps=2)
    engine, _ = started(case, 2)
    train(engine, case)
    report = engine.traffic()
    return {"calls": report.calls[TrafficKind.TENSOR], "axes": report.by_axis()}


def test_a_block_has_four_sums_and_the_bytes_of_the_formula(ranks: Ranks) -> None:
    rows, length, layers = ROWS // 2, 8, 2
    each = 2 * rows * length * WIDTH * 8 // 2  # 2 (t - 1) / t of the hidden states, in fp64
    for sequence in (False, True):
        for found in ranks.run(4, counted, sequence):
            # With sequences split, each sum is a reduce-scatter and an all-gather; there are two more at the ends.
            assert found["calls"] == (4 * layers if not sequence else 8 * layers + 2)
            ends = each if sequence else 0
            assert found["axes"]["tensor"] == 4 * layers * each + ends
            assert found["axes"]["data"] > 0
            assert found["axes"]["pipe"] == 0


# ---------------------------------------------------------------------------------------------------------- failures


def differing(case: str) -> str:
    """One rank of a tensor line differs from the other, or fails."""
    rank = dist.get_rank()
    engine, model = started(TensorCase(), 2)
    batch = batches(1, ROWS)[0]
    rows = batch.chunk(2)[engine.data_rank]
    try:
        if case == "rows":
            engine(rows if rank != 3 else rows.flip(0))
        elif case == "samples":
            engine.eval()
            for number in range(16):
                engine(rows if rank != 3 or number < 5 else rows.flip(0))
        elif case == "shape":
            for length in (9, 9, 9, 7 if rank == 1 else 9):
                engine(rows[:, :length])
        else:
            if rank == 2:
                model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
            engine.backward(engine(rows))
            engine.step()
            engine(rows)
    except (ShardwellError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
def test_ranks_of_a_tensor_line_that_differ_are_named(ranks: Ranks) -> None:
    rows = ranks.run(4, differing, "rows")
    assert all("rank" in words and "take the same rows" in words for words in rows[2:])
    samples = ranks.run(4, differing, "samples")
    assert all("sample the same tokens" in words for words in samples[2:])
    shapes = ranks.run(4, differing, "shape")
    assert any(DivergenceError.__name__ in words for words in shapes[:2])
    failed = ranks.run(4, differing, "fails")
    assert failed[2].startswith("ZeroDivisionError")
    assert all("rank 2 failed first" in words for rank, words in enumerate(failed) if rank != 2)


# ---------------------------------------------------------------------------------------------------------- refusals


def refused(config: dict[str, Any]) -> str:
    try:
        model = Decoder()
        shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=zero(2, **config))
    except ShardwellError as error:
        return str(error)
    return ""


class TooEarly:
    """Getters that answer before Megatron has made its groups."""

    def get_tensor_model_parallel_world_size(self) -> None:
        """Return nothing."""

    def get_tensor_model_parallel_rank(self) -> None:
        """Return nothing."""


def misused() -> list[str]:
    engine, model = started(TensorCase(), 3)
    words = []
    for rank in (-1, engine.data_size):
        try:
            shardwell.zero.GatheredParameters(model.blocks[0].up.weight, modifier_rank=rank)
        except ShardwellError as error:
            words.append(str(error))
    engine.destroy(whole=False)
    try:
        shardwell.initialize(model=Decoder(), config=zero(1), mpu=TooEarly())
    except ShardwellError as error:
        words.append(str(error))
    return words


def test_numbers_of_ranks_that_cannot_be_are_refused(ranks: Ranks) -> None:
    for before, behind, mpu in ranks.run(4, misused):
        for words in (before, behind):
            assert "2 rank(s) share a parameter" in words
            assert "pass a number from 0 to 1" in words
        assert "get_tensor_model_parallel_world_size() answers None, where a number is expected" in mpu


def all_refused(configs: list[dict[str, Any]]) -> list[str]:
    return [refused(config) for config in configs]


REFUSALS = [
    ({"autotp_size": 2}, "Decoder has no plan of its own"),
    ({"autotp_size": 2, "plan": "none"}, "no parameter says that it is a part"),
    ({"autotp_size": 2, "plan": {"blocks.*.nothing": "colwise"}}, "none of its 1 pattern(s) matches"),
    ({"autotp_size": 2, "plan": {"blocks.*.up": "diagonal"}}, "'diagonal' is no style"),
    ({"autotp_size": 2, "plan": {"blocks.*.norm1": "colwise"}}, "is a LayerNorm, and colwise does not fit it"),
    ({"autotp_size": 3, "plan": PLAN}, "2 rank(s) cannot be divided by"),
]


MEASURED = [
    ("zero_hpz_partition_size", 2),
    ("zero_hpz_partition_size", "auto"),
    ("zero_quantized_weights", "auto"),
    ("zero_quantized_gradients", "auto"),
]


def test_what_cannot_be_cut_is_refused_in_words(ranks: Ranks) -> None:
    blocks: list[dict[str, Any]] = [{"tensor_parallel": block} for block, _ in REFUSALS]
    tensor = {"autotp_size": 2, "plan": PLAN}
    blocks += [{"tensor_parallel": tensor, "zero_optimization": {"stage": 3, key: value}} for key, value in MEASURED]
    for found in ranks.run(2, all_refused, blocks):
        for (_, words), said in zip(REFUSALS, found[: len(REFUSALS)], strict=True):
            assert words in said
        for (key, value), said in zip(MEASURED, found[len(REFUSALS) :], strict=True):
            assert f"zero_optimization.{key}: {value} does not work with the axes 2 (tensor)" in said


# ------------------------------------------------------------------------------------------------------------ the page

PAGE = Path(__file__).parents[2] / "docs" / "tensor-parallelism.md"


def run_listings(listings: list[str]) -> float:
    scope: dict[str, Any] = {}
    for code in listings:
        exec(compile(code, str(PAGE), "exec"), scope)
    return float(scope["loss"])


def test_the_listings_of_the_page_run(ranks: Ranks) -> None:
    page = PAGE.read_text().replace('"cuda", (4, 2), mesh_dim', '"cpu", (2, 2), mesh_dim')
    listings = [after.split("```")[0] for after in page.split("```python\n")[1:]]
    assert len(listings) == 2
    one, other, *_ = ranks.run(4, run_listings, listings)
    assert one == other
