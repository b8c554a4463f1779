"""Examines a pickle before it is read: what it would build, how deep and how large, without building anything.

A pickle is a program for a small machine with a stack and a memo. A few bytes can build values that are nested so
deeply that hashing them ends the interpreter, values that hold one value so often that a walk never ends, or values
that need far more memory than the file. Files that torch writes need few of the machine's operations.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

from shardwell.errors import CheckpointError

MOST_OPCODES = 50_000_000
MOST_DEPTH = 100  # of values in values
_MOST_DIGITS = 256  # bytes of an integer
_LAST_PROTOCOL = 5
_ROOM, _ROOM_PER_BYTE = 1_000_000, 64  # values that may be met on a walk through all, where one is in many places

_PLAIN, _BUILT, _NAME, _OTHER = range(4)  # a string or number; the result of a call; a name; anything else
_Value = list[Any]  # its kind, its depth, how many values are met on a walk through it, its name, is it in another
_LEAF: _Value = [_PLAIN, 0, 1, "", True]
_VOID: _Value = [_OTHER, 0, 1, "", True]


def examine(data: bytes, where: str, *, records_as_keys: bool = False) -> bool:
    """Raise `CheckpointError` unless a pickle stays within the limits and has keys that are strings or numbers.

    With `records_as_keys`, the result of a call may be a key, too: the caller checks it. Return whether values grow
    after they were put into others, whose depth and size are then not known yet: use `check_value`.
    """
    machine = _Machine(len(data), where, records_as_keys)
    try:
        machine.run(data)
    except CheckpointError:
        raise
    except Exception as error:  # an operation on an empty stack, or no operation
        raise CheckpointError(f"{where}: damaged, or no pickle ({type(error).__name__}: {error})") from error
    return machine.is_late


def check_value(value: Any, data_size: int, where: str, inside: Callable[[Any], Any]) -> None:
    """Raise unless a walk through `value` ends soon. Lists may have grown after they were put into others.

    `inside` returns the content of a value that is no list, tuple or dictionary; None if it has none.
    """
    room = _ROOM + _ROOM_PER_BYTE * data_size
    sizes: dict[int, int] = {}  # of visited values, by id; 0 during the visit
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
        self.is_late = False

    def refusal(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: damaged, or made to do harm: {what}; nothing was executed")

    def run(self, data: bytes) -> None:
        at, size, num_operations, number = 0, len(data), 0, 0
        while True:
            num_operations += 1
            code = data[at]
            operation = _OPERATIONS[code]
            if operation is None or num_operations > MOST_OPCODES:
                what = (
                    f"operation {code:#04x}, which torch does not write" if operation is None else "too many operations"
                )
                raise self.refusal(what)
            at += 1
            width, has_bytes, leaf, act = operation
            if width:
                number = int.from_bytes(data[at : at + width], "little")
                at += width
                if has_bytes:
                    at += number
            elif has_bytes:
                at = self._name(data, at)
                continue
            if at > size:
                raise self.refusal("more bytes than there are")
            if leaf is not None:
                if code == _LONG4 and number > _MOST_DIGITS:
                    raise self.refusal("an integer without end")
                self._stack.append(leaf)
            elif code == _STOP:
                break
            else:
                assert act is not None
                act(self, number)
        if len(self._stack) != 1 or self._below:
            raise self.refusal("values that belong to nothing")

    def _name(self, data: bytes, at: int) -> int:
        """Read two lines, a module and a name in it; return where they end."""
        middle = data.index(b"\n", at)
        end = data.index(b"\n", middle + 1)
        name = data[at:middle] + b"." + data[middle + 1 : end]
        self._stack.append([_NAME, 0, 1, name.decode(), False])
        return end + 1

    # --- operations ---------------------------------------------------------------------------------------------------

    def proto(self, version: int) -> None:
        if version > _LAST_PROTOCOL:
            raise self.refusal(f"protocol {version}")

    def frame(self, _: int) -> None:
        """Do nothing: a frame only says how many bytes follow."""

    def mark(self, _: int) -> None:
        self._below.append(self._stack)
        self._stack = []
        if len(self._below) > MOST_DEPTH:
            raise CheckpointError(f"{self._where}: nested too deeply")

    def empty(self, _: int) -> None:
        self._stack.append([_OTHER, 0, 1, "", False])

    def tuple_(self, _: int) -> None:
        self._make(self._since_mark())

    def tuple1(self, _: int) -> None:
        self._make(self._take(1))

    def tuple2(self, _: int) -> None:
        self._make(self._take(2))

    def tuple3(self, _: int) -> None:
        self._make(self._take(3))

    def append(self, _: int) -> None:
        self._grow(self._take(1))

    def appends(self, _: int) -> None:
        self._grow(self._since_mark())

    def setitem(self, _: int) -> None:
        self._fill(self._take(2))

    def setitems(self, _: int) -> None:
        self._fill(self._since_mark())

    def stack_name(self, _: int) -> None:
        self._take(2)
        self._stack.append([_NAME, 0, 1, "", False])

    def call(self, _: int) -> None:
        function, arguments = self._take(2)
        if function[3] == "collections.OrderedDict" and arguments[2] > 1:
            raise self.refusal("a dictionary that is made of pairs")
        self._make([function, arguments], _BUILT)

    def build(self, _: int) -> None:
        (state,) = self._take(1)
        if self._stack[-1][0] != _BUILT:
            raise self.refusal("sets the state of a value that has none")
        self._grow([state])

    def refer(self, _: int) -> None:
        self._make(self._take(1), _BUILT)

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def memoize(self, _: int) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    # --- shared by operations ----------------------------------------------------------------------------------------

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
        self._stack.append([kind, 0, 1, "", False])
        self._grow(parts)

    def _grow(self, parts: list[_Value]) -> None:
        """Put values into the one on top."""
        target = self._stack[-1]
        if target is _LEAF or target is _VOID:
            raise self.refusal("puts values into one that cannot hold any")
        depth, size = target[1], target[2]
        for part in parts:
            if part[1] >= depth:
                depth = part[1] + 1
            size += part[2]
            part[4] = True
        target[1], target[2] = depth, size
        if target[4] and parts:
            self.is_late = True
        if depth > MOST_DEPTH:
            raise CheckpointError(f"{self._where}: nested too deeply")
        if size > self._room:
            raise self.refusal("values inside values without end")

    def _fill(self, items: list[_Value]) -> None:
        """Put keys and values into the dictionary on top."""
        for key in items[::2]:
            if key[0] not in self._keys:
                raise self.refusal("a key of a dictionary that is neither a string nor a number")
        self._grow(items)


class _Operation(NamedTuple):
    """The form of one operation in the file, and its effect."""

    width: int = 0  # bytes of the number that follows
    has_bytes: bool = False  # so many bytes follow the number; lines, if there is none
    leaf: _Value | None = None  # the value that it pushes
    act: Callable[[_Machine, int], None] | None = None


def _operations() -> list[_Operation | None]:
    """Return the operations by code; None for those that torch does not write."""
    leaves = {
        (0, False): (pickle.NEWTRUE, pickle.NEWFALSE),
        (4, False): (pickle.BININT,),
        (1, False): (pickle.BININT1,),
        (2, False): (pickle.BININT2,),
        (8, False): (pickle.BINFLOAT,),
        (1, True): (pickle.LONG1, pickle.SHORT_BINUNICODE, pickle.SHORT_BINSTRING),
        (4, True): (pickle.LONG4, pickle.BINUNICODE, pickle.BINSTRING),
        (8, True): (pickle.BINUNICODE8,),
    }
    voids = {
        pickle.NONE: (0, False),
        pickle.SHORT_BINBYTES: (1, True),
        pickle.BINBYTES: (4, True),
        pickle.BINBYTES8: (8, True),
    }
    acts = {
        pickle.PROTO: (1, _Machine.proto),
        pickle.FRAME: (8, _Machine.frame),
        pickle.BINPUT: (1, _Machine.put),
        pickle.LONG_BINPUT: (4, _Machine.put),
        pickle.BINGET: (1, _Machine.get),
        pickle.LONG_BINGET: (4, _Machine.get),
        pickle.MEMOIZE: (0, _Machine.memoize),
        pickle.MARK: (0, _Machine.mark),
        pickle.EMPTY_LIST: (0, _Machine.empty),
        pickle.EMPTY_TUPLE: (0, _Machine.empty),
        pickle.EMPTY_DICT: (0, _Machine.empty),
        pickle.TUPLE: (0, _Machine.tuple_),
        pickle.TUPLE1: (0, _Machine.tuple1),
        pickle.TUPLE2: (0, _Machine.tuple2),
        pickle.TUPLE3: (0, _Machine.tuple3),
        pickle.APPEND: (0, _Machine.append),
        pickle.APPENDS: (0, _Machine.appends),
        pickle.SETITEM: (0, _Machine.setitem),
        pickle.SETITEMS: (0, _Machine.setitems),
        pickle.STACK_GLOBAL: (0, _Machine.stack_name),
        pickle.REDUCE: (0, _Machine.call),
        pickle.NEWOBJ: (0, _Machine.call),
        pickle.BUILD: (0, _Machine.build),
        pickle.BINPERSID: (0, _Machine.refer),
    }
    table: list[_Operation | None] = [None] * 256
    for (width, has_bytes), codes in leaves.items():
        for code in codes:
            table[code[0]] = _Operation(width, has_bytes, _LEAF)
    for code, (width, has_bytes) in voids.items():
        table[code[0]] = _Operation(width, has_bytes, _VOID)
    for code, (width, act) in acts.items():
        table[code[0]] = _Operation(width, act=act)
    table[pickle.GLOBAL[0]] = _Operation(has_bytes=True)
    table[_STOP] = _Operation()
    return table


_STOP, _LONG4 = pickle.STOP[0], pickle.LONG4[0]
_OPERATIONS = _operations()
