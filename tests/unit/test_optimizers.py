"""Lion, LAMB and Muon against references, over whole parameters and over shards of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwell.errors import ConfigError, ShardwellError
from shardwell.optim.lamb import Lamb
from shardwell.optim.lion import Lion
from shardwell.optim.muon import Muon, muon_groups, newton_schulz
from shardwell.optim.whole import Alone, Place

Groups = list[dict[str, Any]]
SHAPES = [(5, 7), (12,), (3, 2, 4), ()]
MATRICES = [(16, 48), (48, 16), (32, 32), (1, 9), (7, 130)]


def values(shapes: Sequence[tuple[int, ...]], seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def run(optimizer: Optimizer, tensors: list[Tensor], num_steps: int = 10) -> list[Tensor]:
    """Step on gradients that depend on the step alone."""
    for step in range(num_steps):
        for tensor, gradient in zip(tensors, values([t.shape for t in tensors], 100 + step), strict=True):
            tensor.grad = gradient.to(tensor)
        optimizer.step()
    return tensors


def reference(groups: Groups, update: Callable[..., Tensor], num_steps: int = 10) -> list[Tensor]:
    """The same, one parameter after the other. `update` gets a parameter, its gradient, its state and the options."""
    tensors = [tensor for group in groups for tensor in group["params"]]
    states: list[dict[str, Any]] = [{} for _ in tensors]
    options = [group for group in groups for _ in group["params"]]
    for step in range(num_steps):
        for i, gradient in enumerate(values([t.shape for t in tensors], 100 + step)):
            tensors[i] = update(tensors[i], gradient, states[i], **options[i])
    return tensors


def two_groups(first: dict[str, Any], second: dict[str, Any]) -> Groups:
    tensors = values(SHAPES)
    return [{"params": tensors[:2], **first}, {"params": tensors[2:], **second}]


def members(groups: Groups) -> list[Tensor]:
    return [tensor for group in groups for tensor in group["params"]]


def close(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# ------------------------------------------------------------------------------------------------------------- Lion


def lion(p: Tensor, g: Tensor, state: Any, *, lr: float, betas: Any, weight_decay: float, **_: Any) -> Tensor:
    m = state.get("m", torch.zeros_like(p))
    direction = torch.sign(betas[0] * m + (1 - betas[0]) * g)
    state["m"] = betas[1] * m + (1 - betas[1]) * g
    return p - lr * weight_decay * p - lr * direction


def test_lion_follows_its_definition() -> None:
    first = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    second = {"lr": 0.003, "betas": (0.5, 0.8), "weight_decay": 0.0}
    wanted = reference(two_groups(first, second), lion)
    groups = two_groups(first, second)
    optimizer = Lion(groups)
    close(run(optimizer, members(groups)), wanted)
    assert all(set(state) == {"exp_avg"} for state in optimizer.state.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lion_steps_by_lr_in_any_dtype(dtype: torch.dtype) -> None:
    tensor = torch.zeros(9, dtype=dtype)
    run(Lion([tensor], lr=0.5), [tensor], 1)
    assert tensor.dtype == dtype
    assert torch.equal(tensor.abs(), torch.full((9,), 0.5, dtype=dtype))


# ------------------------------------------------------------------------------------------------------------- LAMB


LAMB = {"betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True, "max_coeff": 10.0, "min_coeff": 0.01}


def lamb(p: Tensor, g: Tensor, state: dict[str, Any], **options: Any) -> Tensor:
    beta1, beta2 = options["betas"]
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    v = state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
    if options["bias_correction"]:
        m, v = m / (1 - beta1**t), v / (1 - beta2**t)
    update = m / (v.sqrt() + options["eps"]) + options["weight_decay"] * p
    size, length = math.sqrt(float((p * p).sum())), math.sqrt(float((update * update).sum()))
    ratio = min(max(size / length, options["min_coeff"]), options["max_coeff"]) if size and length else 1.0
    return p - options["lr"] * ratio * update


def test_lamb_follows_its_definition() -> None:
    first = LAMB | {"lr": 0.01, "weight_decay": 0.1}
    second = LAMB | {"lr": 0.1, "weight_decay": 0.0, "betas": (0.8, 0.9), "eps": 0.1, "bias_correction": False}
    wanted = reference(two_groups(first, second), lamb)
    groups = two_groups(first, second)
    optimizer = Lamb(groups)
    close(run(optimizer, members(groups)), wanted)
    assert all(set(state) == {"exp_avg", "exp_avg_sq", "step"} for state in optimizer.state.values())


@pytest.mark.parametrize(("scale", "ratio"), [(1e-9, 0.25), (1e9, 4.0), (3.0, 3.0)])
def test_lamb_clamps_the_trust_ratio(scale: float, ratio: float) -> None:
    tensor = torch.full((4,), scale, dtype=torch.float64)
    tensor.grad = torch.ones(4, dtype=torch.float64)
    Lamb([tensor], lr=1.0, eps=0.0, min_coeff=0.25, max_coeff=4.0).step()  # the update is 1 everywhere
    close([tensor], [torch.full((4,), scale - ratio, dtype=torch.float64)])


def test_lamb_has_ratio_one_where_a_norm_is_zero() -> None:
    zero, still = torch.zeros(3, dtype=torch.float64), torch.full((3,), 5.0, dtype=torch.float64)
    zero.grad, still.grad = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    Lamb([zero, still], lr=0.5, eps=1e-30, max_coeff=0.125, min_coeff=0.0).step()  # the clamp is for ratios
    close([zero, still], [torch.full_like(zero, -0.5), torch.full_like(still, 5.0)])


def test_lamb_takes_norms_of_16_bit_tensors_in_fp32() -> None:
    tensor = torch.full((1 << 16,), 300.0, dtype=torch.float16)  # the squares overflow fp16
    tensor.grad = torch.ones_like(tensor)
    Lamb([tensor], lr=1.0, eps=1e-3).step()
    assert torch.equal(tensor, torch.full_like(tensor, 290.0))


# ------------------------------------------------------------------------------------------------------------- Muon


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_bit_for_bit(nesterov: bool, adjust_lr_fn: str | None, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"lr": 0.02, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    ours, torchs = values(MATRICES, dtype=dtype), values(MATRICES, dtype=dtype)
    mine, theirs = Muon(ours, **options), torch.optim.Muon(torchs, **options)
    assert equal(run(mine, ours, 6), run(theirs, torchs, 6))
    for a, b in zip(ours, torchs, strict=True):
        assert torch.equal(mine.state[a]["momentum_buffer"], theirs.state[b]["momentum_buffer"])


def test_muon_has_torchs_defaults_and_takes_its_options() -> None:
    theirs = torch.optim.Muon(values(MATRICES)).defaults
    assert {key: Muon(values(MATRICES)).defaults[key] for key in theirs} == theirs
    options: dict[str, Any] = {"momentum": 0.8, "weight_decay": 0.0, "ns_coefficients": (3.0, -3.2, 1.2), "ns_steps": 3}
    ours, torchs = values(MATRICES), values(MATRICES)
    assert equal(run(Muon(ours, eps=0.1, **options), ours), run(torch.optim.Muon(torchs, eps=0.1, **options), torchs))


def test_muon_does_not_touch_16_bit_momentum_beyond_its_update() -> None:
    tensor = torch.zeros(4, 6, dtype=torch.bfloat16)
    tensor.grad = torch.ones_like(tensor)
    optimizer = Muon([tensor], momentum=0.5, nesterov=False)
    optimizer.step()
    assert torch.equal(optimizer.state[tensor]["momentum_buffer"], torch.full_like(tensor, 0.5))


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 3, 20, 8), (4, 8, 8), (1, 5, 9)])
@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
def test_a_stack_moves_as_its_matrices(shape: tuple[int, ...], adjust_lr_fn: str) -> None:
    (stack,), (apart,) = values([shape], dtype=torch.float32), values([shape], dtype=torch.float32)
    matrices = list(apart.flatten(0, -3).unbind())
    gradient = values([shape], 1, torch.float32)[0] * torch.logspace(-2, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))
    stack.grad = gradient
    for matrix, part in zip(matrices, gradient.flatten(0, -3), strict=True):
        matrix.grad = part
    for tensors in ([stack], matrices):
        Muon(tensors, lr=0.1, adjust_lr_fn=adjust_lr_fn).step()
    torch.testing.assert_close(stack, apart, rtol=0, atol=0.1 * 0.02 * 0.2 * math.sqrt(20))  # bf16 roundings


@pytest.mark.parametrize("shape", [(24, 60), (60, 24), (3, 60, 24), (2, 2, 24, 60)])
def test_newton_schulz_flattens_the_spectrum(shape: tuple[int, ...]) -> None:
    matrix = values([shape], dtype=torch.bfloat16)[0]
    before = matrix.clone()
    result = newton_schulz(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7)
    singular = torch.linalg.svdvals(result.float())
    assert result.dtype == torch.bfloat16
    assert result.is_contiguous()
    assert torch.equal(matrix, before)
    assert float(singular.min()) > 0.5
    assert float(singular.max()) < 1.3


def test_muon_steps_other_groups_by_adamw() -> None:
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.2}
    ours, torchs, matrix = values(SHAPES), values(SHAPES), values([(4, 6)])
    groups: Groups = [{"params": ours, "use_muon": False, "adam_eps": 1e-3, **options}, {"params": matrix}]
    optimizer = Muon(groups, lr=0.5)
    wanted = run(torch.optim.AdamW(torchs, eps=1e-3, **options), torchs)
    close(run(optimizer, ours + matrix)[:-1], wanted)
    assert all(set(optimizer.state[tensor]) == {"exp_avg", "exp_avg_sq", "step"} for tensor in ours)
    assert set(optimizer.state[matrix[0]]) == {"momentum_buffer"}


def test_adamw_takes_tensors_and_gradients_of_other_layouts() -> None:
    turned, straight = values([(3, 5)])[0].t(), values([(3, 5)])[0].t().contiguous()
    for tensor in (turned, straight):
        run(Muon([{"params": [tensor], "use_muon": False}]), [tensor], 2)
    close([turned], [straight])


# ----------------------------------------------------------------------------------------------------- muon_groups


class Model(nn.Module):
    """An embedding, a fused stack, a norm, a bias, a Linear right below the root that is not the last, and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.experts = nn.Parameter(torch.zeros(3, 4, 5))
        self.middle = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


