"""The launcher of one host of `shardwell run --hostfile`: what ssh runs there. It knows no torch.

The first line of its standard input is JSON and says what to start. The rest is empty; when it ends, so do the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    """Run `shardwell` as the first line of standard input says, until it has ended or nobody is there any more."""
    order = json.loads(sys.stdin.readline())
    try:
        os.chdir(order["directory"])
    except OSError as error:
        print(f"error: the folder '{order['directory']}' is not here ({error.strerror}); ranks start in the folder in "
              "which the command was given", file=sys.stderr)  # fmt: skip
        return 2
    environment = {**os.environ, **order["environment"]}
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwell", *order["arguments"]], env=environment, stdin=subprocess.DEVNULL
    )
    threading.Thread(target=_end_with_input, args=(process,), daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: _end(process))
    code = process.wait()
    return code if code >= 0 else 128 - code


def _end_with_input(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError, ValueError):
        while sys.stdin.readline():
            pass
    _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the launcher to end its ranks."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


if __name__ == "__main__":
    sys.exit(main())
