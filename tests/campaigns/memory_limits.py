"""Jobs under limits of memory drawn by chance: each trains within its limit, or is refused in words.

    python -m tests.campaigns.memory_limits --count 40 --minutes 10

Each case is a process in a control group of its own (version 1 or 2), where such groups can be made, else under
`ulimit -d`. Once it has imported torch, it limits its memory to what it uses and a number of bytes. Then it builds an
engine whose states are kept in host memory, or placed by what there is room for, and trains two steps. The kernel must
not kill it, and no error but the engine's own may come out.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.campaigns.result import Result, command_line
from tests.support.command import environment
from tests.support.patience import soon

MIB = 1 << 20
BASE = 64 * MIB  # for code that is loaded later, and threads
LIMIT = 120.0  # seconds for one case
BASES = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
PROGRAM = """
import os, resource, sys
group, room, width, layers, stage, tier, drive = sys.argv[1:]
if group:
    open(os.path.join(group, "cgroup.procs"), "w").write(str(os.getpid()))
import torch, shardwell
torch.set_num_threads(1)
small = torch.nn.Linear(2, 2)  # so that torch has loaded what it loads at the first step of anybody
torch.optim.AdamW(small.parameters(), fused=True)
small(torch.ones(1, 2)).sum().backward()
shardwell.initialize
if group:
    old = os.path.exists(os.path.join(group, "memory.limit_in_bytes"))
    used, limit = ("memory.usage_in_bytes", "memory.limit_in_bytes") if old else ("memory.current", "memory.max")
    used = int(open(os.path.join(group, used)).read())
    open(os.path.join(group, limit), "w").write(str(used + int(room)))
else:
    used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + int(room), resource.RLIM_INFINITY))
place = {"device": "cpu"} if tier != "nvme" else {"device": "nvme", "nvme_path": drive}
zero = {"stage": int(stage), "offload_optimizer": place}
if stage == "3" and tier != "cpu":
    zero["offload_param"] = place
own = {"placement": "auto"} if tier == "auto" and stage == "3" else {}
config = {"zero_optimization": zero, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "shardwell": own}
try:
    with shardwell.zero.Init(config_dict_or_path=config):
        model = torch.nn.Sequential(*(torch.nn.Linear(int(width), int(width)) for _ in range(int(layers))))
    engine, *_ = shardwell.initialize(model=model, config=config, device="cpu")
    for _ in range(2):
        engine.backward(engine(torch.ones(1, int(width))).sum())
        engine.step()
    engine.state_dict() if int(width) < 64 else None
except shardwell.ShardwellError as error:
    print("refused", str(error).replace("\\n", " ")[:300])
except (MemoryError, RuntimeError) as error:
    known = "can't allocate" in str(error) or isinstance(error, MemoryError)
    print("out of memory" if known else "raw", type(error).__name__, str(error).replace("\\n", " ")[:300])
else:
    print("trains")
"""


@contextlib.contextmanager
def new_group() -> Iterator[str]:
    """Yield the folder of a new control group, or an empty text where none can be made."""
    for base in BASES:
        folder = base / f"shardwell-campaign-{os.getpid()}"
        name = "memory.limit_in_bytes" if base.name == "memory" else "memory.max"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / name).write_text(str(1 << 40))
        except OSError:
            folder.rmdir()
            continue
        try:
            yield str(folder)
        finally:
            for _ in range(100):  # the kernel needs a moment after the last process
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.05)
        return
    yield ""


def outcome_of(draw: random.Random) -> tuple[str, str]:
    """Return the kind of what became of one job, and all that there is to say of it."""
    width, layers = draw.choice([256, 512, 1024]), draw.randrange(2, 24)
    stage, tier = draw.choice(["2", "3"]), draw.choice(["cpu", "auto", "nvme"])
    needed = 16 * width * width * layers
    room = BASE + int(needed * draw.uniform(-0.1, 3.0))
    words = f"{layers} layers of {width}, stage {stage}, {tier}, {room // MIB} MiB"
    with tempfile.TemporaryDirectory(prefix="shardwell-limits-") as drive, new_group() as group:
        case = [group, str(room), str(width), str(layers), stage, tier, drive]
        command = [sys.executable, "-c", PROGRAM, *case]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=soon(LIMIT), env=environment(fresh=True)
            )
        except subprocess.TimeoutExpired:
            return "hang", words
    if done.returncode < 0:
        return "killed", f"{words}: signal {-done.returncode}"
    said = done.stdout.strip().splitlines()[-1:] or [done.stderr[-300:]]
    kind = next((kind for kind in ("trains", "refused", "out of memory") if said[0].startswith(kind)), "raw")
    return kind, f"{words}: {said[0]}"


def campaign(count: int, seed: int, seconds: float) -> Result:
    result, begin = Result("memory_limits"), time.monotonic()
    for number in range(count):
        if time.monotonic() - begin > seconds:
            break
        kind, words = outcome_of(random.Random(f"{seed} {number}"))
        result.count(kind, "" if kind in ("trains", "refused") else f"seed {seed}, number {number}: {kind}: {words}")
    result.seconds = round(time.monotonic() - begin, 1)
    return result


if __name__ == "__main__":
    sys.exit(command_line(campaign, "tests.campaigns.memory_limits", __doc__))
