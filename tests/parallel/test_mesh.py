"""`initialize(mesh=...)`: a mesh of one row changes nothing; with several rows, states are sharded in each row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwell
from shardwell.errors import DivergenceError, ShardwellError
from shardwell.memory import StateKind
from shardwell.utils import safe_get_full_optimizer_state
from tests.support.internals import groups_of, roles_of
from tests.support.meshes import under_mesh
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.training import Case, all_sharded, distance, plainly


def trained(stage: int, steps: int = 3, **extra: Any) -> dict[str, Any]:
    """Train two accumulated micro-steps at a time, and return all that could differ."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # every rank draws other values: rank 0's count
    model = Gpt(blocks=2)
    config = zero(
        stage, gradient_accumulation_steps=2, gradient_clipping=0.5, train_micro_batch_size_per_gpu=1, **extra
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)
    losses, norms, traces = [], [], []
    for batch in batches(steps, 24):
        with engine.record() as trace:
            for micro in range(2):
                loss = engine(share(batch, rank, num_ranks, micro, 2))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
        traces.append(str(trace))
    report = engine.traffic()
    return {
        "losses": losses,
        "norms": norms,
        "trace": traces,
        "traffic": {f"{kind.value} {hop}": size for (kind, hop), size in report.received.items()},
        "calls": {kind.value: number for kind, number in report.calls.items()},
        "bytes": {kind.value: engine.memory().total(kind) for kind in StateKind},
        "parameters": whole_parameters(model),
        "moments": {
            name: safe_get_full_optimizer_state(parameter, "exp_avg_sq") for name, parameter in model.named_parameters()
        },
        "padded": sum(group.layout.padded for group in groups_of(engine)),
        "num_parameters": len(list(model.parameters())),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


_known: dict[tuple[int, int], list[dict[str, Any]]] = {}


def on_one_row(ranks: Ranks, stage: int) -> list[dict[str, Any]]:
    """Two ranks without a mesh; several tests compare with it."""
    if (2, stage) not in _known:
        _known[2, stage] = ranks.run(2, trained, stage)
    return _known[2, stage]


def on_two_rows(ranks: Ranks, stage: int) -> list[dict[str, Any]]:
    """Two replicas of two ranks."""
    if (4, stage) not in _known:
        _known[4, stage] = ranks.run(4, under_mesh, (2, 2), trained, stage)
    return _known[4, stage]


# ------------------------------------------------------------------------------------------------------ one row


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_mesh_of_one_row_changes_no_bit_byte_or_token(ranks: Ranks, stage: int) -> None:
    plain = on_one_row(ranks, stage)
    for shape in [[(2,)], [(1, 2)], [(2,)], [(2,), (1, 2)]][stage]:
        for expected, found in zip(plain, ranks.run(2, under_mesh, shape, trained, stage), strict=True):
            different = [key for key in expected if not same(expected[key], found[key])]
            assert not different, f"{shape}: {different}"


# ------------------------------------------------------------------------------------------------- several rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "shape"),
    [(0, (2, 2)), (1, (2, 2)), (2, (2, 2)), (3, (2, 2)), (1, (3, 2)), (3, (2, 3))],
)
def test_hybrid_sharding_follows_plain_training(ranks: Ranks, stage: int, shape: tuple[int, int]) -> None:
    cases = [Case(), Case(accumulation=2, clip=0.5, groups=True, born_sharded=True)]
    num_ranks = shape[0] * shape[1]
    if (stage, shape) != (3, (2, 2)):
        cases = cases[1:]
    for case, found in zip(cases, ranks.run(num_ranks, under_mesh, shape, all_sharded, cases, stage)[-1], strict=True):
        difference, name = distance(found, plainly(case)[0])
        assert difference < 1e-10, f"{case}: {name} differs by {difference}"