class Named(Model):
    def get_output_embeddings(self) -> nn.Module:
        return self.middle


class Silent(Model):
    def get_output_embeddings(self) -> None:
        return None


def chosen(model: nn.Module, **options: Any) -> list[set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = muon_groups(model.named_parameters(), model, **options)
    assert [group["use_muon"] for group in groups] == [True, False]
    return [{names[id(parameter)] for parameter in group["params"]} for group in groups]


INSIDE = {"inner.0.weight", "experts"}


@pytest.mark.parametrize(
    ("model", "matrices"),
    [
        (Model(), INSIDE | {"middle.weight"}),
        (Silent(), INSIDE | {"middle.weight"}),
        (Named(), INSIDE | {"head.weight"}),
        (Model(tied=True), INSIDE | {"middle.weight"}),
    ],
)
def test_matrices_inside_the_model_are_muons(model: nn.Module, matrices: set[str]) -> None:
    assert chosen(model) == [matrices, {name for name, _ in model.named_parameters()} - matrices]


def test_a_parameters_own_word_decides_and_frozen_ones_are_left_out() -> None:
    model = Model()
    model.embedding.weight.use_muon = True
    model.experts.use_muon = False
    model.middle.weight.requires_grad_(False)
    matrices, others = chosen(model)
    assert matrices == {"inner.0.weight", "embedding.weight"}
    assert others == {"experts", "head.weight", "inner.0.bias", "inner.1.weight", "inner.1.bias"}


def test_rates_go_to_their_groups() -> None:
    model = Model()
    assert [group.get("lr") for group in muon_groups(model.named_parameters(), model)] == [None, None]
    groups = muon_groups(model.named_parameters(), model, muon_lr=0.02, adam_lr=0.003)
    assert [group["lr"] for group in Muon(groups, lr=7.0).param_groups] == [0.02, 0.003]
    assert "lr" not in muon_groups(model.named_parameters(), model, muon_lr=0.02)[1]


def test_a_shared_parameter_is_stepped_once() -> None:
    model = Model(tied=True)
    groups = muon_groups(model.named_parameters(remove_duplicate=False), model)
    assert len(members(groups)) == len(list(model.parameters()))


# ----------------------------------------------------------------------------------------------------------- shards


@dataclass
class Board:
    """What the ranks of one step show to each other."""

    num_ranks: int
    shown: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.num_ranks, timeout=120)

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        self.shown[rank] = mine
        self.barrier.wait()
        everything = [self.shown[each] for each in range(self.num_ranks)]
        self.barrier.wait()
        return everything


