"""Parses the text of a configuration file: JSON, and the deviations from it that DeepSpeed accepts (Hjson).

These are comments (`//`, `#`, `/* */`), commas that are missing at the end of a line or too many, keys and words
without quotes, single quotes, and Python's True, False and None.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from shardwell.errors import ConfigError

_SPACE = re.compile(r"(?:[\s\ufeff]+|(?://|#)[^\n]*|/\*.*?\*/)*", re.DOTALL)
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'')
_WORD = re.compile(r"[^\s,:\[\]{}\"'#]+")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_NAMED: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}
_INFINITE = {"infinity": float("inf"), "inf": float("inf"), "-infinity": -float("inf"), "-inf": -float("inf")}
_DEEPEST = 100  # objects in objects
_MOST_DIGITS = 1000  # of a number: Python refuses to read more than 4300


class Object(dict[str, Any]):
    """A JSON object that remembers which of its keys were written more than once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        times = Counter(name for name, _ in pairs) if len(pairs) > len(self) else {}
        self.repeated = {name: count for name, count in times.items() if count > 1}


def parse(text: str, where: str) -> Mapping[str, Any]:
    """Return the JSON object in `text`; errors call the file `where`."""

    def constant(word: str) -> Any:
        if word == "NaN":
            raise ConfigError(f"{where}: NaN is not a number in JSON; write a finite number")
        return _INFINITE[word.lower()]

    def integer(word: str) -> int:
        if len(word) > _MOST_DIGITS:
            raise ConfigError(f"{where}: a number of {len(word):,} digits ({word[:20]}...); write a smaller one")
        return int(word)

    try:
        content = json.loads(text, object_pairs_hook=Object, parse_constant=constant, parse_int=integer)
    except json.JSONDecodeError as strict:
        try:
            content = _Reader(text).read()
        except _UnreadableError as error:
            line, column = _place(text, error.position)
            if error.position <= strict.pos:  # the lenient parser came no further
                line, column, error = strict.lineno, strict.colno, _UnreadableError(strict.pos, strict.msg)
            raise ConfigError(f"{where}: not valid JSON, line {line} column {column}: {error.sentence}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply to be a configuration") from None
    if not isinstance(content, Mapping):
        found = "a list" if isinstance(content, list) else json.dumps(content)
        raise ConfigError(f"{where}: expected a JSON object at the top, found {found}")
    return content


class _UnreadableError(Exception):
    def __init__(self, position: int, sentence: str) -> None:
        super().__init__(sentence)
        self.position, self.sentence = position, sentence


def _place(text: str, position: int) -> tuple[int, int]:
    before = text[:position]
    return before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1


class _Reader:
    """A parser that walks through a text once."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def read(self) -> Any:
        self._skip()
        value = self._value()
        self._skip()
        if self._at < len(self._text):
            raise self._wrong("Extra data")
        return value

    def _skip(self) -> bool:
        """Skip blanks and comments; return whether a line ended."""
        found = _SPACE.match(self._text, self._at)
        assert found is not None  # it may be empty
        self._at = found.end()
        return "\n" in found.group()

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _wrong(self, sentence: str) -> _UnreadableError:
        return _UnreadableError(self._at, sentence)

    def _value(self) -> Any:
        char = self._peek()
        if char in ("{", "["):
            self._depth += 1
            if self._depth > _DEEPEST:
                raise self._wrong("nested too deeply to be a configuration")
            value = self._object() if char == "{" else self._list()
            self._depth -= 1
            return value
        return self._string() if char in ('"', "'") else self._word()

    def _object(self) -> Object:
        pairs: list[tuple[str, Any]] = []
        self._at += 1
        self._skip()
        while self._peek() != "}":
            key = self._string() if self._peek() in ('"', "'") else self._take(_WORD, "Expecting a name")
            self._skip()
            if self._peek() != ":":
                raise self._wrong("Expecting ':' delimiter")
            self._at += 1
            self._skip()
            pairs.append((key, self._value()))
            self._separate("}")
        self._at += 1
        return Object(pairs)

    def _list(self) -> list[Any]:
        values: list[Any] = []
        self._at += 1
        self._skip()
        while self._peek() != "]":
            values.append(self._value())
            self._separate("]")
        self._at += 1
        return values

    def _separate(self, end: str) -> None:
        """Skip what follows a member: a comma, the end of its line, or nothing before `end`."""
        line_ended = self._skip()
        if self._peek() == ",":
            self._at += 1
            self._skip()
        elif self._peek() != end and not line_ended:
            raise self._wrong("Expecting ',' delimiter")

    def _take(self, pattern: re.Pattern[str], missing: str) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._wrong(missing)
        self._at = found.end()
        return found.group()

    def _string(self) -> str:
        start = self._at
        quoted = self._take(_QUOTED, "Unterminated string")
        if quoted[0] == "'":
            quoted = '"' + quoted[1:-1].replace("\\'", "'").replace('"', '\\"') + '"'
        try:
            return str(json.loads(quoted))
        except json.JSONDecodeError as error:
            raise _UnreadableError(start + error.pos, error.msg) from None

    def _word(self) -> Any:
        """Read a number, a word that means a value, or a string without quotes."""
        start = self._at
        word = self._take(_WORD, "Expecting value")
        if word.lower() in _NAMED:
            return _NAMED[word.lower()]
        if word.lower() in _INFINITE:
            return _INFINITE[word.lower()]
        if word.lower() == "nan":
            raise _UnreadableError(start, "NaN is not a number in JSON; write a finite number")
        if _NUMBER.fullmatch(word):
            plain = word.replace("_", "")
            if len(plain) > _MOST_DIGITS:
                raise _UnreadableError(start, f"a number of {len(plain):,} digits; write a smaller one")
            return int(plain) if re.fullmatch(r"[+-]?\d+", plain) else float(plain)
        if word[0].isdigit() or word[0] in "+-":
            raise _UnreadableError(start, f"{word!r} is neither a number nor a word")
        return word