GATHERS, REDUCES = {0: 1, 1: 1, 2: 1, 3: 4}, {0: 1, 1: 1, 2: 2, 3: 2}  # in a step of two micro-steps


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_traffic_is_that_of_a_row_and_an_all_reduce_of_the_shards(ranks: Ranks, stage: int) -> None:
    for answer in on_two_rows(ranks, stage):
        shard = answer["padded"] // 2 * 4
        traffic = answer["traffic"]
        gathered = traffic.get("gather inside", 0) + traffic.get("publish inside", 0)
        assert gathered == GATHERS[stage] * shard
        assert traffic["reduce inside"] == REDUCES[stage] * (shard + 2 * shard // 2)
        assert traffic["control inside"] == 2 * 8 * (2 + answer["num_parameters"]) * 3


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_take_the_memory_of_a_row(ranks: Ranks, stage: int) -> None:
    row = on_one_row(ranks, stage)
    for rank, answer in enumerate(on_two_rows(ranks, stage)):
        assert answer["bytes"] == row[rank % 2]["bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_replicas_have_the_same_bits(ranks: Ranks, stage: int) -> None:
    first, *others = ranks.run(4, under_mesh, (2, 2), trained, stage, bf16={"enabled": True})
    for other in others:
        for key in ("norms", "parameters", "moments"):
            assert same(first[key], other[key]), key


@pytest.mark.slow
def test_a_16_bit_sum_is_not_rounded_between_the_hops(ranks: Ranks) -> None:
    """Sums over four ranks are equal to the last bit if they are made in fp32, in whatever order."""
    flat = ranks.run(4, trained, 3, 1, bf16={"enabled": True})[0]
    rows = ranks.run(4, under_mesh, (2, 2), trained, 3, 1, bf16={"enabled": True})[0]
    assert flat["norms"] == pytest.approx(rows["norms"], rel=1e-6)


def offloaded(stage: int) -> dict[str, Any]:
    return trained(stage, zero_optimization={"offload_optimizer": {"device": "cpu"}})


@pytest.mark.parametrize("stage", [2, 3])
def test_updates_in_host_memory_follow_those_on_the_device(ranks: Ranks, stage: int) -> None:
    expected = on_two_rows(ranks, stage)[3]
    found = ranks.run(4, under_mesh, (2, 2), offloaded, stage)[3]
    assert expected["norms"] == pytest.approx(found["norms"], rel=1e-6)
    assert expected["losses"] == pytest.approx(found["losses"], rel=1e-5)


# -------------------------------------------------------------------------------------------------- checkpoints


def engine_at(stage: int, seed: int) -> tuple[shardwell.Engine, Gpt]:
    torch.manual_seed(seed)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = zero(stage, train_micro_batch_size_per_gpu=1)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config).engine, model


def step(engine: shardwell.Engine, batch: torch.Tensor) -> None:
    engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
    engine.step()


def saved(folder: str, stage: int) -> dict[str, Any]:
    """Train, save, train on; return the parameters of the end."""
    engine, model = engine_at(stage, seed=0)
    first, second = batches(2, 24)
    step(engine, first)
    engine.save_checkpoint(folder)
    step(engine, second)
    return whole_parameters(model)


def resumed(folder: str, stage: int) -> dict[str, Any]:
    engine, model = engine_at(stage, seed=7)
    engine.load_checkpoint(folder, strict=True)
    step(engine, batches(2, 24)[1])
    return whole_parameters(model)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_is_written_once_and_resumed_by_every_replica(ranks: Ranks, stage: int, tmp_path: Path) -> None:
    hybrid, plain = str(tmp_path / "hybrid"), str(tmp_path / "plain")
    expected = ranks.run(4, under_mesh, (2, 2), saved, hybrid, stage)
    ranks.run(4, saved, plain, stage)
    for other in (expected[1:], ranks.run(4, under_mesh, (2, 2), resumed, hybrid, stage)):
        for found in other:
            assert same(expected[0], found)
    sizes = [sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors")) for folder in (hybrid, plain)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.2)  # random states, names and padding
    found = ranks.run(2, resumed, hybrid, stage)[0]  # by other ranks without a mesh
    assert max(float(abs(found[name] - values).max()) for name, values in expected[0].items()) < 1e-5


# ------------------------------------------------------------------------------------------------------ refusals


def refused(case: str) -> str:
    """Return the words in which a mesh is refused."""
    size = dist.get_world_size()
    config = zero(3)
    if case == "some ranks":
        mesh = DeviceMesh("cpu", torch.arange(size - 1), _init_backend=False)
    elif case == "three dimensions":
        mesh = init_device_mesh("cpu", (size, 1, 1))
    elif case == "strange name":
        mesh = init_device_mesh("cpu", (1, 1, size), mesh_dim_names=("dp", "tp", "up"))
    elif case == "strange beside known":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tpp"))
    elif case == "device":
        mesh = DeviceMesh("cuda", torch.arange(size), _init_backend=False)
    elif case == "nothing sharded":
        mesh = init_device_mesh("cpu", (size, 1))
    elif case == "not a mesh":
        mesh = (2, 2)
    else:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        config["zero_optimization"][case] = {"zero_hpz_partition_size": 2}.get(case, True)
    try:
        model = Gpt()
        shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=config, mesh=mesh)
    except ShardwellError as error:
        return str(error)
    return ""


def all_refused() -> dict[str, str]:
    return {case: refused(case) for case in REFUSALS}


REFUSALS = {
    "some ranks": "does not hold each of the 4 rank",
    "three dimensions": "has 3 dimensions without names",
    "strange name": "has the dimension 'up'. Name the dimensions",
    "strange beside known": "has the dimension 'tpp'. Name the dimensions",
    "device": "of cuda devices, and this rank trains on cpu",
    "nothing sharded": "the dimension that shards has one rank",
    "not a mesh": "expected a torch DeviceMesh, found a tuple",
    "zero_hpz_partition_size": "does not work with a mesh that replicates",
    "zero_quantized_gradients": "does not work with a mesh that replicates",
}


def test_a_mesh_that_does_not_fit_is_refused(ranks: Ranks) -> None:
    for found in ranks.run(4, all_refused):
        for case, words in REFUSALS.items():
            assert words in found[case], case


def turned(names: tuple[str, str]) -> list[int]:
    """Return the ranks that shard together with this one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    model = Gpt()
    config = zero(3)
    made = shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=config, mesh=mesh)
    return list(roles_of(made.engine).shard.rank_group.ranks)


def test_the_last_dimension_shards_unless_names_say_otherwise(ranks: Ranks) -> None:
    assert ranks.run(4, turned, ("dp_replicate", "dp_shard")) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert ranks.run(4, turned, ("one", "other")) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert ranks.run(4, turned, ("shard", "replicate")) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def differing() -> str:
    """Rank 0 shards in rows, the others over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2))
    model = Gpt()
    given = mesh if dist.get_rank() == 0 else None
    try:
        shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=zero(3), mesh=given)
    except DivergenceError as error:
        return str(error)
    return ""


def test_ranks_with_different_meshes_get_an_error_and_do_not_hang(ranks: Ranks) -> None:
    words = "mesh of ranks is 2 (replicate) x 2 (shard) on rank 0 and 4 (shard) on ranks 1, 2, 3"
    assert all(words in found for found in ranks.run(4, differing))


# -------------------------------------------------------------------------------------------------------- faults


def failing() -> str:
    """The last rank fails in its second forward; the others wait for it in several groups."""
    engine, model = engine_at(3, seed=0)
    first, second = batches(2, 24)
    step(engine, first)
    if dist.get_rank() == 3:
        model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        step(engine, second)
    except (ShardwellError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_fails_ends_all_rows(ranks: Ranks) -> None:
    *others, own = ranks.run(4, under_mesh, (2, 2), failing)
    assert own.startswith("ZeroDivisionError")
    assert all("rank 3 failed first" in words for words in others)
