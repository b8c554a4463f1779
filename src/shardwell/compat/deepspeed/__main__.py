"""`python -m shardwell.compat.deepspeed script.py ...` or `-m module ...`: run it with DeepSpeed's names on.

Processes that it starts have them, too. `--launch` in front starts ranks, with the options of DeepSpeed's launcher.
"""

from __future__ import annotations

import os
import runpy
import sys

from shardwell.compat.deepspeed_api.children import inherit
from shardwell.errors import ShardwellError

USAGE = (
    "usage: python -m shardwell.compat.deepspeed [-m] SCRIPT [ARGS]...\n"
    "       python -m shardwell.compat.deepspeed --launch [OPTIONS OF DEEPSPEED'S LAUNCHER] SCRIPT [ARGS]..."
)


def main() -> None:
    """Run the script or module that the arguments name, as `__main__`."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0 if arguments else 2)
    inherit()
    try:
        if arguments[0] == "--launch":
            from shardwell.compat.deepspeed_api.launcher import main as launch

            launch(arguments[1:])
            return
        is_module = arguments[0] == "-m"
        if is_module and len(arguments) < 2:
            raise ShardwellError("-m needs the name of a module, such as -m accelerate.commands.launch")
        if not is_module and arguments[0].startswith("-"):
            raise ShardwellError(f"'{arguments[0]}' is no script.\n{USAGE}")
        if not is_module and not os.path.isfile(arguments[0]):
            raise ShardwellError(f"there is no script '{arguments[0]}'. To run a module: -m {arguments[0]}")
    except ShardwellError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.argv = arguments[1:] if is_module else arguments
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
