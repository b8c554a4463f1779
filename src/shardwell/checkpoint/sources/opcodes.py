"""A look through a pickle before it is read: what it would build, how deep and how much, without building anything.

A pickle is a program for a small machine with a stack and a memo. Few bytes can ask for values that are nested so
deeply that hashing them ends the interpreter, that hold one value in so many places that nobody comes to their end, or
for memory that no file of their size needs. Files that torch writes need few of the machine's operations.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

from shardwell.errors import CheckpointError

MOST_OPCODES = 50_000_000
MOST_DEPTH = 100  # of values in values
_MOST_DIGITS = 256  # bytes of an integer
_LAST_PROTOCOL = 5
_ROOM, _ROOM_PER_BYTE = 1_000_000, 64  # values that may be met on a walk through all, where one is in many places

_PLAIN, _BUILT, _NAME, _OTHER = range(4)  # a string or a number; what was called; a name of something; all else
_Value = list[Any]  # its kind, its depth, how many values are met on a walk through it, its name
_LEAF: _Value = [_PLAIN, 0, 1, ""]
_VOID: _Value = [_OTHER, 0, 1, ""]

_LEAVES = {
    **dict.fromkeys(["NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"], _LEAF),
    **dict.fromkeys(["BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING"], _LEAF),
    **dict.fromkeys(["NONE", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"], _VOID),
}


def examine(data: bytes, where: str, *, records_as_keys: bool = False) -> None:
    """Raise `CheckpointError` unless a pickle stays within the limits and has keys that are strings or numbers.

    With `records_as_keys`, what the file has made by a call may be a key, too: the caller checks what it is.
    """
    machine = _Machine(len(data), where, records_as_keys)
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if number >= MOST_OPCODES:
                raise machine.refusal(f"more than {MOST_OPCODES} operations")
            machine.do(opcode.name, argument)
    except CheckpointError:
        raise
    except Exception as error:  # an operation on an empty stack, or bytes that are none
        raise CheckpointError(f"{where}: damaged, or no pickle ({type(error).__name__}: {error})") from error


def check_value(value: Any, data_size: int, where: str, inside: Callable[[Any], Any]) -> None:
    """Raise unless a walk through `value` comes to its end soon. Lists may have grown after they were put into others.

    `inside` gives what a value that is no list, tuple or dictionary holds; None if it holds nothing.
    """
    room = _ROOM + _ROOM_PER_BYTE * data_size
    sizes: dict[int, int] = {}  # of what was walked through, by id; 0 while it is
    path: list[tuple[Any, list[Any]]] = [(value, _parts(value, inside))]
    sizes[id(value)] = 0
    while path:
        at, parts = path[-1]
        while parts:
            part = parts[-1]
            if (known := sizes.get(id(part))) == 0:
                raise CheckpointError(f"{where}: damaged: a value holds itself")
            held = None if known is not None else _parts(part, inside)
            if held:
                break
            parts.pop()
        else:
            path.pop()
            sizes[id(at)] = 1 + sum(sizes.get(id(part), 1) for part in _parts(at, inside))
            if sizes[id(at)] > room:
                raise CheckpointError(f"{where}: damaged: values inside values without end")
            continue
        assert held is not None
        sizes[id(part)] = 0
        path.append((part, held))
        if len(path) > MOST_DEPTH:
            raise CheckpointError(f"{where}: nested too deeply")


def _parts(value: Any, inside: Callable[[Any], Any]) -> list[Any]:
    if isinstance(value, (str, bytes, int, float)) or value is None:
        return []
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        return list(value)
    held = inside(value)
    return [] if held is None else [held]


class _Machine:
    """The stack and the memo, with a description in place of each value."""

    def __init__(self, num_bytes: int, where: str, records_as_keys: bool) -> None:
        self._where, self._room = where, _ROOM + _ROOM_PER_BYTE * num_bytes
        self._keys = (_PLAIN, _BUILT) if records_as_keys else (_PLAIN,)
        self._stack: list[_Value] = []
        self._below: list[list[_Value]] = []  # the stacks under the marks
        self._memo: dict[int, _Value] = {}

    def refusal(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: damaged, or made to do harm: {what}; nothing was executed")

    def do(self, name: str, argument: Any) -> None:
        if (leaf := _LEAVES.get(name)) is not None:
            if name in ("LONG1", "LONG4") and argument.bit_length() > 8 * _MOST_DIGITS:
                raise self.refusal("an integer without end")
            self._stack.append(leaf)
        elif (act := _ACTS.get(name)) is not None:
            act(self, argument)
        else:
            raise self.refusal(f"{name}, which torch does not write")

    # --- operations, by the names that pickletools gives them -----------------------------------------------------

    def proto(self, version: int) -> None:
        if version > _LAST_PROTOCOL:
            raise self.refusal(f"protocol {version}")

    def frame(self, _: Any) -> None:
        """Says how many bytes follow; they are here already."""

    def stop(self, _: Any) -> None:
        if len(self._stack) != 1 or self._below:
            raise self.refusal("values that belong to nothing")

    def mark(self, _: Any) -> None:
        self._below.append(self._stack)
        self._stack = []
        if len(self._below) > MOST_DEPTH:
            raise CheckpointError(f"{self._where}: nested too deeply")

    def empty(self, _: Any) -> None:
        self._stack.append([_OTHER, 0, 1, ""])

    def tuple_(self, _: Any) -> None:
        self._make(self._since_mark())

    def tuple1(self, _: Any) -> None:
        self._make(self._take(1))

    def tuple2(self, _: Any) -> None:
        self._make(self._take(2))

    def tuple3(self, _: Any) -> None:
        self._make(self._take(3))

    def append(self, _: Any) -> None:
        self._grow(self._take(1))

    def appends(self, _: Any) -> None:
        self._grow(self._since_mark())

    def setitem(self, _: Any) -> None:
        self._fill(self._take(2))

    def setitems(self, _: Any) -> None:
        self._fill(self._since_mark())

    def name(self, argument: str) -> None:
        self._stack.append([_NAME, 0, 1, str(argument).replace(" ", ".")])

    def stack_name(self, _: Any) -> None:
        self._take(2)
        self._stack.append([_NAME, 0, 1, ""])

    def call(self, _: Any) -> None:
        function, arguments = self._take(2)
        if function[3] == "collections.OrderedDict" and arguments[2] > 1:
            raise self.refusal("a dictionary that is made of pairs")
        self._make([function, arguments], _BUILT)

    def build(self, _: Any) -> None:
        (state,) = self._take(1)
        target = self._stack[-1]
        if target[0] != _BUILT:
            raise self.refusal("gives a state to what has none")
        self._grow([state])

    def refer(self, _: Any) -> None:
        self._make(self._take(1), _BUILT)

    def put(self, index: Any) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    # --- what they have in common ------------------------------------------------------------------------------------

    def _take(self, num: int) -> list[_Value]:
        if len(self._stack) < num:
            raise self.refusal("an operation without values")
        taken = self._stack[-num:]
        del self._stack[-num:]
        return taken

    def _since_mark(self) -> list[_Value]:
        taken, self._stack = self._stack, self._below.pop()
        return taken

    def _make(self, parts: list[_Value], kind: int = _OTHER) -> None:
        self._stack.append([kind, 0, 1, ""])
        self._grow(parts)

    def _grow(self, parts: list[_Value]) -> None:
        """Put values into the one on top."""
        target = self._stack[-1]
        if target is _LEAF or target is _VOID:
            raise self.refusal("values for what holds none")
        if not parts:
            return
        target[1] = max(target[1], 1 + max(part[1] for part in parts))
        target[2] += sum(part[2] for part in parts)
        if target[1] > MOST_DEPTH:
            raise CheckpointError(f"{self._where}: nested too deeply")
        if target[2] > self._room:
            raise self.refusal("values inside values without end")

    def _fill(self, items: list[_Value]) -> None:
        """Put keys and values into the dictionary on top."""
        if any(key[0] not in self._keys for key in items[::2]):
            raise self.refusal("a key of a dictionary that is neither a string nor a number")
        self._grow(items)


_ACTS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine.proto,
    "FRAME": _Machine.frame,
    "STOP": _Machine.stop,
    "MARK": _Machine.mark,
    "EMPTY_LIST": _Machine.empty,
    "EMPTY_TUPLE": _Machine.empty,
    "EMPTY_DICT": _Machine.empty,
    "TUPLE": _Machine.tuple_,
    "TUPLE1": _Machine.tuple1,
    "TUPLE2": _Machine.tuple2,
    "TUPLE3": _Machine.tuple3,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.setitem,
    "SETITEMS": _Machine.setitems,
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.stack_name,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.refer,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.put,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
}
