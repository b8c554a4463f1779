"""Old and other spellings of keys that have one meaning, as data, and what turns them into the keys of the schema.

Works on what was written, before anything is checked: it moves values and looks at no types but the ones that mean off
or on. Every meaning that was chosen becomes a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwell.config.field_types import flag, plain
from shardwell.config.notes import Note
from shardwell.config.schema import Config, ConfigBlock, block_of
from shardwell.config.text import Object

_ZERO = "zero_optimization."
_NAMED = ("optimizer", "scheduler")  # blocks that must name something, unless they are not there

# Old spelling -> the key that has its value now.
RENAMED: dict[str, str] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "aio.thread_count": "aio.intra_op_parallelism",
    "allgather_size": f"{_ZERO}allgather_bucket_size",
    f"{_ZERO}stage3_gather_fp16_weights_on_model_save": f"{_ZERO}stage3_gather_16bit_weights_on_model_save",
    f"{_ZERO}gather_fp16_weights_on_model_save": f"{_ZERO}stage3_gather_16bit_weights_on_model_save",
    **{
        f"{_ZERO}{name}": f"{_ZERO}stage3_{name}"
        for name in (
            *("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance", "param_persistence_threshold"),
            *("model_persistence_threshold", "gather_16bit_weights_on_model_save", "module_granularity_threshold"),
        )
    },
}
# Old switch -> what it means when it is on. Off, it means nothing.
SWITCHES: dict[str, tuple[str, Any]] = {
    "fp32_allreduce": ("communication_data_type", "fp32"),
    f"{_ZERO}cpu_offload": (f"{_ZERO}offload_optimizer.device", "cpu"),
    f"{_ZERO}cpu_offload_params": (f"{_ZERO}offload_param.device", "cpu"),
    f"{_ZERO}cpu_offload_param": (f"{_ZERO}offload_param.device", "cpu"),
}


@dataclass
class Translation:
    """What was written, in the words of the schema."""

    content: dict[str, Any]
    notes: list[Note] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)  # (dotted key, sentence)

    def _say(self, old: str, new: str) -> None:
        self.notes.append(Note(f"{old} is read as {new}"))

    def open_dots(self) -> None:
        """Keys with dots at the top are keys of the blocks that they name; what the block itself says wins."""
        for key in [key for key in self.content if "." in key and _is_known(key)]:
            value = self.content.pop(key)
            if _get(self.content, key) is None:
                self._put(key, value)
                self._say(f'"{key}"', f"the key {key.rpartition('.')[2]} of the block {key.rpartition('.')[0]}")
            else:
                self.notes.append(Note(f'"{key}" at the top has no effect: the value in its block holds'))

    def switch_blocks(self) -> None:
        """true and false where a block belongs."""
        if self.content.get("gradient_clipping") is False:
            self.content["gradient_clipping"] = 0.0
        stages = {"zero_optimization": {"stage": 1}}  # as it was before there were stages
        for key, block in _blocks(Config, ""):
            value = flag(_get(self.content, key))
            if value is False:
                self._put(key, {})
            if key in _NAMED and _get(self.content, key) == {}:
                del self.content[key]
            elif value is True and ("enabled" in block.model_fields or key in stages):
                meaning = stages.get(key, {"enabled": True})
                self._put(key, dict(meaning))
                self._say(f"{key} true", str(meaning).replace("'", '"').replace("True", "true"))

    def rename(self) -> None:
        for old, new in RENAMED.items():
            value = _take(self.content, old)
            if value is not None:
                self._move(old, value, new, value)
        for old, (new, meaning) in SWITCHES.items():
            value = flag(_take(self.content, old))
            if value is True:
                self._move(f"{old} true", value, new, meaning)
            elif value not in (False, None):
                self.problems.append((old, f"expected true or false, found {value!r}; better write {new}"))

    def _move(self, old: str, value: Any, new: str, meaning: Any) -> None:
        before = _get(self.content, new)
        if before is None or before == meaning:
            self._put(new, meaning)
            self._say(old, new if value is meaning else f'{new}: "{meaning}"')
        else:
            self.problems.append((new, f"contradicts {old}, which is the old spelling of it; keep one"))

    def _put(self, key: str, value: Any) -> None:
        inner = self.content
        *blocks, name = key.split(".")
        for block in blocks:
            if not isinstance(inner.get(block), dict):
                inner[block] = {}
            inner = inner[block]
        inner[name] = value


def translated(raw: Mapping[str, Any]) -> Translation:
    """`raw` is left alone."""
    found = Translation(_copied(raw))
    found.open_dots()
    found.switch_blocks()
    found.rename()
    found.switch_blocks()  # whose old names are gone now
    return found


def _copied(value: Any) -> Any:
    """Dictionaries of our own all the way down, with plain values; they remember what was written twice."""
    if isinstance(value, ConfigBlock):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if not isinstance(value, Mapping):
        return plain(value)
    copy = Object([(str(key), _copied(item)) for key, item in value.items()])
    copy.repeated = dict(getattr(value, "repeated", {}))
    return copy


def _get(content: Mapping[str, Any], key: str) -> Any:
    inner: Any = content
    for name in key.split("."):
        inner = inner.get(name) if isinstance(inner, Mapping) else None
    return inner


def _take(content: Mapping[str, Any], key: str) -> Any:
    """The value of a key, which is gone then; None if there is none."""
    block, _, name = key.rpartition(".")
    inner = _get(content, block) if block else content
    return inner.pop(name, None) if isinstance(inner, dict) else None


def _is_known(key: str) -> bool:
    block: type[ConfigBlock] | None = Config
    for name in key.split("."):
        if block is None or name not in block.model_fields:
            return False
        block = block_of(block.model_fields[name])
    return True


def _blocks(block: type[ConfigBlock], prefix: str) -> list[tuple[str, type[ConfigBlock]]]:
    found = []
    for name, info in block.model_fields.items():
        inner = block_of(info)
        if inner is not None:
            found += [(prefix + name, inner), *_blocks(inner, f"{prefix}{name}.")]
    return found
