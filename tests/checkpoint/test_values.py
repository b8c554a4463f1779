"""What is no tensor of the model, as JSON and back."""

from __future__ import annotations

import json
import math
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwell.errors import CheckpointError
from shardwell.json_values import decode, encode

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NESTED = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.sampled_from(["$float", "$tuple"]), inner)
    ),
)


def through_json(value: Any) -> Any:
    tensors: list[Tensor] = []

    def put(tensor: Tensor) -> str:
        tensors.append(tensor)
        return str(len(tensors) - 1)

    text = json.dumps(encode(value, "value", put), allow_nan=False)
    return decode(json.loads(text), "value", lambda name: tensors[int(name)])


@pytest.mark.slow
@given(NESTED)
def test_values_come_back_as_they_were(value: Any) -> None:
    found = through_json(value)
    assert found == value
    assert repr(found) == repr(value)  # 1 is not True, and a tuple is not a list


def test_numbers_of_other_kinds() -> None:
    assert math.isnan(through_json(float("nan")))
    assert through_json({"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True)}) == {"a": 0.5, "b": 3, "c": True}
    assert through_json(PurePosixPath("a/b")) == "a/b"
    for array in (np.arange(6, dtype=np.uint32).reshape(2, 3), np.zeros((0, 2)), np.array([1.5, np.nan])):
        found = through_json(array)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert np.array_equal(found, array, equal_nan=array.dtype.kind == "f")
    tensor = torch.arange(6.0).view(2, 3).T
    assert torch.equal(through_json({"x": [tensor]})["x"][0], tensor)


@pytest.mark.parametrize(
    "value", [object(), lambda: 0, {1, 2}, torch.float32, np.array(["a"]), np.array([object()]), b"bytes"]
)
def test_what_would_need_a_pickle_is_refused_by_name(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"client\.here\[1\]: .* cannot be saved"):
        encode({"here": [0, value]}, "client", lambda tensor: "")


@pytest.mark.parametrize(
    "text",
    [
        '{"$float": "1e3"}',
        '{"$float": 1}',
        '{"$tensor": 5}',
        '{"$tuple": 5}',
        '{"$dict": [[1, 2, 3]]}',
        '{"$array": ["0", "O", [1]]}',
        '{"$array": ["0", "<f4", [1000000]]}',
        '{"$array": ["0", "no dtype", [1]]}',
        '{"$code": "import os"}',
    ],
)
def test_what_shardwell_does_not_write_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"value\.here"):
        decode({"here": json.loads(text)}, "value", lambda name: torch.zeros(4, dtype=torch.uint8))
