"""LAMB and Muon over shards of parameters do what they do over whole ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.optim.full_tensors import SlicePosition
from shardwell.optim.lamb import Lamb
from shardwell.optim.muon import Muon
from tests.support.optimizer_steps import MATRICES, Groups, close, equal, members, run, two_groups, values
from tests.support.patience import HANG


@dataclass
class Board:
    """What the ranks of one step show to each other."""

    num_ranks: int
    shown: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.num_ranks, timeout=HANG)

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        self.shown[rank] = mine
        self.barrier.wait()
        everything = [self.shown[each] for each in range(self.num_ranks)]
        self.barrier.wait()
        return everything


@dataclass
class Sharded:
    """One rank's `FullTensors`: its tensors are stretches of parameters, in the order of the ranks."""

    rank: int
    board: Board
    places: dict[int, tuple[SlicePosition, int]] = field(default_factory=dict)  # id(tensor) -> parameter, first element
    calls: list[str] = field(default_factory=list)

    def place(self, tensor: Tensor) -> SlicePosition:
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
        pieces: dict[SlicePosition, dict[int, Tensor]] = {}
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
                ranks[rank].places[id(shard)] = SlicePosition(index, tuple(tensor.shape)), part.start
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
    places = {id(matrix): (SlicePosition(0, (3, 4)), 0), id(shard): (SlicePosition(1, (12,)), 0)}
    optimizer.whole = Sharded(0, Board(1), places)
    with pytest.raises(ShardwellError, match=r"shape \[12\].*use_muon"):
        run(optimizer, [matrix, shard], 1)
    assert torch.equal(matrix, before)
    assert not optimizer.state
