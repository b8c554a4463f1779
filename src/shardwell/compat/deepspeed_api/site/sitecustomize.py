"""Python imports this at its start if its folder is on PYTHONPATH: it switches DeepSpeed's names on, if asked to.

`shardwell.compat.deepspeed_api.children` puts the folder there. The user's own `sitecustomize`, which this one hides,
is executed first.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys


def _run_hidden() -> None:
    """Execute the `sitecustomize` that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = [folder for folder in sys.path if os.path.abspath(folder or os.getcwd()) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module  # it is the one that others see
    spec.loader.exec_module(module)


_run_hidden()
if os.environ.get("SHARDWELL_AS_DEEPSPEED") == "1":
    import shardwell.compat.deepspeed  # noqa: F401
