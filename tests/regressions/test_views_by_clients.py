"""What clients do to a sharded model without asking: numpy views of parameters, and `state_dict()` on every rank."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwell
from shardwell.errors import ReleasedParameterError
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.training import distance

OPTIONS = {"lr": 0.1}


def train(engine: shardwell.Engine, seed: int) -> None:
    for batch in batches(2, 4, seed=seed):
        engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
        engine.step()


def plainly(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Gpt().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
    for batch in [*batches(2, 4, seed=0), *batches(2, 4, seed=1)]:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def with_numpy(stage: int, born_sharded: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    if born_sharded:
        with shardwell.zero.Init(config_dict_or_path=zero(3)):
            model = Gpt()
            model.head.weight.detach().numpy().sum()
    else:
        model = Gpt().double()
        model.embed.weight.detach().numpy().sum()
    optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage)).engine
    train(engine, 0)
    with shardwell.zero.GatheredParameters(list(model.parameters())):
        views = [parameter.detach().numpy() for parameter in model.parameters()]
        total = sum(view.sum() for view in views)
    assert total != 0
    del views
    train(engine, 1)
    found = whole_parameters(model)
    engine.destroy(whole=False)
    return found


@pytest.mark.parametrize(("stage", "born_sharded"), [(0, False), (2, False), (3, False), (3, True)])
def test_training_goes_on_after_numpy_has_seen_the_parameters(ranks: Ranks, stage: int, born_sharded: bool) -> None:
    expected = plainly(torch.float32 if born_sharded else torch.float64)
    for found in ranks.run(2, with_numpy, stage, born_sharded):
        assert distance(found, expected)[0] < (1e-5 if born_sharded else 1e-10)


def kept_view() -> dict[str, Tensor]:
    """A numpy view of a block that lives through the next steps."""
    torch.manual_seed(0)
    model = Gpt().double()
    optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(3)).engine
    kept: list[Any] = []
    hook = model.blocks[1].register_forward_hook(lambda block, *_: kept.append(block.up.weight.detach().numpy()))
    with pytest.warns(UserWarning, match="a view of a parameter of unit"):
        train(engine, 0)
    hook.remove()
    kept.clear()
    train(engine, 1)
    return whole_parameters(model)


def test_a_numpy_view_that_is_kept_costs_memory_and_nothing_else(ranks: Ranks) -> None:
    for found in ranks.run(2, kept_view):
        assert distance(found, plainly())[0] < 1e-10


def described(stage: int) -> tuple[list[tuple[str, tuple[int, ...], str]], list[str]]:
    model = Gpt()
    optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage)).engine
    state = model.state_dict() if dist.get_rank() else {}  # a rank alone: no collective may follow from it
    words = []
    for use in (torch.clone, lambda value: value.sum().item(), lambda value: torch.save(value, io.BytesIO())):
        try:
            for value in state.values():
                use(value.detach())
        except ReleasedParameterError as error:
            words.append(str(error))
    described = [(name, tuple(value.shape), str(value.dtype)) for name, value in state.items()]
    train(engine, 0)
    return described, words


@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_may_ask_the_model_for_its_state_and_gets_shapes_where_values_are_away(
    ranks: Ranks, stage: int
) -> None:
    expected = [(name, tuple(value.shape), str(value.dtype)) for name, value in Gpt().state_dict().items()]
    _, (found, words) = ranks.run(2, described, stage)
    assert found == expected
    assert len(words) == (3 if stage == 3 else 0)
    assert all("All values are in engine.state_dict(), which all ranks must call" in text for text in words)
