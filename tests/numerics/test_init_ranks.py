"""`zero.Init` where ranks differ: rank 0's values count, and a rank that does something alone is told."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.errors import DivergenceError, PeerError, ShardwellError
from tests.support.models import Gpt, whole_parameters, zero
from tests.support.patience import soon
from tests.support.ranks import Ranks

SHORT = zero(3, shardwell={"divergence_timeout": 2.0})


class Filled(nn.Module):
    """Its weight is filled on one rank, and garbage on the others."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.own = nn.Parameter(torch.full((11, 3), float("nan")))
        if dist.get_rank() == rank:
            self.own.data.copy_(torch.arange(33.0).view(11, 3))
        self.last = nn.Linear(3, 3)


def filled_on_rank_0() -> Tensor:
    with shardwell.zero.Init(config=zero(3)):
        model = Filled(0)
    return whole_parameters(model)["own"]


def test_a_parameter_that_rank_0_alone_fills_has_its_values(ranks: Ranks) -> None:
    for own in ranks.run(3, filled_on_rank_0):
        assert torch.equal(torch.as_tensor(own), torch.arange(33.0).view(11, 3))


def built_beside_modules_that_one_rank_drops() -> tuple[int, dict[str, Tensor]]:
    """A new module may get the address of one that is gone: on the ranks that let it go, and not on the others."""
    kept, addresses, weights = [], set(), []
    with shardwell.zero.Init(config=SHORT):
        for _ in range(40):
            layer = nn.Linear(4, 4, bias=False)
            weights.append(layer.weight)
            addresses.add(id(layer))
            if dist.get_rank() == 0:
                kept.append(layer)
            del layer
            weights[-2:][0].detach().sum()  # all ranks gather it, or none does
    return len(addresses), whole_parameters(nn.ParameterList(weights))


def test_what_a_rank_keeps_of_the_modules_it_built_is_its_own_business(ranks: Ranks) -> None:
    (_, first), (num_addresses, second) = ranks.run(2, built_beside_modules_that_one_rank_drops)
    assert num_addresses < 40 == len(first)
    assert all(torch.equal(torch.as_tensor(first[name]), torch.as_tensor(second[name])) for name in first)


def seeded_by_rank(again: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    def build() -> Gpt:
        torch.manual_seed(dist.get_rank())
        model = Gpt()
        for module in model.modules() if again else ():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight)
        return model

    with shardwell.zero.Init(config=zero(3)):
        model = build()
    born = whole_parameters(model)
    shardwell.initialize(model=model, config=zero(3))
    return born, whole_parameters(model), {name: p.detach() for name, p in build().named_parameters()}


@pytest.mark.parametrize("again", [False, True], ids=["built", "initialised again"])
def test_ranks_with_other_seeds_get_rank_0_s_values(ranks: Ranks, again: bool) -> None:
    answers = ranks.run(2, seeded_by_rank, again)
    expected = answers[0][2]
    for born, trained, _ in answers:
        for name, values in expected.items():
            assert (torch.as_tensor(born[name]) == torch.as_tensor(values)).all(), name
            assert (torch.as_tensor(trained[name]) == torch.as_tensor(values)).all(), name


def test_ranks_have_other_values_without_init(ranks: Ranks) -> None:
    """So that the test above compares something."""
    first, second = ranks.run(2, seeded_by_rank, False)
    assert (torch.as_tensor(first[2]["head.weight"]) != torch.as_tensor(second[2]["head.weight"])).any()


# ----------------------------------------------------------------------------------------------- one rank alone


def touched_by_rank_0(where: str) -> tuple[str, str, float]:
    """What each rank is told, and after how long."""
    began = time.monotonic()
    kind, words = "", ""
    try:
        with shardwell.zero.Init(config=SHORT):
            model = Gpt()
            if where == "inside" and dist.get_rank() == 0:
                with torch.no_grad():
                    model.embed.weight[0] = 1.0
            if where == "inside":
                model.more = nn.Linear(3, 3)
        if where == "after" and dist.get_rank() == 0:
            with torch.no_grad():
                model.embed.weight[0] = 1.0
        shardwell.initialize(model=model, config=SHORT)
    except ShardwellError as error:
        kind, words = type(error).__name__, str(error)
    return kind, words, time.monotonic() - began


