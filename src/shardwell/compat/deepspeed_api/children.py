"""Child processes: an environment variable and a folder in front of PYTHONPATH hand this layer on.

Launchers such as `accelerate launch` and torchrun start new interpreters, which an import in the script does not reach.
Python imports `sitecustomize` at its start, and the one in `site/` switches the layer on if the variable is set.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "SHARDWELL_AS_DEEPSPEED"
SITE = Path(__file__).with_name("site")


def inherit(environment: MutableMapping[str, str] | None = None) -> None:
    """Let the Python processes that this one starts have the layer, too."""
    variables = os.environ if environment is None else environment
    variables[VARIABLE] = "1"
    others = [part for part in variables.get("PYTHONPATH", "").split(os.pathsep) if part and Path(part) != SITE]
    variables["PYTHONPATH"] = os.pathsep.join([str(SITE), *others])
