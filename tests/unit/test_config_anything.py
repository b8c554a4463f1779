"""Whatever is written: a configuration, or one error that lists its problems."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwell.config import load, remarks, table, told
from shardwell.config.block import ConfigBlock, block_of
from shardwell.config.deepspeed_keys import KEYS as ROWS
from shardwell.config.schema import Config
from shardwell.errors import ConfigError
from tests.support.configs import nested


def keys(block: type[ConfigBlock], prefix: str = "") -> Iterator[str]:
    for name, info in block.model_fields.items():
        yield prefix + name
        inner = block_of(info)
        if inner is not None:
            yield from keys(inner, f"{prefix}{name}.")


KEYS = sorted({*keys(Config), *ROWS, "optimizer.params.lr", "bogus", "zero.stage.x"})
WORDS = ["auto", "none", "cpu", "nvme", "true", "5e8", "nan", "torch.bfloat16", "AdamW", "WarmupLR", "", "x"]
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(WORDS), st.binary(max_size=2)),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["enabled", "type", "params", "stage", "device", "x"]), inner, max_size=3)
    ),
    max_leaves=4,
)


def merged(into: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    for name, value in other.items():
        both = isinstance(into.get(name), dict) and isinstance(value, dict)
        into[name] = merged(into[name], value) if both else value
    return into


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KEYS), VALUES, st.booleans()), max_size=8), st.sampled_from([None, 1, 3]))
def test_any_values_at_any_keys_are_a_configuration_or_one_error(entries: list[Any], world_size: int | None) -> None:
    written: dict[str, Any] = {}
    for key, value, is_dotted in entries:
        merged(written, {key: value} if is_dotted else nested(key, value))
    try:
        config = load(written, world_size=world_size)
    except ConfigError:
        return
    told(remarks(config))
    table(config)
    again = load(json.dumps(config.to_dict()), world_size=world_size)
    assert again.to_dict() == config.to_dict()


TEXT = (
    '{ # c\n "zero_optimization": {stage: 3, // x\n \'leaf_module\': {names: ["a",]}}\n bf16: {enabled: True} /* y */ }'
)
EDITS = st.tuples(st.integers(0, len(TEXT) - 1), st.sampled_from([*"{}[]:,\"'#/*\n \\u1.-+tnI5_", ""]))


@settings(max_examples=150, deadline=None)
@given(st.lists(EDITS, max_size=4))
def test_any_text_is_a_configuration_or_one_error(edits: list[tuple[int, str]]) -> None:
    chars = list(TEXT)
    for place, char in edits:
        chars[place] = char
    text = "{" + "".join(chars)[1:]
    with contextlib.suppress(ConfigError):
        load(text)
