"""What rests on the host or on disk, when its updates commit, and whether it fits there."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]

from shardwell.comm.mesh import Mesh
from shardwell.config import Config
from shardwell.engine.precision import is_scaled
from shardwell.engine.room import room
from shardwell.errors import ConfigError, ShardwellError
from shardwell.memory import Device
from shardwell.memory.account import human
from shardwell.memory.disk import DiskSettings, DiskTier
from shardwell.memory.disk_file import free_bytes
from shardwell.optim import ShardedOptimizer
from shardwell.optim.store import FEWEST_SEATS
from shardwell.unit import Context, Cut
from shardwell.unit.table import Commit

STEPS_UNTIL_KNOWN = 3  # until the device has shown what it needs
_FILL = 0.75  # of what the device never needed so far, for optimizer state
_SHARE = 0.5  # of the host memory that is left, for shadows
_ADAM, _ADAM_8BIT = 12, 6  # bytes a parameter: fp32 master and moments


@dataclass(frozen=True)
class Offload:
    """Which units have their optimizer state on the host or on disk, and when each of them commits."""

    commits: dict[str, Commit]  # by the name of the unit

    def again(self, cuts: list[Cut], settings: Config) -> Offload:
        """The same for a model that has changed since."""
        policy = commit_policy(settings)
        return Offload({name: self.commits.get(name, policy) for name in _on_host(cuts, settings)})

    def fill_device(self, optimizer: ShardedOptimizer, context: Context) -> Offload:
        """Move state up to the device, as much as it has room for; all ranks the same."""
        moved = optimizer.move_up(room(context, _FILL))
        return Offload({name: commit for name, commit in self.commits.items() if name not in moved})

    def __str__(self) -> str:
        counts = {commit: list(self.commits.values()).count(commit) for commit in Commit}
        parts = [f"{count} {commit.value}" for commit, count in counts.items() if count]
        return f"updates on the host, by unit: {', '.join(parts)}" if parts else "no updates on the host"


def plan_offload(cuts: list[Cut], settings: Config, mesh: Mesh, device: Device) -> Offload:
    """Decide, and raise before anything is allocated if it will not fit into host memory or on disk."""
    if settings.shardwell.moments == "8bit" and settings.zero_optimization.offload_optimizer.device == "none":
        raise ConfigError(
            'shardwell.moments "8bit" is for optimizer state on the host or on disk, but '
            'zero_optimization.offload_optimizer.device is "none": use "fp32", or offload'
        )
    on_host = _on_host(cuts, settings)
    need = Need(sum(on_host.values()), max(on_host.values(), default=0), settings, mesh, device)
    policy = commit_policy(settings)
    free = psutil.virtual_memory().available
    shadowed = set(on_host) if policy is Commit.SHADOW else set()
    if settings.shardwell.commit == "auto" and policy is Commit.AFTER_NORM and device.is_cuda and not need.disk:
        shadowed = need.that_fit(on_host, _SHARE * (free - need.total(policy)))
    share = sum(on_host[name] for name in shadowed)
    needed = need.total(policy, share)
    over = f"over {mesh.size} rank(s), {mesh.node_size} of them here"
    smaller = ', or set shardwell.moments to "8bit".' if need.state == _ADAM else "."
    if on_host and needed > free:
        raise ShardwellError(
            f"optimizer state {'on disk' if need.disk else 'on the host'} needs {human(needed)} of host memory on this "
            f"node: {need.each(policy)} bytes for each of {need.numel:,} parameters"
            + (f", {need.state} more for {share:,} of them" if share else "")
            + f", {over}, and {human(need.buffers)} of buffers. Free are {human(free)}. Lower offload_optimizer.ratio, "
            "use more ranks" + (', set shardwell.commit to "after_norm"' if shadowed else "") + smaller
        )
    for path, part in _parts(need.disk, _paths(settings)):
        found = free_bytes(path)
        if found is not None and part > found:
            raise ShardwellError(
                f"optimizer state on disk needs {human(need.disk)} on this node: {need.state} bytes for each of "
                f"{need.numel:,} parameters, {over}. {human(part)} of that go to {path}, where {human(found)} are "
                "free. Free space there, name a path on another drive in offload_optimizer.nvme_path too, lower "
                f"offload_optimizer.ratio, use more ranks{smaller}"
            )
    return Offload({name: Commit.SHADOW if name in shadowed else policy for name in on_host})


def open_disk(settings: Config) -> DiskTier | None:
    """The drives that something rests on, if it does."""
    if not _paths(settings):
        return None
    return DiskTier(_paths(settings), DiskSettings(**settings.aio.model_dump(exclude={"use_gds"})))


def _paths(settings: Config) -> list[Path]:
    """All that are named for what rests on disk: it is striped over all of them."""
    zero = settings.zero_optimization
    named = [b.nvme_path or "" for b in (zero.offload_optimizer, zero.offload_param) if b.device == "nvme"]
    return [Path(path) for path in dict.fromkeys(part.strip() for part in ",".join(named).split(",")) if path]


def _parts(num_bytes: int, paths: list[Path]) -> list[tuple[Path, int]]:
    """What goes to the file system of each path; a path that does not answer is left to who opens it."""
    drives = Counter(os.stat(path).st_dev for path in paths if path.exists())
    return [(p, num_bytes * drives[os.stat(p).st_dev] // len(paths)) for p in paths if p.exists()]


def _on_host(cuts: list[Cut], settings: Config) -> dict[str, int]:
    """Units and their sizes: a share of the model, from its end.

    Updates of the first units come last, and the next forward waits for them.
    """
    block = settings.zero_optimization.offload_optimizer
    if block.device == "none":
        return {}
    sizes = {one.name: sum(p.numel() for _, p in one.parameters if p.requires_grad) for one in cuts}
    ratio = 1.0 if block.ratio == "auto" else block.ratio  # what fits on the device moves up later
    most, total, chosen = ratio * sum(sizes.values()), 0, {}
    for name in reversed(sizes):
        total += sizes[name]
        if total > most:
            break
        chosen[name] = sizes[name]
    return chosen


def commit_policy(settings: Config) -> Commit:
    """When updates on the host become the truth. Of what rests on disk there is no second state in memory."""
    needs = {"gradient_clipping": settings.gradient_clipping > 0, "a loss scale": is_scaled(settings)}
    waits = [name for name, is_on in needs.items() if is_on]
    asked = settings.shardwell.commit
    if asked == "at_once" and waits:
        raise ConfigError(
            f'shardwell.commit "at_once" contradicts {" and ".join(waits)}: the norm of all gradients must be known '
            'before anything is updated; use "auto", "after_norm" or "shadow"'
        )
    if asked == "auto":
        return Commit.AFTER_NORM if waits else Commit.AT_ONCE
    zero = settings.zero_optimization
    on_disk = "nvme" in (zero.offload_optimizer.device, zero.offload_param.device)
    return Commit.AFTER_NORM if on_disk and asked == "shadow" else Commit[asked.upper()]


class Need:
    """The memory of the host, and of its drives, that a number of parameters needs on this node."""

    def __init__(self, numel: int, largest: int, settings: Config, mesh: Mesh, device: Device) -> None:
        zero = settings.zero_optimization
        self.numel = numel
        self.state = _ADAM_8BIT if settings.shardwell.moments == "8bit" else _ADAM
        self._param = 2 if settings.bf16.enabled or settings.fp16.enabled else 4
        is_together = zero.offload_param.device == zero.offload_optimizer.device and settings.bf16.enabled
        in_halves = is_together and settings.shardwell.commit != "shadow"  # the parameter is part of its master
        params = 0 if in_halves or zero.offload_param.device == "none" else self._param
        self._params = params if zero.offload_param.device == "cpu" else 0
        self._adds_up = zero.stage >= 2 and (settings.gradient_accumulation_steps or 1) > 1
        self._here = mesh.node_size / (mesh.size if zero.stage else 1)
        slots = zero.offload_optimizer.buffer_count + 2 if device.is_cuda else 0
        on_disk = zero.offload_optimizer.device == "nvme"
        self.disk = int(self.state * numel * self._here) if on_disk else 0
        if zero.offload_param.device == "nvme":
            self.disk += int(params * numel * self._here)
        seats = max(FEWEST_SEATS, zero.offload_optimizer.buffer_count) if on_disk else 0
        self.buffers = int((slots * self._param + seats * self.state) * largest * self._here)

    def each(self, policy: Commit) -> int:
        """Bytes a parameter."""
        kept = 0 if policy is Commit.AT_ONCE else self._param
        return (0 if self.disk else self.state) + self._params + (4 if self._adds_up else kept)

    def total(self, policy: Commit, shadowed: int = 0) -> int:
        """Bytes, with shadows for some of the parameters."""
        return int((self.each(policy) * self.numel + self.state * shadowed) * self._here) + self.buffers

    def that_fit(self, sizes: dict[str, int], free: float) -> set[str]:
        """Units whose shadows fit, of the first that are given."""
        chosen: set[str] = set()
        for name, size in sizes.items():
            free -= self.state * size * self._here
            if free < 0:
                break
            chosen.add(name)
        return chosen
