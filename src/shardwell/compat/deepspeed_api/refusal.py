"""Names of DeepSpeed's that shardwell does not have: they can be imported, and their use raises the reason.

Such a name is a class, so that `isinstance` against it answers no, as it must for objects of shardwell's.
"""

from __future__ import annotations

from typing import Any, NoReturn

from shardwell.errors import ShardwellError


class UnsupportedNameError(ShardwellError, NotImplementedError):
    """A name of DeepSpeed's was used that shardwell does not have."""


class _Refusing(type):
    """The class of refused names: a call and an attribute raise the reason.

    A subclass can be defined, because scripts define classes that they do not use in every run; a call of it raises.
    """

    reason: str
    full_name: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedNameError(cls._sentence())

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{cls._sentence()} (asked for '{name}')")

    def __repr__(cls) -> str:
        return f"<{cls.full_name}, which shardwell does not support>"

    def _sentence(cls) -> str:
        return f"{cls.full_name} is not supported by shardwell: {cls.reason}"


def refuse(module: str, name: str, reason: str) -> Any:
    """Return a stand-in for `module.name` whose use raises the reason."""
    space = {"reason": reason, "full_name": f"{module}.{name}", "__module__": module, "__doc__": reason}
    return _Refusing(name, (), space)
