"""What a forward does to the containers that it is called with, the caller sees, as with a plain model."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwell
from shardwell.runtime.pytree import map_tensors
from tests.support.models import zero

Pair = namedtuple("Pair", "x seen")


@dataclass
class Batch:
    x: Tensor
    seen: list[Any]


class Model(nn.Module):
    """Calls what it is given with its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, use: Any, *args: Any, **kwargs: Any) -> Tensor:
        return self.layer(use(*args, **kwargs))


def engine(precision: str = "", stage: int = 3) -> shardwell.Engine:
    block = {precision: {"enabled": True}} if precision else {}
    config = zero(stage, shardwell={"shard_at_world_one": True}, **block)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine


PRECISIONS = pytest.mark.parametrize("precision", ["", "bf16", "fp16"])


@PRECISIONS
@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda x: defaultdict(list, x), UserDict])
def test_what_is_set_in_a_dictionary_is_there_afterwards(precision: str, kind: Any) -> None:
    x = torch.randn(2, 4)
    batch = kind({"x": x, "old": 1, "inner": {"y": x, "list": [x]}})

    def use(batch: Any) -> Tensor:
        batch["new"] = 5
        del batch["old"]
        batch["inner"]["list"].append("seen")
        batch["features"] = batch["x"] * 2
        return batch["x"]

    engine(precision)(use, batch)
    assert batch["new"] == 5
    assert "old" not in batch
    assert batch["x"] is x  # the caller's own, not what it was cast to
    assert batch["inner"]["list"][0] is x
    assert batch["inner"]["list"][1:] == ["seen"]
    assert torch.allclose(batch["features"].float(), x * 2, atol=0.05)


@PRECISIONS
def test_lists_that_the_forward_changes_are_changed(precision: str) -> None:
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    hidden, both, swapped = [], [x], [x, y]

    def use(x: Tensor, hidden: list[Any], both: list[Any], swapped: list[Any]) -> Tensor:
        hidden.append(x + 1)
        both.append(x + 1)
        swapped.reverse()
        swapped.pop()
        return x

    engine(precision)(use, x, hidden, both=both, swapped=swapped)
    assert len(hidden) == 1
    assert len(both) == 2
    assert both[0] is x
    assert len(swapped) == 1
    assert swapped[0] is y


@PRECISIONS
def test_objects_that_the_forward_changes_are_changed(precision: str) -> None:
    x = torch.randn(2, 4)
    batch, plain, pair = Batch(x, []), SimpleNamespace(seen=None), Pair(x, [])

    def use(batch: Batch, plain: SimpleNamespace, pair: Any) -> Tensor:
        batch.seen.append(1)
        batch.more = "more"  # type: ignore[attr-defined]
        plain.seen = 2
        pair.seen.append(3)
        return batch.x + pair.x

    engine(precision)(use, batch, plain, pair)
    assert (batch.seen, batch.more, plain.seen, pair.seen) == ([1], "more", 2, [3])  # type: ignore[attr-defined]
    assert batch.x is x


def test_what_was_changed_before_an_error_is_changed() -> None:
    x, seen = torch.randn(2, 4), [torch.ones(1)]

    def use(x: Tensor, seen: list[Any]) -> Tensor:
        seen.append(1)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        engine("bf16")(use, x, seen)
    assert seen[1] == 1


def test_containers_that_need_no_move_are_the_caller_s_own() -> None:
    x = torch.randn(2, 4)
    transformers = pytest.importorskip("transformers")
    given = [
        [x], {"x": x}, (x, [x]), Pair(x, [x]), Batch(x, [x]), OrderedDict(x=x), defaultdict(list, x=[x]),
        UserDict(x=x), transformers.BatchEncoding({"x": x}), SimpleNamespace(x=x), {"tokens": torch.arange(3)},
    ]  # fmt: skip
    found: list[Any] = []

    def use(*args: Any) -> Tensor:
        found.extend(args)
        return x

    engine()(use, *given)
    assert all(a is b for a, b in zip(given, found, strict=True))
    found.clear()
    engine("bf16")(lambda *args: found.extend(args) or x.bfloat16(), given[-2], given[-1], [1, {"a": None}], x)
    assert found[0] is given[-2]  # an object of unknown kind
    assert found[1] is given[-1]  # whole numbers are not cast
    assert found[3].dtype == torch.bfloat16


def test_batch_encodings_are_cast_and_keep_their_kind() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"x": torch.randn(2, 4), "ids": torch.arange(2)})

    def use(batch: Any) -> Tensor:
        assert type(batch) is transformers.BatchEncoding
        batch["more"] = 1
        return batch["x"]

    engine("bf16")(use, batch)
    assert batch["more"] == 1
    assert batch["x"].dtype == torch.float32


@pytest.mark.parametrize("precision", ["", "bf16"])
def test_containers_that_hold_themselves_come_to_an_end(precision: str) -> None:
    x = torch.randn(2, 4)
    ring: list[Any] = [x]
    ring.append({"ring": ring, "tuple": (ring, x)})

    def use(ring: list[Any]) -> Tensor:
        assert ring[1]["ring"] is ring
        assert ring[1]["tuple"][0] is ring
        ring.append("seen")
        return ring[0]

    engine(precision)(use, ring)
    assert ring[2] == "seen"
    assert ring[0] is x
    assert ring[1]["ring"] is ring


def test_a_tensor_that_is_there_twice_is_changed_once() -> None:
    x, calls = torch.ones(2), []
    first, second = map_tensors([x, {"again": x}], lambda tensor: calls.append(1) or tensor + 1)
    assert first is second["again"]
    assert len(calls) == 1


def test_lists_of_a_kind_of_their_own_keep_what_they_have() -> None:
    class Named(list):  # type: ignore[type-arg]
        def __init__(self, name: str, items: Any) -> None:
            super().__init__(items)
            self.name = name

    changed = map_tensors(Named("mine", [torch.ones(1)]), lambda tensor: tensor + 1)
    assert (type(changed), changed.name, float(changed[0])) == (Named, "mine", 2.0)
