"""Parameters that cannot become a view of a flat buffer, because their class gives them more than values."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_HARMLESS = frozenset(
    {
        *("__new__", "__init__", "__init_subclass__", "__repr__", "__str__", "__format__", "__deepcopy__", "__copy__"),
        *("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__module__", "__doc__", "__dict__"),
        *("__weakref__", "__annotations__", "__class_getitem__", "__hash__"),
    }
)


def has_no_size(parameter: nn.Parameter) -> bool:
    """Return whether the parameter belongs to a lazy module that has not seen its input yet."""
    return bool(is_lazy(parameter))


def own_rules(parameter: nn.Parameter) -> str:
    """Return what makes a parameter's class different from an ordinary parameter; empty if nothing does.

    A class that only adds a name or attributes is ordinary. A class with its own `to`, `data` or operators stores
    something else than the values it shows (4-bit quantised values, a part of a distributed tensor).
    """
    kind: type[Tensor] = type(parameter)
    if not issubclass(kind, nn.Parameter):
        return f"it is a {kind.__module__}.{kind.__qualname__}, and no plain tensor"
    above = nn.Parameter.__mro__
    own = {name for parent in kind.__mro__ if parent not in above for name in vars(parent)}
    changed = sorted(name for name in own if hasattr(Tensor, name) and name not in _HARMLESS)
    if changed:
        return f"its class {kind.__qualname__} has its own {', '.join(changed[:4])}"
    return ""
