"""What the walk over one configuration finds: problems with their sentences, keys that were given, notes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import ErrorDetails

from shardwell.config.notes import Note
from shardwell.errors import ConfigError, printable

MOST_LINES = 50  # of problems in one message
_MOST_LETTERS = 200  # of a value in a message


@dataclass
class Findings:
    """The findings of the walk over one source so far."""

    where: str  # the file as the user named it
    problems: list[tuple[str, str]] = field(default_factory=list)  # (dotted key, sentence)
    given: set[str] = field(default_factory=set)  # dotted keys that have a value in the source
    auto: set[str] = field(default_factory=set)  # dotted keys that were "auto"
    inert: dict[str, Any] = field(default_factory=dict)  # values of keys that have no effect
    inert_auto: set[str] = field(default_factory=set)  # those of them that were "auto", as if absent
    notes: list[Note] = field(default_factory=list)  # for the user, although nothing is wrong
    num_unknown: int = 0  # keys
    _broken: set[str] = field(default_factory=set)  # keys of the problems that were counted
    _num_counted: int = 0

    def add(self, key: str, sentence: str) -> None:
        """Note a problem of a key."""
        self.problems.append((key, sentence))

    def broken(self, *keys: str) -> bool:
        """Tell whether one of the keys has a problem already."""
        while self._num_counted < len(self.problems):
            self._broken.add(self.problems[self._num_counted][0])
            self._num_counted += 1
        return not self._broken.isdisjoint(keys)

    def raise_if_any(self) -> None:
        """Raise one error that lists all problems."""
        if self.problems:
            count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
            lines = [f"  {key}: {sentence}" for key, sentence in sorted(self.problems)[:MOST_LINES]]
            more = [f"  and {len(self.problems) - MOST_LINES:,} more"] if len(self.problems) > MOST_LINES else []
            raise ConfigError(printable("\n".join([f"{self.where}: {count} in the configuration", *lines, *more])))


_SENTENCES: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than_equal": lambda context: f"expected at least {context['ge']}",
    "greater_than": lambda context: f"expected more than {context['gt']}",
    "less_than": lambda context: f"expected less than {context['lt']}",
    "less_than_equal": lambda context: f"expected at most {context['le']}",
    "literal_error": lambda context: f"expected {context['expected']}".replace("'", '"'),
    "value_error": lambda context: str(context["error"]),
    "string_type": lambda _: "expected a string",
    "tuple_type": lambda _: "expected a list of strings",
    "dict_type": lambda _: "expected an object",
    "string_too_short": lambda _: "expected a name",
}
_EXAMPLES = {"optimizer.type": "AdamW", "scheduler.type": "WarmupLR"}  # the keys that must not be left out


def sentence_of(detail: ErrorDetails) -> str:
    """Return the sentence for one problem that validation found."""
    if detail["type"] == "missing":
        return f"missing; name it, such as {show(_EXAMPLES['.'.join(map(str, detail['loc']))])}"
    write = _SENTENCES.get(detail["type"])
    expected = write(detail.get("ctx", {})) if write else detail["msg"]
    return f"{expected}, found {show(detail['input'])}"


def show(value: Any) -> str:
    """Return a value as JSON, shortened."""
    words = json.dumps(value, default=str)
    return words if len(words) <= _MOST_LETTERS else f"{words[:_MOST_LETTERS]}..."
