"""The plan of what is stored on the host or on disk, when its updates commit, and whether it fits there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from shardwell.config import Config
from shardwell.engine.precision import is_scaled
from shardwell.errors import ConfigError, ShardwellError
from shardwell.memory import Device, Tier
from shardwell.memory.limits import free_host_bytes
from shardwell.memory.statistics import human
from shardwell.offload.disk import AioSettings, DiskTier
from shardwell.offload.disk_file import free_bytes
from shardwell.offload.grad_swap import NUM_SLOTS
from shardwell.offload.optimizer_swap import FEWEST_SEATS
from shardwell.offload.placement import Bytes, ModelStates, TierPlacement, plan, table, tier_ladder, total
from shardwell.optim import OptimizerFactory, ShardedOptimizer
from shardwell.parallel.mesh import RankGroup
from shardwell.runtime.budget import available_bytes, bytes_by_path, tier_budgets
from shardwell.sharding import EngineContext, UnitSpec
from shardwell.sharding.spec import CommitPolicy

STEPS_UNTIL_KNOWN = 3  # steps until the peak memory of the device is known
_FILL = 0.75  # share of the device memory that was never used so far, for optimizer state
_SHARE = 0.5  # share of the free host memory, for speculation
_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}
_ON = {Tier.DEVICE: "on the device", Tier.HOST: "on the host", Tier.DISK: "on disk"}

_COMMITS = {  # by the words of the configuration
    "at_once": CommitPolicy.IMMEDIATE,
    "after_norm": CommitPolicy.AFTER_NORM,
    "shadow": CommitPolicy.SPECULATIVE,
    "auto": CommitPolicy.AUTO,
}


@dataclass(frozen=True)
class OffloadPlan:
    """The tier of each unit, and the commit policy of units whose optimizer state is stored on the host or on disk."""

    commits: dict[str, CommitPolicy]  # by the name of the unit
    places: dict[str, TierPlacement]
    states: ModelStates
    above: CommitPolicy = CommitPolicy.AFTER_NORM  # the policy of units whose optimizer state is stored on the device

    def commit_of(self, name: str) -> CommitPolicy:
        """Return the commit policy of a unit."""
        return self.commits.get(name, self.above)

    def again(self, states: ModelStates, settings: Config) -> OffloadPlan:
        """Return the plan for a model that has changed since. New units are stored on the lowest tier allowed."""
        policy = commit_policy(settings)
        if settings.shardwell.placement == "auto":
            places = {name: self.places.get(name, deepest(settings)) for name in states.units}
        else:
            asked = _asked(states, settings)
            places = {name: _like(place, self.places.get(name)) for name, place in asked.items()}
        return OffloadPlan(
            {name: self.commits.get(name, policy) for name in _below(places)}, places, states, self.above
        )

    def fill_device(self, optimizer: ShardedOptimizer, context: EngineContext) -> OffloadPlan:
        """Move optimizer state to the device, as much as it has room for, the same on all ranks."""
        moved = optimizer.move_up(available_bytes(context, _FILL))
        commits = {name: commit for name, commit in self.commits.items() if name not in moved}
        raised = {name: self.places[name]._replace(optimizer=Tier.DEVICE) for name in moved}
        return replace(self, commits=commits, places=self.places | raised)

    def at_rest(self) -> Bytes:
        """Return the bytes of parameters, master weights and optimizer state on each tier of this rank.

        Optimizer state counts even before the first step creates it.
        """
        return self.states.at_rest(self.places)

    def __str__(self) -> str:
        commits = Counter(self.commits.values())
        policies = ", ".join(f"{commits[commit]} {commit.value}" for commit in CommitPolicy if commits[commit])
        tiers = Counter(place.optimizer for place in self.places.values())
        units = ", ".join(f"{tiers[tier]} {_ON[tier]}" for tier in Tier if tiers[tier])
        held = self.at_rest()
        sizes = ", ".join(f"{human(held[tier])} {_ON[tier]}" for tier in Tier if held[tier])
        updates = f"updates on the host, by unit: {policies}" if policies else "no updates on the host"
        waiting = [name for name, place in self.places.items() if place.gradient_tier is Tier.DISK]
        num_waiting = sum(self.states.waiting(name, self.places[name]) > 0 for name in waiting)
        deep = f"; gradients that wait on disk: of {num_waiting} units" if num_waiting else ""
        return f"{updates}; units by optimizer state: {units}; at rest on each rank: {sizes}{deep}"


def deepest(settings: Config) -> TierPlacement:
    """Return the tiers that the offload blocks name.

    Gradients wait on disk where optimizer state is stored there, unless the configuration keeps them on the host.
    """
    zero = settings.zero_optimization
    gradients = Tier.HOST if settings.shardwell.gradients == "host" else Tier.DISK
    return TierPlacement(_TIERS[zero.offload_param.device], _TIERS[zero.offload_optimizer.device], gradients)


def _like(place: TierPlacement, before: TierPlacement | None) -> TierPlacement:
    """Return a placement whose gradients wait where they did before, if that is known."""
    return place if before is None else place._replace(gradients=before.gradients)


def _below(places: dict[str, TierPlacement]) -> list[str]:
    """Return the units whose optimizer state is stored below the device, from the end of the model."""
    return [name for name in reversed(places) if places[name].optimizer is not Tier.DEVICE]


def _check_reach(settings: Config) -> None:
    """Raise if options of state below the device are set, but no state can be there."""
    own, device = settings.shardwell, settings.zero_optimization.offload_optimizer.device
    if own.moments == "8bit" and device == "none":
        raise ConfigError(
            'shardwell.moments "8bit" is for optimizer state on the host or on disk, but '
            'zero_optimization.offload_optimizer.device is "none": use "fp32", or offload'
        )
    if own.gradients == "disk" and device != "nvme":
        raise ConfigError(
            'shardwell.gradients "disk" is for gradients of optimizer state on disk, but '
            f'zero_optimization.offload_optimizer.device is "{device}": use "auto", or "nvme" there'
        )


def plan_offload(states: ModelStates, cuts: list[UnitSpec], settings: Config, context: EngineContext) -> OffloadPlan:
    """Return the plan; raise before anything is allocated if it does not fit into host memory or on disk."""
    _check_reach(settings)
    if settings.shardwell.placement == "auto":
        return _plan_places(states, cuts, settings, context)
    return _plan_as_asked(states, settings, context)


def _plan_places(states: ModelStates, cuts: list[UnitSpec], settings: Config, context: EngineContext) -> OffloadPlan:
    """Place the units on the highest tiers that have room."""
    rungs = _rungs(settings)
    needs = [[states.needs(name, rung) for rung in rungs] for name in states.units]
    buffers = [_buffers(states, rung, settings, context.device) for rung in rungs]
    floor = sum(unit[-1][Tier.DEVICE] for unit in needs)
    parameters = [parameter for one in cuts for _, parameter in one.parameters]
    free = tier_budgets(settings, context, parameters, _paths(settings), floor)
    found = plan(needs, buffers, free)
    if not found.fits(free):
        raise ShardwellError(
            f"the model does not fit where shardwell.placement may put it. Needed on each of "
            f"{context.roles.all.mesh.size} rank(s): {table(found.needed, free)}. "
            f"{_remedy(found.needed, free, settings)}"
        )
    places = {name: rungs[rung] for name, rung in zip(states.units, found.rungs, strict=True)}
    policy, below = commit_policy(settings), _below(places)
    shadowed: set[str] = set(below) if policy is CommitPolicy.SPECULATIVE else set()
    may_speculate = settings.shardwell.commit == "auto" and policy is CommitPolicy.AFTER_NORM and context.device.is_cuda
    if may_speculate and all(places[name].optimizer is Tier.HOST for name in below):
        shadowed = _speculating(states, places, below, free[Tier.HOST] - found.needed[Tier.HOST])
    above = policy if policy in (CommitPolicy.IMMEDIATE, CommitPolicy.AUTO) else CommitPolicy.AFTER_NORM
    return OffloadPlan(
        {name: CommitPolicy.SPECULATIVE if name in shadowed else policy for name in below}, places, states, above
    )


def _rungs(settings: Config) -> list[TierPlacement]:
    """Return the placements that units may have.

    Gradients wait on disk with all state that is stored there, or as the last resort.
    """
    rungs = tier_ladder(deepest(settings))
    is_last_resort = settings.shardwell.gradients == "auto" or rungs[-1].gradient_tier is not Tier.DISK
    return rungs if is_last_resort else [*rungs[:-2], rungs[-1]]


def _buffers(states: ModelStates, deep: TierPlacement, settings: Config, device: Device) -> Bytes:
    """Return the host memory for staging buffers, if units are placed as low as this."""
    zero, units = settings.zero_optimization, states.units
    slots = zero.offload_optimizer.buffer_count + 2 if device.is_cuda else 0
    size = slots * max((states.sent(name, deep) for name in units), default=0)
    if deep.optimizer is Tier.DISK:
        seats = max(FEWEST_SEATS, zero.offload_optimizer.buffer_count)
        size += seats * max((states.stepped(name, deep) for name in units), default=0)
        if deep.gradients is Tier.DISK:
            size += (seats + NUM_SLOTS) * max((states.waiting(name, deep) for name in units), default=0)
    if deep.parameters is Tier.DISK:
        size += zero.offload_param.buffer_count * max((states.held(name) for name in units), default=0)
    return Counter({Tier.HOST: size})


def _remedy(needed: Bytes, free: dict[Tier, float], settings: Config) -> str:
    """Return what to change so that the model fits."""
    deep, over = deepest(settings), {tier for tier in Tier if needed[tier] > free[tier]}
    lower = {
        Tier.DEVICE: "raise shardwell.memory.device",
        Tier.HOST: "raise shardwell.memory.host or lower offload_optimizer.buffer_count",
        Tier.DISK: "free space under nvme_path or name a path on another drive too",
    }
    deeper = {Tier.DEVICE: "cpu", Tier.HOST: "nvme"}
    blocks = {"offload_param": deep.parameters, "offload_optimizer": deep.optimizer}
    ways = [lower[tier] for tier in Tier if tier in over]
    ways += [f'set {block}.device to "{deeper[t]}"' for block, t in blocks.items() if t in over and t in deeper]
    if deep.optimizer in over and deep.optimizer is not Tier.DEVICE and settings.shardwell.moments == "fp32":
        ways.append('set shardwell.moments to "8bit"')
    text = ", ".join([*ways, "or use more ranks."])
    return text[0].upper() + text[1:]


def _plan_as_asked(states: ModelStates, settings: Config, context: EngineContext) -> OffloadPlan:
    """Place a share of the units where the offload blocks say."""
    mesh, device = context.roles.all.mesh, context.device
    places = _asked(states, settings)
    below, policy = _below(places), commit_policy(settings)
    buffers = _buffers(states, deepest(settings), settings, device)[Tier.HOST]
    free = {Tier.HOST: free_host_bytes(mesh.local_world_size) / mesh.local_world_size}
    needed = total(states.needs(name, place) for name, place in places.items())
    if settings.shardwell.gradients == "auto":
        places |= _with_gradients_above(states, places, free[Tier.HOST] - needed[Tier.HOST] - buffers, context)
        needed = total(states.needs(name, place) for name, place in places.items())
    shadowed = set(below) if policy is CommitPolicy.SPECULATIVE else set()
    may_speculate = settings.shardwell.commit == "auto" and policy is CommitPolicy.AFTER_NORM and device.is_cuda
    if may_speculate and not needed[Tier.DISK]:
        shadowed = _speculating(states, places, below, free[Tier.HOST] - needed[Tier.HOST] - buffers)
    _check_host(
        ShortageReport(states, places, settings, mesh), needed[Tier.HOST], buffers, bool(shadowed), free[Tier.HOST]
    )
    _check_drives(ShortageReport(states, places, settings, mesh), needed[Tier.DISK])
    return OffloadPlan(
        {name: CommitPolicy.SPECULATIVE if name in shadowed else policy for name in below}, places, states
    )


def _with_gradients_above(
    states: ModelStates, places: dict[str, TierPlacement], free: float, context: EngineContext
) -> dict[str, TierPlacement]:
    """Return placements of units whose gradients need not wait on disk.

    They fit into half of the host memory that is free on every rank.
    """
    on_disk = {name: place for name, place in places.items() if place.gradient_tier is Tier.DISK}
    waiting = {name: states.waiting(name, place) for name, place in on_disk.items()}
    if not any(waiting.values()):
        return {}
    least = free if context.device.is_meta else context.roles.all.all_reduce_min(free, "ROOM")
    return {name: places[name]._replace(gradients=Tier.HOST) for name in _that_fit(waiting, _SHARE * least)}


def _speculating(states: ModelStates, places: dict[str, TierPlacement], below: list[str], free: float) -> set[str]:
    """Return the units whose speculative state fits into half of what is free."""
    sizes = {name: states.stepped(name, places[name]) + states.sent(name, places[name]) for name in below}
    return _that_fit(sizes, _SHARE * free)


@dataclass(frozen=True)
class ShortageReport:
    """The text of the error if states do not fit where they are asked to be stored."""

    states: ModelStates
    places: dict[str, TierPlacement]
    settings: Config
    mesh: RankGroup

    def needs(self, num_bytes: int) -> str:
        """Describe the bytes of one rank, for this node and for each parameter."""
        numel = sum(sum(self.states.units[name].values()) for name, place in self.places.items() if place.depth)
        shares = self.mesh.size if self.settings.zero_optimization.stage else 1
        each = f"{num_bytes * shares / max(1, numel):.3g} bytes for each of {numel:,} parameters"
        here = self.mesh.local_world_size
        return f"{human(num_bytes * here)} on this node: {each}, over {self.mesh.size} rank(s), {here} of them here"

    @property
    def ways(self) -> str:
        """What to change so that the states fit."""
        smaller = ', or set shardwell.moments to "8bit"' if self.settings.shardwell.moments == "fp32" else ""
        return f"lower offload_optimizer.ratio, use more ranks{smaller}."


def _check_host(short: ShortageReport, needed: int, buffers: int, speculates: bool, free: float) -> None:
    if any(place.depth for place in short.places.values()) and needed + buffers > free:
        slower = 'set shardwell.commit to "after_norm", ' if speculates else ""
        raise ShardwellError(
            f"what rests below the device needs more host memory than there is: {short.needs(needed)}, and "
            f"{human(buffers)} of buffers for each of those. Free are "
            f"{human(free * short.mesh.local_world_size)}. To fit, {slower}{short.ways}"
        )


def _check_drives(short: ShortageReport, needed: int) -> None:
    for path, part in bytes_by_path(needed * short.mesh.local_world_size, _paths(short.settings)):
        found = free_bytes(path)
        if found is not None and part > found:
            raise ShardwellError(
                f"what rests on disk needs {short.needs(needed)}. {human(part)} of that go to {path}, where "
                f"{human(found)} are free. Free space there, name a path on another drive too, {short.ways}"
            )


def open_disk(settings: Config) -> DiskTier | None:
    """Return the disk tier, or None if nothing is stored on disk."""
    if not _paths(settings):
        return None
    return DiskTier(_paths(settings), AioSettings(**settings.aio.model_dump()))


def _paths(settings: Config) -> list[Path]:
    """Return all paths that are named for state on disk: it is striped over all of them."""
    zero = settings.zero_optimization
    named = [b.nvme_path or "" for b in (zero.offload_optimizer, zero.offload_param) if b.device == "nvme"]
    return [Path(path) for path in dict.fromkeys(part.strip() for part in ",".join(named).split(",")) if path]


def _asked(states: ModelStates, settings: Config) -> dict[str, TierPlacement]:
    """Return the placements asked for: those of parameters, and those of the optimizer state of a share of the model.

    The share is counted from the end of the model, because updates of the first units come last, and the next forward
    waits for them.
    """
    asked, zero = deepest(settings), settings.zero_optimization
    places = dict.fromkeys(states.units, asked._replace(optimizer=Tier.DEVICE))
    sizes = states.trained()
    ratio = 1.0 if zero.offload_optimizer.ratio == "auto" else zero.offload_optimizer.ratio  # what fits moves up later
    left = ratio * sum(sizes.values())
    for name in reversed(sizes):
        left -= sizes[name]
        if left < 0:
            break
        places[name] = asked
    if asked.parameters is Tier.DISK:
        above = _that_fit(states.shares(), zero.offload_param.max_in_cpu)
        places |= {name: places[name]._replace(parameters=Tier.HOST) for name in above}
    return places


def settle_commit(settings: Config, recipe: OptimizerFactory | None) -> Config:
    """Return the configuration with "after_norm", the only policy for an optimizer whose steps use collectives.

    Each rank decides alone whether a unit can be updated before the norm: it may lack a gradient that other ranks have.
    """
    own = settings.shardwell
    may_go_ahead = own.placement == "auto" or settings.zero_optimization.offload_optimizer.device != "none"
    if recipe is None or own.commit == "after_norm" or not may_go_ahead or not recipe.is_collective():
        return settings
    if own.commit != "auto":
        raise ConfigError(
            f'shardwell.commit "{own.commit}" is for optimizers that step each element alone. In the steps of this one '
            'ranks meet, and which units can go ahead of the norm may differ between them: use "auto" or "after_norm"'
        )
    told = {"shardwell.commit": 'auto -> "after_norm" (ranks meet in the steps of the optimizer)'}
    chosen = own.model_copy(update={"commit": "after_norm"})
    return settings.with_origins({**settings.origins, **told}, {"shardwell": chosen})


def commit_policy(settings: Config) -> CommitPolicy:
    """Return when updates on the host commit. State on disk has no speculative state in memory.

    "auto" is never immediate where a step may be skipped, because an immediate update cannot be skipped.
    """
    needs = {"gradient_clipping": settings.gradient_clipping > 0, "a loss scale": is_scaled(settings)}
    waits = [name for name, is_on in needs.items() if is_on]
    asked = settings.shardwell.commit
    if asked == "at_once" and waits:
        raise ConfigError(
            f'shardwell.commit "at_once" contradicts {" and ".join(waits)}: the norm of all gradients must be known '
            'before anything is updated; use "auto", "after_norm" or "shadow"'
        )
    if asked == "auto":
        return CommitPolicy.AFTER_NORM if waits or settings.shardwell.nonfinite == "skip" else CommitPolicy.AUTO
    zero = settings.zero_optimization
    on_disk = "nvme" in (zero.offload_optimizer.device, zero.offload_param.device)
    return CommitPolicy.AFTER_NORM if on_disk and asked == "shadow" else _COMMITS[asked]


def _that_fit(sizes: dict[str, float] | dict[str, int], free: float) -> set[str]:
    """Return the first names whose bytes fit together."""
    chosen: set[str] = set()
    for name, size in sizes.items():
        free -= size
        if free < 0:
            break
        chosen.add(name)
    return chosen
