"""Child processes: environment variables and a folder in front of PYTHONPATH hand this layer on.

Launchers such as `accelerate launch` and torchrun start new interpreters, which an import in the script does not reach.
Python imports `sitecustomize` at its start, and the one in `site/` switches the layer on if the variable is set. The
command `deepspeed`, which `accelerate launch` starts for several machines, is in `site/bin`, in front of PATH.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "SHARDWELL_AS_DEEPSPEED"
INTERPRETER = "SHARDWELL_PYTHON"
SITE = Path(__file__).with_name("site")


def inherit(environment: MutableMapping[str, str] | None = None) -> None:
    """Let the Python processes that this one starts have the layer, too, and find the command `deepspeed`."""
    variables = os.environ if environment is None else environment
    variables[VARIABLE] = "1"
    variables[INTERPRETER] = sys.executable
    for name, folder in (("PYTHONPATH", SITE), ("PATH", SITE / "bin")):
        others = [part for part in variables.get(name, "").split(os.pathsep) if part and Path(part) != folder]
        variables[name] = os.pathsep.join([str(folder), *others])
