"""The table of DeepSpeed's names: (module, name) gives an object of shardwell's, or the reason why there is none.

The rows are in `names_package.py`, `names_runtime.py` and `names_refused.py`. This module looks names up in them and
fills the modules that the import hook makes. It imports an implementation only when a name of it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from shardwell.compat.deepspeed_api.names_package import MODULES as PACKAGE_MODULES
from shardwell.compat.deepspeed_api.names_refused import WHOLE_MODULES
from shardwell.compat.deepspeed_api.names_runtime import MODULES as RUNTIME_MODULES
from shardwell.compat.deepspeed_api.refusal import refuse
from shardwell.compat.deepspeed_api.rows import Absent, Constant, Everything, Refused, Row, SameModule, Supported

TABLE: dict[str, dict[str, Row]] = {**PACKAGE_MODULES, **RUNTIME_MODULES}


def rows() -> Iterator[tuple[str, str, Row]]:
    """Yield every row: module, name, and what becomes of it; a module that is refused as a whole has the name `*`."""
    for module, found in TABLE.items():
        for name, row in found.items():
            if isinstance(row, Everything):
                others = [one for one in public_names(row.module) if one not in found]
                yield from ((module, one, Supported(f"{row.module}:{one}")) for one in others)
            else:
                yield module, name, row
    for module, reason in WHOLE_MODULES.items():
        yield module, "*", Refused(reason)


def public_names(module: str) -> list[str]:
    """Return the names of an implementation that are DeepSpeed's: its `__all__`, or what it defines itself."""
    found = importlib.import_module(module)
    if hasattr(found, "__all__"):
        return sorted(found.__all__)
    own = {name: value for name, value in vars(found).items() if not name.startswith("_")}
    foreign = (ModuleType, type(annotations))
    return sorted(
        name
        for name, value in own.items()
        if not isinstance(value, foreign) and getattr(value, "__module__", module) == module
    )


def has_module(fullname: str) -> bool:
    """Return whether `import fullname` works: the table has it, or a module inside it, or refuses all its names."""
    return fullname in _PACKAGES or same_module(fullname) is not None or reason_for_module(fullname) is not None


def same_module(fullname: str) -> str | None:
    """Return the module that `fullname` is another name of, or None."""
    parent, _, name = fullname.rpartition(".")
    row = TABLE.get(parent, {}).get(name)
    return row.module if isinstance(row, SameModule) else None


def reason_for_module(fullname: str) -> str | None:
    """Return why a module is refused as a whole, or None."""
    if fullname in TABLE:
        return None
    parts = fullname.split(".")
    for length in range(len(parts), 1, -1):
        prefix = ".".join(parts[:length])
        if prefix in WHOLE_MODULES:
            return WHOLE_MODULES[prefix]
        if prefix in TABLE and length < len(parts):
            return None  # a module that has rows is not refused by what is around it
    return None


def fill(module: ModuleType) -> None:
    """Give a new module of DeepSpeed's its names; each is looked up when it is first used."""
    fullname = module.__name__

    def getattr_of_module(name: str) -> Any:
        value = resolve(fullname, name)
        setattr(module, name, value)
        return value

    found = TABLE.get(fullname, {})
    rest = found.get("*")
    module.__doc__ = f"{fullname} as shardwell has it; see shardwell.compat.deepspeed_api.names."
    module.__dict__["__getattr__"] = getattr_of_module
    listed = [name for name, row in found.items() if isinstance(row, Supported | Constant) and not name.startswith("_")]
    if isinstance(rest, Everything):
        module.__dict__["__all__"] = sorted({*listed, *public_names(rest.module)})
    else:
        module.__dict__["__all__"] = listed
    module.__dict__["__dir__"] = lambda: sorted({*module.__dict__, *found, *_below(fullname)})


def resolve(module: str, name: str) -> Any:
    """Return the object of a name; raise AttributeError where DeepSpeed or shardwell has none."""
    row = TABLE.get(module, {}).get(name)
    if row is not None:
        return _object(module, name, row)
    if has_module(f"{module}.{name}") and reason_for_module(f"{module}.{name}") is None:
        return importlib.import_module(f"{module}.{name}")
    rest = TABLE.get(module, {}).get("*")
    if isinstance(rest, Everything) and not name.startswith("__"):
        implementation = importlib.import_module(rest.module)
        if hasattr(implementation, name):
            return getattr(implementation, name)
    reason = reason_for_module(module) or reason_for_module(f"{module}.{name}")
    if reason is not None and not name.startswith("__"):
        return refuse(module, name, reason)
    raise AttributeError(
        f"module '{module}' has no attribute '{name}': it is not among the names of DeepSpeed's that shardwell knows. "
        "docs/deepspeed-migration.md lists them"
        if not name.startswith("__")
        else f"module '{module}' has no attribute '{name}'"
    )


def _object(module: str, name: str, row: Row) -> Any:
    match row:
        case Constant(value):
            return value
        case SameModule(other):
            return importlib.import_module(other)
        case Refused(reason):
            return refuse(module, name, reason)
        case Absent(reason):
            raise AttributeError(f"{module}.{name} does not exist in shardwell: {reason}")
        case Everything():
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        case Supported():
            found = importlib.import_module(row.module)
            return getattr(found, row.attribute) if row.attribute else found


def _below(fullname: str) -> set[str]:
    """Return the names of the modules directly inside a module."""
    prefix = f"{fullname}."
    return {one.removeprefix(prefix).partition(".")[0] for one in _PACKAGES if one.startswith(prefix)}


def _packages() -> set[str]:
    """Return all modules that can be imported, with the packages that they are in."""
    found = set()
    for name in [*TABLE, *WHOLE_MODULES]:
        parts = name.split(".")
        found |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return found


_PACKAGES = _packages()
