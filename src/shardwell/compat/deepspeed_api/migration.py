"""The page about moving from DeepSpeed: what becomes of each of its keys and names.

    python -m shardwell.compat.deepspeed_api.migration > docs/deepspeed-migration.md

The page is made of the tables that the code itself reads: the schema and `config/deepspeed_keys.py` for keys, and the
table of names for names. A test compares it with the file.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from shardwell.compat.deepspeed_api.key_names import FEATURES_OF_DEEPSPEED, KEYS_OF_DEEPSPEED, VERSION
from shardwell.config.block import ConfigBlock, block_of
from shardwell.config.deepspeed_keys import KEYS, Inert, Limited, Renamed, Switch, Unsupported
from shardwell.config.problems import show
from shardwell.config.schema import Config
from shardwell.errors import ShardwellError
from shardwell.version import __version__

_TITLES = {"": "Keys at the top"}
_HEAD = f"""# Moving from DeepSpeed

<!-- This page is generated: python -m shardwell.compat.deepspeed_api.migration > docs/deepspeed-migration.md -->

What becomes of every key of DeepSpeed {VERSION}'s configuration, and of every name that programs import from it.
*Works* means that it does what it does there, or what the text says. *No effect* means that it is accepted, and why it
changes nothing; `shardwell config FILE` and the log say so for the keys of a file. *Refused* means an error with the
same words. A key that is off, `null` or at its default is never refused.

Through `shardwell.compat.deepspeed` three of DeepSpeed's defaults hold that differ here: gradients are clipped at 1.0
unless `gradient_clipping` says otherwise, a step with gradients that are not finite is skipped, and the schedules in a
file begin their warm-up one step later; torch's schedules may be named there, too. What DeepSpeed ignores is left out
with a warning: unknown keys at the top, and keys that a stage does not have (`offload_param` below stage 3).
Everything else is read as [the configuration page](configuration.md) says.

## Configuration
"""


def disposition(key: str) -> str:
    """Return what becomes of a key, as the page says it."""
    row = KEYS.get(key)
    match row:
        case Inert():
            return f"no effect: {row.reason}"
        case Limited():
            allowed = " or ".join(f"`{show(value)}`" for value in row.allowed)
            return f"{allowed} only{f' ({row.reason})' if row.reason else ''}; other values are refused: {row.refusal}"
        case Unsupported():
            return f"refused if it is on: {row.refusal}"
        case Renamed():
            return f"works: an old name of `{row.new}`"
        case Switch():
            return f"works: `true` is read as `{row.new}: {show(row.value)}`"
    if (description := _description(key)) is not None:
        return f"works: {description}"
    raise ShardwellError(
        f"DeepSpeed's key {key} is neither in config/schema.py nor in config/deepspeed_keys.py; add a field or a row"
    )


def _description(key: str) -> str | None:
    """Return the description of a key of the schema, or None if it is none."""
    block: type[ConfigBlock] | None = Config
    words: str | None = None
    for name in key.split("."):
        if block is None or name not in block.model_fields:
            return None
        field = block.model_fields[name]
        words, block = field.description, block_of(field)
    return words


def keys_part() -> Iterator[str]:
    """Yield the lines about configuration keys."""
    for block, keys in KEYS_OF_DEEPSPEED.items():
        yield f"\n### {_TITLES.get(block, f'`{block}`')}\n"
        yield "| key | what becomes of it |\n|---|---|"
        for key in keys.split():
            yield f"| `{key}` | {_cell(disposition(f'{block}.{key}'.lstrip('.')))} |"
    yield "\n### Features\n\nBlocks that are one feature each; `enabled: false` and empty blocks are always accepted.\n"
    yield "| block | keys | what becomes of it |\n|---|---|---|"
    for block, keys in FEATURES_OF_DEEPSPEED.items():
        listed = ", ".join(f"`{key}`" for key in keys.split())
        yield f"| `{block}` | {listed} | {_cell(disposition(block))} |"


def names_part() -> Iterator[str]:
    """Yield the lines about names, one table for each module; none as long as there is no table of names."""
    try:
        names: Any = importlib.import_module("shardwell.compat.deepspeed_api.names")
    except ModuleNotFoundError:
        return
    yield "\n## Names\n\nNames that are refused can be imported; the error comes when they are used.\n"
    before = None
    for module, name, row in names.rows():
        if module != before:
            yield f"\n### `{module}`\n\n| name | what becomes of it |\n|---|---|"
            before = module
        yield f"| `{name}` | {_cell(_of_name(row))} |"


def _of_name(row: Any) -> str:
    """Return what becomes of a name; rows are told apart by what they hold."""
    match type(row).__name__:
        case "Supported":
            return f"works{f': {row.note}' if row.note else ''}"
        case "Constant":
            return f"works: `{row.value!r}`"
        case "SameModule":
            return f"works: `{row.module}`"
        case "Absent":
            return f"absent: {row.reason}"
    return f"refused: {row.reason}"


def _cell(text: str) -> str:
    return text.replace(f"shardwell {__version__} ", "shardwell ").replace("|", "\\|").replace("\n", " ")


def page() -> str:
    """Return the whole page."""
    return _HEAD + "\n".join([*keys_part(), *names_part()]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
