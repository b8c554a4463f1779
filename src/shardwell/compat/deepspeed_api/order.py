"""The order of imports: clients decide at their import whether DeepSpeed is there, and keep that decision.

Asked for afterwards, the layer would end in a NameError inside the client, so it refuses with the right order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

from shardwell.errors import ShardwellError

RIGHT_ORDER = (
    "Put `import shardwell.compat.deepspeed` at the top of the script, before all of these, or start the script by "
    "`shardwell run --as-deepspeed script.py` or `python -m shardwell.compat.deepspeed script.py`."
)


def _always(module: ModuleType) -> bool:
    return True


def _has_asked(module: ModuleType) -> bool:
    """Return whether Lightning's lazy check has been evaluated: before that it may still find what comes later."""
    return "available" in getattr(getattr(module, "_DEEPSPEED_AVAILABLE", None), "__dict__", {})


# Modules that look for DeepSpeed when they are imported, with a function that tells whether one has decided.
_DECIDES: dict[str, Callable[[ModuleType], bool]] = {
    "accelerate.utils": _always,
    "accelerate.accelerator": _always,
    "transformers.integrations.deepspeed": _always,
    "transformers.trainer": _always,
    "lightning.fabric.strategies.deepspeed": _has_asked,
    "lightning_fabric.strategies.deepspeed": _has_asked,
}


def too_late() -> list[str]:
    """Return the libraries that are imported already and have decided that there is no DeepSpeed."""
    found = {name: sys.modules.get(name) for name in _DECIDES}
    decided = [name for name, module in found.items() if module is not None and _DECIDES[name](module)]
    return list(dict.fromkeys(name.partition(".")[0] for name in decided))


def check() -> None:
    """Refuse if a client was imported before this layer."""
    names = too_late()
    if names:
        raise ShardwellError(
            f"shardwell.compat.deepspeed comes too late: {' and '.join(names)} "
            f"{'was' if len(names) == 1 else 'were'} imported before it, found no DeepSpeed, and will not look again. "
            f"{RIGHT_ORDER}"
        )
