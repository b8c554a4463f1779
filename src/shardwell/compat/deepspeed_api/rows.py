"""The kinds of rows of the table of names: an object of shardwell's, a constant, another module, or a reason.

The import hook makes DeepSpeed's modules from the table, and the migration page is printed from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PACKAGE = "shardwell.compat.deepspeed_api"


@dataclass(frozen=True)
class Supported:
    """A name that works: `module:attribute`, with the module relative to this package unless it is shardwell's own.

    The module is imported when the name is first used.
    """

    target: str
    note: str = ""  # what differs from DeepSpeed, for the migration page

    @property
    def module(self) -> str:
        """The absolute name of the module that has the object."""
        module = self.target.partition(":")[0]
        return module if module.split(".")[0] in ("shardwell", "torch") else f"{PACKAGE}.{module}"

    @property
    def attribute(self) -> str:
        """The name of the object in its module."""
        return self.target.partition(":")[2]


@dataclass(frozen=True)
class Constant:
    """A name with a plain value."""

    value: Any


@dataclass(frozen=True)
class SameModule:
    """A name that is another module of DeepSpeed's, as `deepspeed.zero` is `deepspeed.runtime.zero`."""

    module: str


@dataclass(frozen=True)
class Everything:
    """All public names of a module of this package, under the same names: the row `*` of a module."""

    module: str


@dataclass(frozen=True)
class Refused:
    """A name that can be imported, and whose use raises an error with the reason."""

    reason: str


@dataclass(frozen=True)
class Absent:
    """A name that `hasattr` must not find; an access raises an AttributeError with the reason."""

    reason: str


Row = Supported | Constant | SameModule | Everything | Refused | Absent
Rows = Mapping[str, Row]


def supported(module: str, *names: str) -> dict[str, Row]:
    """Return rows of names that one module of this package has under the same names."""
    return {name: Supported(f"{module}:{name}") for name in names}


def everything(module: str) -> dict[str, Row]:
    """Return the row that stands for all public names of a module of this package."""
    return {"*": Everything(f"{PACKAGE}.{module}")}


def refused(reason: str, *names: str) -> dict[str, Row]:
    """Return rows of names that are refused for one reason."""
    return dict.fromkeys(names, Refused(reason))