@dataclass
class Sharded:
    """One rank's `Whole`: its tensors are stretches of parameters, in the order of the ranks."""

    rank: int
    board: Board
    places: dict[int, tuple[Place, int]] = field(default_factory=dict)  # id(tensor) -> parameter, first element
    calls: list[str] = field(default_factory=list)

    def place(self, tensor: Tensor) -> Place:
        return self.places[id(tensor)][0]

    def sums(self, parts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        self.calls.append("sums")
        assert len({sums.shape for _, sums in parts}) <= 1
        totals: dict[int, Tensor] = {}
        for shown in self.board.exchange(self.rank, [(self.place(t).index, sums) for t, sums in parts]):
            for index, sums in shown:
                totals[index] = totals.get(index, 0) + sums
        return [totals[self.place(tensor).index] for tensor, _ in parts]

    def through(self, parts: list[tuple[Tensor, Tensor]], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        self.calls.append("through")
        mine = [(*self.places[id(tensor)], flat.bfloat16().flatten()) for tensor, flat in parts]
        pieces: dict[Place, dict[int, Tensor]] = {}
        for shown in self.board.exchange(self.rank, mine):
            for place, start, piece in shown:
                pieces.setdefault(place, {})[start] = piece
        results: list[Tensor] = []
        for place, start, piece in mine:
            whole = torch.cat([pieces[place][at] for at in sorted(pieces[place])]).view(place.shape)
            results.append(function(whole).flatten()[start : start + piece.numel()])
        return results


def run_sharded(
    make: Callable[[Groups], Lamb | Muon], groups: Groups, num_steps: int = 10
) -> tuple[list[Tensor], list[Sharded]]:
    """Step shards on three ranks, each in a thread, with the gradients of `run`. Returns whole parameters.

    The cuts are uneven: of one element the second rank has none, and the third has no tensors at all.
    """
    num_ranks = 3
    board = Board(num_ranks)
    ranks = [Sharded(rank, board) for rank in range(num_ranks)]
    shards: list[list[tuple[int, Tensor, slice]]] = [[] for _ in ranks]
    by_rank: list[Groups] = [[{**group, "params": []} for group in groups] for _ in ranks]
    shapes = [tensor.shape for tensor in members(groups)]
    index = 0
    for label, group in enumerate(groups):
        for tensor in group["params"]:
            cut = (2 * tensor.numel() + 2) // 3
            for rank, part in enumerate([slice(0, cut), slice(cut, tensor.numel())]):
                shard = tensor.flatten()[part].clone()
                ranks[rank].places[id(shard)] = Place(index, tuple(tensor.shape)), part.start
                shards[rank].append((index, shard, part))
                by_rank[rank][label]["params"].append(shard)
            index += 1

    def steps(rank: int) -> None:
        optimizer = make(by_rank[rank])
        optimizer.whole = ranks[rank]
        for step in range(num_steps):
            gradients = values(shapes, 100 + step)
            for index, shard, part in shards[rank]:
                shard.grad = gradients[index].flatten()[part].to(shard)
            optimizer.step()

    with ThreadPoolExecutor(num_ranks) as pool:
        for done in [pool.submit(steps, rank) for rank in range(num_ranks)]:
            done.result()
    pieces = [torch.cat([shard for rank in shards for i, shard, _ in rank if i == each]) for each in range(index)]
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)], ranks


