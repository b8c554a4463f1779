"""The import hook: one finder that answers `import deepspeed`, `find_spec` and `importlib.metadata`.

Modules are made from the table in `names.py`. Nothing of clients is changed, with the one exception in `backend.py`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

from shardwell.compat.deepspeed_api import backend, names, order
from shardwell.compat.deepspeed_api.version import VERSION
from shardwell.errors import ShardwellError
from shardwell.version import __version__


class DeepSpeedDistribution(Distribution):
    """The metadata that clients ask for before they import: a name and a version, and no files."""

    def read_text(self, filename: str) -> str | None:
        """Return the metadata; there are no other files."""
        if filename != "METADATA":
            return None
        summary = "DeepSpeed's names on shardwell's engine, in this process"
        return f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\nSummary: {summary}\n"

    def locate_file(self, path: Any) -> Any:
        """Return a path that does not exist: nothing is installed."""
        return os.path.join(os.path.dirname(__file__), str(path))


class TableLoader(Loader):
    """Makes a module of DeepSpeed's from the table."""

    _spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module that the table calls the same, or None for a new one."""
        other = names.same_module(spec.name)
        if other is None:
            return None
        module = importlib.import_module(other)
        self._spec = module.__spec__  # importlib replaces it by that of the other name
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names, each of which is looked up when it is first used."""
        if self._spec is not None:
            module.__spec__ = self._spec
        else:
            names.fill(module)


# What `python -m` runs of DeepSpeed's modules: the arguments of Python that do the same.
PROGRAMS = {
    "deepspeed.checkpoint.ds_to_universal": ("-m", "shardwell.compat.deepspeed_api.universal"),
    "deepspeed.utils.zero_to_fp32": ("-m", "shardwell", "checkpoint", "zero-to-fp32"),
    "deepspeed.launcher.runner": ("-m", "shardwell.compat.deepspeed", "--launch"),
    "deepspeed": ("-m", "shardwell.compat.deepspeed", "--launch"),
}


class ProgramLoader(Loader):
    """The `__main__` of a module of DeepSpeed's that is a program: the process becomes shardwell's command for it."""

    def get_code(self, fullname: str) -> Any:
        """Return what `python -m` runs."""
        name = fullname.removesuffix(".__main__")
        start = f"os.execv(sys.executable, [sys.executable, *{PROGRAMS[name]!r}, *sys.argv[1:]])"
        return compile(f"import os, sys\n{start}", f"<{name}>", "exec")


class DeepSpeedFinder(DistributionFinder):
    """Finds modules called `deepspeed...`, and the distribution of that name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how a module of DeepSpeed's is made; None for all other modules, and for those it does not have."""
        if fullname in backend.WATCHED:
            return _followed(self, fullname, path, backend.WATCHED[fullname])
        if fullname != "deepspeed" and not fullname.startswith("deepspeed."):
            return None
        if fullname.removesuffix(".__main__") in PROGRAMS and fullname.endswith(".__main__"):
            return ModuleSpec(fullname, ProgramLoader(), origin=f"shardwell {__version__}")
        if not names.has_module(fullname):
            return None
        spec = ModuleSpec(fullname, TableLoader(), origin=f"shardwell {__version__}", is_package=True)
        spec.submodule_search_locations = []  # all are packages: only this finder finds what is below
        return spec

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """Return the metadata under DeepSpeed's name."""
        if context is not None and context.name is not None and context.name.lower() == "deepspeed":
            return [DeepSpeedDistribution()]
        return []

    def invalidate_caches(self) -> None:
        """Do nothing: there are no caches."""


class _FollowedLoader(Loader):
    """A client's own loader, after which a function looks at the module."""

    def __init__(self, inner: Any, then: Callable[[ModuleType], None]) -> None:
        self._inner, self._then = inner, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return what the client's loader returns."""
        found: ModuleType | None = self._inner.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then call the function."""
        self._inner.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _followed(
    finder: DeepSpeedFinder, fullname: str, path: Sequence[str] | None, then: Callable[[ModuleType], None]
) -> ModuleSpec | None:
    """Return the spec that the other finders give, with a function that is called after the module was executed."""
    for other in sys.meta_path:
        if other is finder or not hasattr(other, "find_spec"):
            continue
        spec = other.find_spec(fullname, path, None)
        if spec is not None and spec.loader is not None:
            spec.loader = _FollowedLoader(spec.loader, then)
            return spec
    return None


def is_on() -> bool:
    """Return whether `import deepspeed` means shardwell in this process."""
    return any(isinstance(finder, DeepSpeedFinder) for finder in sys.meta_path)


def switch_on() -> None:
    """Make `import deepspeed` mean shardwell in this process; refuse if that comes too late."""
    if is_on():
        return
    real = sys.modules.get("deepspeed")
    if real is not None:
        raise ShardwellError(
            f"DeepSpeed {getattr(real, '__version__', '')} itself is imported already, so `import deepspeed` cannot "
            f"mean shardwell in this process. {order.RIGHT_ORDER}"
        )
    order.check()
    installed = _installed_version()
    sys.meta_path.insert(0, DeepSpeedFinder())
    if installed is not None and os.environ.get("RANK", "0") == "0":
        print(
            f"shardwell {__version__}: `import deepspeed` means shardwell in this process. DeepSpeed {installed} is "
            "installed as well and is not used; to use it, start without shardwell.compat.deepspeed.",
            file=sys.stderr,
            flush=True,
        )


def _installed_version() -> str | None:
    """Return the version of the real DeepSpeed, if it is installed."""
    try:
        found = importlib.util.find_spec("deepspeed")
    except (ImportError, ValueError):
        return None
    if found is None:
        return None
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return None  # a folder of that name on the path: no DeepSpeed