@pytest.mark.parametrize("where", ["inside", "after"])
def test_a_parameter_that_rank_0_alone_touches_is_an_error_within_the_limit(ranks: Ranks, where: str) -> None:
    first, second = ranks.run(2, touched_by_rank_0, where)
    assert first[0] == DivergenceError.__name__
    assert "Embedding.weight" in first[1]
    assert "modifier_rank=0" in first[1]
    assert "rank 0" in first[1]
    assert "1" in first[1].split("rank(s)")[-1].split("did")[0] or "rank 1" in first[1]
    assert second[0] in (DivergenceError.__name__, PeerError.__name__)
    assert max(first[2], second[2]) < soon(30)  # the limit of 2 s, and construction on a busy machine


def changed_with_a_modifier() -> float:
    with shardwell.zero.Init(config=SHORT):
        model = Gpt()
    with shardwell.zero.GatheredParameters(model.embed.weight, modifier_rank=0):
        if dist.get_rank() == 0:
            with torch.no_grad():
                model.embed.weight[0] = 7.0
    return float(whole_parameters(model)["embed.weight"][0].mean())


def test_what_the_error_advises_works(ranks: Ranks) -> None:
    assert ranks.run(2, changed_with_a_modifier) == [7.0, 7.0]


def failing_on_one_rank() -> str:
    try:
        with shardwell.zero.Init(config=zero(3)):
            model = Gpt()
            if dist.get_rank() == 1:
                raise ValueError("no such file")
            model.more = nn.Linear(3, 3)
            model.most = nn.Linear(3, 3)
    except (ShardwellError, ValueError) as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


def test_an_error_on_one_rank_reaches_the_others(ranks: Ranks) -> None:
    first, second = ranks.run(2, failing_on_one_rank)
    assert first.startswith("PeerError rank 1 failed first: ValueError in zero.Init: no such file")
    assert second == "ValueError no such file"


def failing_everywhere_then_again() -> list[bool]:
    try:
        with shardwell.zero.Init(config=zero(3)):
            Gpt()
            raise KeyError("a wrong name")
    except KeyError:
        pass
    outside = nn.Linear(3, 3)
    with shardwell.zero.Init(config=zero(3)):
        torch.manual_seed(0)
        model = Gpt()
    torch.manual_seed(0)
    plain = dict(Gpt().named_parameters())
    same = all(torch.equal(values, plain[name]) for name, values in whole_parameters(model).items())
    return [same, type(outside.weight) is nn.Parameter]


def test_an_error_on_all_ranks_leaves_nothing_behind(ranks: Ranks) -> None:
    assert ranks.run(2, failing_everywhere_then_again) == [[True, True]] * 2


# -------------------------------------------------------------------------------------------- nested, and threads


def nested() -> list[Any]:
    with shardwell.zero.Init(config=zero(3)):
        first = nn.Linear(4, 4)
        with shardwell.zero.Init(config=zero(3), dtype=torch.bfloat16):
            second = nn.Linear(4, 4)
        third = nn.Linear(4, 4)
        with shardwell.zero.Init(enabled=False):
            fourth = nn.Linear(4, 4)
    model = nn.ModuleList([first, second, third, fourth])
    return [str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.dim() == 2] + [
        all(type(p) is not nn.Parameter for p in model.parameters())
    ]


def test_in_nested_contexts_the_innermost_counts(ranks: Ranks) -> None:
    assert ranks.run(2, nested) == [["float32", "bfloat16", "float32", "float32", True]] * 2


def threads() -> tuple[bool, str, bool]:
    found: dict[str, Any] = {}

    def other() -> None:
        found["layer"] = nn.Linear(4, 4)
        try:
            with shardwell.zero.Init(config=zero(3)):
                pass
        except ShardwellError as error:
            found["error"] = str(error)

    with shardwell.zero.Init(config=zero(3)):
        model = nn.Linear(4, 4)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    own = type(found["layer"].weight) is nn.Parameter
    return own, found["error"], type(model.weight) is not nn.Parameter


def test_another_thread_s_modules_are_left_alone_and_its_context_refused(ranks: Ranks) -> None:
    for own, error, split in ranks.run(2, threads):
        assert own
        assert split
        assert "one thread" in error
