"""What ranks ask of the store does not grow with their number."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

import shardwell
from shardwell.parallel import collectives
from shardwell.parallel.rank_store import Pause, RankStore, arrive, between, forget_arrival, has_all
from tests.support.models import zero
from tests.support.ranks import Ranks


class Branches(nn.Module):
    """Runs its blocks in the order that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4)])

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = self.blocks[index](x)
        return x.square().mean()


def train(many: int, orders: list[list[int]]) -> dict[str, Any]:
    """Three steps; from `many` ranks on, tokens are compared by all-reduces. orders[rank] is that of the last step."""
    before, collectives.MANY_RANKS = collectives.MANY_RANKS, many
    asked: Counter[str] = Counter()
    ask = RankStore._ask
    RankStore._ask = lambda self, call, *args: asked.update([call.__name__]) or ask(self, call, *args)  # type: ignore
    try:
        torch.manual_seed(0)
        model = Branches()
        config = zero(3, shardwell={"divergence_timeout": 5, "bundle_size": 0})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = shardwell.initialize(model=model, optimizer=optimizer, config=config).engine
        asked.clear()
        losses = []
        for order in ([0, 1, 2, 3], [0, 1, 2, 3], orders[dist.get_rank()]):
            loss = engine(torch.ones(2, 8), order)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            if len(losses) == 1:
                first = asked["compare_set"]
    except shardwell.ShardwellError as error:
        return {"error": type(error).__name__, "words": str(error), "first": first}
    finally:
        collectives.MANY_RANKS, RankStore._ask = before, ask  # type: ignore[method-assign]
    return {"losses": losses, "first": first, "all": asked["compare_set"]}


def test_many_ranks_compare_without_the_store(ranks: Ranks) -> None:
    same = [[0, 1, 2, 3]] * 3
    few, many = ranks.run(3, train, 64, same), ranks.run(3, train, 2, same)
    told = f"few {few}, many {many}"
    assert all(found["first"] > 10 for found in few), told
    assert all(found["all"] <= 3 for found in many), told  # steps that leave a known way
    assert [found["losses"] for found in few] == [found["losses"] for found in many]


def test_many_ranks_that_differ_in_a_new_step_are_told_who(ranks: Ranks) -> None:
    def orders(odd: list[int]) -> list[list[int]]:
        return [[0, 1, 2, 3], [0, 1, 2, 3], odd]

    for found in ranks.run(3, train, 2, orders([0, 2, 1, 3])):
        assert found["error"] == "DivergenceError", found
        assert "rank 2" in found["words"]


def test_many_ranks_may_all_take_a_new_way(ranks: Ranks) -> None:
    found = ranks.run(3, train, 2, [[3, 2, 1, 0]] * 3)
    assert all("error" not in one for one in found)


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 5000, 16384])
def test_the_last_of_any_number_of_ranks_is_known_and_each_asks_few_things(size: int) -> None:
    store = Counted()
    last = [arrive(store, "met", index, size) for index in range(size)]
    assert last == [False] * (size - 1) + [True]
    assert has_all(store, "met")
    assert max(store.asked_by_rank) <= 4
    assert store.num_asked <= 1.02 * size + 2
    for index in range(size):
        forget_arrival(store, "met", index, size)
    assert not store.names


class Counted:
    """A store that counts."""

    def __init__(self) -> None:
        self._store, self.num_asked, self.asked_by_rank, self.names = HashStore(), 0, [0], set[str]()

    def add(self, name: str, number: int) -> int:
        if "/0/" in name:
            self.asked_by_rank.append(0)
        self.num_asked += 1
        self.asked_by_rank[-1] += 1
        self.names.add(name)
        return int(self._store.add(name, number))

    def set(self, name: str, value: str) -> None:
        self.num_asked += 1
        self.asked_by_rank[-1] += 1
        self.names.add(name)
        self._store.set(name, value)

    def check(self, names: list[str]) -> bool:
        return bool(self._store.check(names))

    def delete_key(self, name: str) -> None:
        self.names.discard(name)


def test_ranks_that_wait_ask_less_often_if_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("shardwell.parallel.rank_store.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(
        "shardwell.parallel.rank_store.time.sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    )
    for size in (2, 1024, 16384):
        clock[0], asked = 0.0, 0
        pause = Pause(size)
        while clock[0] < 60:
            pause()
            asked += 1
        assert asked <= 60 / between(0.05, size) + 80  # the first pauses are short
        assert asked * size / 60 <= 40_000 if size > 64 else asked >= 1000