def test_lamb_over_shards_is_lamb() -> None:
    options = [{"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.1, "max_coeff": 0.5}]
    groups = two_groups(*options)
    found, ranks = run_sharded(Lamb, copy.deepcopy(groups))
    close(found, run(Lamb(groups), members(groups)))
    assert [rank.calls for rank in ranks] == [["sums"] * 10] * 3


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_muon_over_shards_is_muon_bit_for_bit(dtype: torch.dtype, nesterov: bool) -> None:
    def make(groups: Groups) -> Muon:
        return Muon(groups, lr=0.05, nesterov=nesterov, adjust_lr_fn="match_rms_adamw")

    groups: Groups = [
        {"params": values([*MATRICES, (2, 6, 4)], dtype=dtype)},
        {"params": values([(11, 3), (8,)], dtype=dtype), "use_muon": False, "lr": 0.01},
        {"params": values([(6, 6)], dtype=dtype), "weight_decay": 0.0, "adjust_lr_fn": None},
    ]
    found, ranks = run_sharded(make, copy.deepcopy(groups), 5)
    assert equal(found, run(make(groups), members(groups), 5))
    assert [rank.calls for rank in ranks] == [["through"] * 5] * 3


def test_a_vector_in_a_muon_group_is_refused_by_its_whole_shape_and_nothing_moves() -> None:
    matrix, shard = values([(3, 4), (3, 4)])
    before = matrix.clone()
    optimizer = Muon([matrix, shard])
    places = {id(matrix): (Place(0, (3, 4)), 0), id(shard): (Place(1, (12,)), 0)}
    optimizer.whole = Sharded(0, Board(1), places)
    with pytest.raises(ShardwellError, match=r"shape \[12\].*use_muon"):
        run(optimizer, [matrix, shard], 1)
    assert torch.equal(matrix, before)
    assert not optimizer.state


# ------------------------------------------------------------------------------------------------------ all of them


MAKERS: list[Callable[..., Any]] = [Lion, Lamb, Muon]


@pytest.mark.parametrize("make", MAKERS)
def test_state_goes_through_a_state_dict(make: Callable[..., Any]) -> None:
    shapes = [(4, 6), (6, 4)]
    groups: Groups = [{"params": values(shapes)[:1]}, {"params": values(shapes)[1:]}]
    if make is Muon:
        groups[1]["use_muon"] = False
    one = make(groups, lr=0.02)
    run(one, members(groups), 3)
    copies = copy.deepcopy(groups)
    other = make(copies)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert equal(run(one, members(groups), 3), run(other, members(copies), 3))


@pytest.mark.parametrize("make", MAKERS)
def test_a_closure_is_called_with_gradients_enabled(make: Callable[..., Any]) -> None:
    parameter = nn.Parameter(torch.ones(2, 3))

    def closure() -> Tensor:
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert make([parameter]).step(closure).item() == 6.0
    assert not torch.equal(parameter, torch.ones(2, 3))


@pytest.mark.parametrize("make", MAKERS)
def test_without_a_gradient_nothing_moves(make: Callable[..., Any]) -> None:
    tensors = values([(2, 3)])
    optimizer = make([{"params": tensors}, {"params": []}])
    optimizer.step()
    assert equal(tensors, values([(2, 3)]))
    assert not optimizer.state


@pytest.mark.parametrize("make", MAKERS)
def test_the_host_reads_nothing_from_the_device(make: Callable[..., Any]) -> None:
    tensors = [torch.empty(3, 4, device="meta"), torch.empty(4, 3, device="meta")]  # reading one would raise
    groups: Groups = [{"params": [tensor]} for tensor in tensors]
    if make is Muon:
        groups[1]["use_muon"] = False
    run(make(groups, weight_decay=0.1), tensors, 2)


def test_alone_numbers_tensors() -> None:
    alone, (first, second) = Alone(), values([(2, 3), (4,)])
    assert [alone.place(tensor) for tensor in (first, second, first)] == [
        Place(0, (2, 3)),
        Place(1, (4,)),
        Place(0, (2, 3)),
    ]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Lion, {"lr": -1.0}, "Lion: lr is -1.0"),
        (Lion, {"betas": (0.9, 1.0)}, "betas"),
        (Lion, {"betas": (0.9,)}, "betas"),
        (Lion, {"weight_decay": -0.1}, "weight_decay"),
        (Lamb, {"lr": float("nan")}, "lr is nan"),
        (Lamb, {"eps": -1e-8}, "eps"),
        (Lamb, {"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff is 2.0 and max_coeff is 1.0"),
        (Muon, {"momentum": -0.1}, "momentum"),
        (Muon, {"adam_eps": -0.1}, "adam_eps"),
        (Muon, {"betas": (-0.1, 0.9)}, "betas"),
        (Muon, {"ns_coefficients": (1.0, 2.0)}, "ns_coefficients"),
        (Muon, {"ns_steps": 100}, "ns_steps"),
        (Muon, {"adjust_lr_fn": "sqrt"}, "adjust_lr_fn is 'sqrt'"),
    ],
)
def test_bad_options_are_refused(make: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(values([(2, 3)]), **options)
    with pytest.raises(ConfigError, match=message):
        make([{"params": values([(2, 3)]), **options}])


def test_muon_groups_must_share_newton_schulz() -> None:
    groups: Groups = [{"params": [tensor], "ns_steps": 4 + i} for i, tensor in enumerate(values([(2, 3)] * 2))]
    with pytest.raises(ConfigError, match="the same ns_steps; it is 4 and 5"):
        Muon(groups)
    groups[1]["use_muon"] = False
    Muon(groups)


@pytest.mark.parametrize("shape", [(), (5,)])
def test_vectors_are_not_for_muon(shape: tuple[int, ...]) -> None:
    tensors = values([shape])
    with pytest.raises(ShardwellError, match=rf"shape \[{','.join(map(str, shape))}\]"):
        run(Muon(tensors), tensors, 1)
    model = nn.Module()
    model.gain = nn.Parameter(tensors[0])
    model.gain.use_muon = True
    with pytest.raises(ShardwellError, match="'gain' has shape"):
        muon_groups(model.named_parameters(), model)
