"""Reads pickles as data: nothing is imported, and only functions that the caller lists are called."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from shardwell.checkpoint.sources.opcodes import check_value, examine
from shardwell.errors import CheckpointError


class Record:
    """A stand-in for an instance of a class: it keeps the pickled state, and does nothing with it."""

    state: Any = None

    def get(self, name: str) -> Any:
        """Return a field of the instance; None if it has none of this name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def nothing(*_: Any) -> None:
    """Replace a class or function that is not needed."""


def member(of: Any, name: Any) -> None:
    """Replace `getattr`, by which Python 3.11.0 to 3.11.3 pickle members of enumerations; they are not needed."""
    if of is not nothing or not isinstance(name, str):
        raise TypeError("an attribute of something that is no enumeration")


def ordered(items: Any = ()) -> dict[Any, Any]:
    """Replace `collections.OrderedDict`; Python 2 wrote it with pairs, whose keys must be plain."""
    for item in items:
        _check_key(item[0])
    return dict(items)


def _check_key(key: Any) -> None:
    """Raise for a tuple as key: hashing one that is nested deeply crashes the interpreter."""
    if not isinstance(key, (str, int, float, Record)):
        raise TypeError(f"a key that is a {type(key).__name__}, and neither a string nor a number")


def load(
    data: bytes,
    known: Mapping[str, Callable[..., Any] | object],
    where: str,
    resolve: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the value in a pickle.

    `known` has a stand-in for each class and function that may occur, by qualified name; `resolve` returns the objects
    for persistent ids."""
    is_late = examine(data, where, records_as_keys=True)
    try:
        found = _Unpickler(data, known, where, resolve).load()
    except CheckpointError:
        raise
    except Exception as error:  # anything can follow from bytes that are no pickle
        raise CheckpointError(f"{where}: damaged, or no pickle ({type(error).__name__}: {error})") from error
    if is_late:
        check_value(found, len(data), where, lambda value: value.state if isinstance(value, Record) else None)
    return found


class _Unpickler(pickle._Unpickler):
    # The one in Python, whose tables grow with the data and not with the numbers in it.

    def __init__(self, data: bytes, known: Mapping[str, Any], where: str, resolve: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._known, self._where, self._resolve = known, where, resolve

    def find_class(self, module: str, name: str) -> Any:
        qualified = f"{module}.{name}"
        if qualified not in self._known:
            raise CheckpointError(
                f"{self._where}: names {qualified[:200]!r}, which is not among the classes that may be read; "
                "nothing was executed"
            )
        return self._known[qualified]

    def persistent_load(self, pid: Any) -> Any:
        if self._resolve is None:
            raise CheckpointError(f"{self._where}: refers to something outside of itself")
        return self._resolve(pid)

    def load_build(self) -> None:
        """Set the state of a record; raise for other objects, because stand-ins in the table must not be changed."""
        state = self.stack.pop()  # type: ignore[attr-defined]
        record = self.stack[-1]  # type: ignore[attr-defined]
        if not isinstance(record, Record):
            raise CheckpointError(f"{self._where}: sets the state of a value that has none")
        record.state = state

    def load_setitem(self) -> None:
        _check_key(self.stack[-2])  # type: ignore[attr-defined]
        super().load_setitem()  # type: ignore[misc]

    def load_setitems(self) -> None:
        for key in self.stack[::2]:  # type: ignore[attr-defined]
            _check_key(key)
        super().load_setitems()  # type: ignore[misc]

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }
