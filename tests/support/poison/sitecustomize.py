"""Refuses all pickles, in a process that has this folder on PYTHONPATH; before anything else is imported."""

import _pickle
import pickle
from typing import Any


def refuse(*args: Any, **kwargs: Any) -> Any:
    """Tell who asked, in a file and by the exit of the process."""
    import os
    import traceback

    with open(os.environ["POISONED"], "a") as file:
        file.write("".join(traceback.format_stack()) + "\n")
    raise SystemExit("a pickle was read")


class Refuse(pickle._Unpickler):  # type: ignore[name-defined, misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse()


for module in (pickle, _pickle):
    module.load = module.loads = refuse  # type: ignore[attr-defined]
    module.Unpickler = Refuse  # type: ignore[misc, assignment]
pickle._load = pickle._loads = refuse  # type: ignore[attr-defined]
pickle._Unpickler = Refuse  # type: ignore[attr-defined]
