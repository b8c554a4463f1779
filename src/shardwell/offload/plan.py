"""The plan of the state that is stored on the host or on disk: its tiers, its commit policies, whether it fits."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from shardwell.config import Config
from shardwell.errors import ConfigError, NoRoomError
from shardwell.memory import Device, Tier
from shardwell.memory.machine import Machine
from shardwell.memory.statistics import TIERS_BY_NAME, human
from shardwell.offload.budget import bytes_by_path, held_bytes, tier_budgets
from shardwell.offload.disk import AioSettings, DiskTier
from shardwell.offload.grad_swap import NUM_SLOTS
from shardwell.offload.kept_states import keeps_states, units_to_keep
from shardwell.offload.optimizer_swap import FEWEST_BUFFERS
from shardwell.offload.placement import plan, table, tier_ladder
from shardwell.parallel.mesh import RankGroup
from shardwell.runtime.commit_policy import commit_policy
from shardwell.sharding import EngineContext, UnitSpec
from shardwell.sharding.model_states import Bytes, ModelStates, OffloadPlan, TierPlacement, total
from shardwell.sharding.spec import CommitPolicy

_SHARE = 0.5  # share of the free host memory, for speculation


def replan(before: OffloadPlan, states: ModelStates, settings: Config) -> OffloadPlan:
    """Return the plan for a model that has changed since. New units are stored on the lowest tier allowed."""
    policy, kept = commit_policy(settings), _still_kept(before, states)
    if settings.shardwell.placement == "auto":
        places = {name: before.places.get(name, deepest(settings)) for name in states.units}
    else:
        asked = _kept_above(_asked(states, settings), kept)
        places = {name: _like(place, before.places.get(name)) for name, place in asked.items()}
    commits = {name: before.commits.get(name, policy) for name in _below(places)}
    return OffloadPlan(commits, places, states, before.above, kept)


def _still_kept(before: OffloadPlan, states: ModelStates) -> tuple[str, ...]:
    """Return the kept units that take no more of the device than when they were chosen: for these there was room.

    A unit that was frozen takes nothing until it is unfrozen.
    """
    after = {name: states.needs(name, before.places[name])[Tier.DEVICE] for name in before.kept if name in states.units}
    return tuple(name for name, size in after.items() if size <= before.needs(name)[Tier.DEVICE])


def deepest(settings: Config) -> TierPlacement:
    """Return the tiers that the offload blocks name.

    Gradients wait on disk where optimizer state is stored there, unless the configuration keeps them on the host.
    """
    zero = settings.zero_optimization
    may_wait_on_disk = zero.offload_optimizer.device == "nvme" and settings.shardwell.gradients != "host"
    gradients = Tier.DISK if may_wait_on_disk else Tier.HOST
    return TierPlacement(
        TIERS_BY_NAME[zero.offload_param.device], TIERS_BY_NAME[zero.offload_optimizer.device], gradients
    )


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


def plan_offload(
    states: ModelStates, specs: list[UnitSpec], settings: Config, context: EngineContext, *, may_keep: bool
) -> OffloadPlan:
    """Return the plan; raise before anything is allocated if it does not fit into host memory or on disk.

    `may_keep`: the optimizer can step some units on the device and others on the host.
    """
    _check_reach(settings)
    if settings.shardwell.placement == "auto":
        return _plan_places(states, specs, settings, context)
    return _plan_as_asked(states, specs, settings, context, may_keep=may_keep)


def _plan_places(states: ModelStates, specs: list[UnitSpec], settings: Config, context: EngineContext) -> OffloadPlan:
    """Place the units on the highest tiers that have room."""
    rungs = rungs_of(settings)
    needs = [[states.needs(name, rung) for rung in rungs] for name in states.units]
    buffers = [buffers_for(states, rung, settings, context.device) for rung in rungs]
    floor = sum(unit[-1][Tier.DEVICE] for unit in needs)
    parameters = [parameter for one in specs for _, parameter in one.parameters]
    free = tier_budgets(settings, context, parameters, paths_of(settings), floor, states.largest_unsharded())
    found = plan(needs, buffers, free)
    if not found.fits(free):
        raise NoRoomError(
            f"the model does not fit where shardwell.placement may put it. Needed on each of "
            f"{context.roles.all.rank_group.size} rank(s): {table(found.needed, free)}. "
            f"{_remedy(found.needed, free, settings)}"
        )
    places = {name: rungs[rung] for name, rung in zip(states.units, found.rungs, strict=True)}
    policy, below = commit_policy(settings), _below(places)
    speculating: set[str] = set(below) if policy is CommitPolicy.SPECULATIVE else set()
    if _may_speculate(settings, context.device) and all(places[name].optimizer is Tier.HOST for name in below):
        speculating = _speculating(states, places, below, free[Tier.HOST] - found.needed[Tier.HOST])
    above = CommitPolicy.AFTER_NORM
    # With everything on the device, updates are those of a run without offloading.
    may_go_ahead = policy is CommitPolicy.IMMEDIATE or (policy is CommitPolicy.AUTO and bool(below))
    if may_go_ahead and settings.zero_optimization.stage == 3:
        above = policy
    return OffloadPlan(
        {name: CommitPolicy.SPECULATIVE if name in speculating else policy for name in below}, places, states, above
    )


def rungs_of(settings: Config) -> list[TierPlacement]:
    """Return the placements that units may have.

    Gradients wait on disk with all state that is stored there, or as the last resort.
    """
    rungs = tier_ladder(deepest(settings))
    is_last_resort = settings.shardwell.gradients == "auto" or rungs[-1].gradient_tier is not Tier.DISK
    return rungs if is_last_resort else [*rungs[:-2], rungs[-1]]


def buffers_for(states: ModelStates, deep: TierPlacement, settings: Config, device: Device) -> Bytes:
    """Return the host memory for staging buffers, if units are placed as low as this."""
    zero, units = settings.zero_optimization, states.units
    slots = zero.offload_optimizer.buffer_count + 2 if device.has_device_memory else 0
    size = slots * max((states.sent(name, deep) for name in units), default=0)
    if deep.optimizer is Tier.DISK:
        num_buffers = max(FEWEST_BUFFERS, zero.offload_optimizer.buffer_count)
        size += num_buffers * max((states.stepped(name, deep) for name in units), default=0)
        if deep.gradients is Tier.DISK:
            size += (num_buffers + NUM_SLOTS) * max((states.waiting(name, deep) for name in units), default=0)
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
    deeper = {tier: below.offload_device for tier, below in itertools.pairwise(Tier)}
    blocks = {"offload_param": deep.parameters, "offload_optimizer": deep.optimizer}
    ways = [lower[tier] for tier in Tier if tier in over]
    ways += [f'set {block}.device to "{deeper[t]}"' for block, t in blocks.items() if t in over and t in deeper]
    if deep.optimizer in over and deep.optimizer is not Tier.DEVICE and settings.shardwell.moments == "fp32":
        ways.append('set shardwell.moments to "8bit"')
    text = ", ".join([*ways, "or use more ranks."])
    return text[0].upper() + text[1:]


def _plan_as_asked(
    states: ModelStates, specs: list[UnitSpec], settings: Config, context: EngineContext, *, may_keep: bool
) -> OffloadPlan:
    """Place a share of the units where the offload blocks say, and keep the first ones above if that is left open.

    What is kept counts on the host, too, so that the same models are refused as with a ratio of 1.
    """
    mesh, device = context.roles.all.rank_group, context.device
    places, policy = _asked(states, settings), commit_policy(settings)
    kept = units_to_keep(states, places, specs, context) if may_keep and keeps_states(settings) else ()
    below = _below(_kept_above(places, kept))
    buffers = buffers_for(states, deepest(settings), settings, device)[Tier.HOST]
    needed = total(states.needs(name, place) for name, place in places.items())
    available = device.machine.free_host_bytes(mesh.local_world_size) / mesh.local_world_size
    if not device.has_device_memory:  # what is on the device takes of the same memory, and so do activations
        parameters = [parameter for one in specs for _, parameter in one.parameters]
        more = needed[Tier.DEVICE] + states.largest_unsharded() - held_bytes(parameters, device)[Tier.HOST]
        available = max(0.0, min(settings.shardwell.memory.host, 1.0) * available - max(0, more))
    if not device.is_meta:  # machines differ, and ranks publish units by what each of them does with an update
        available = context.roles.stage.all_reduce_min(available, "ROOM")
    free = {Tier.HOST: available}
    if settings.shardwell.gradients == "auto":
        places |= _with_gradients_above(states, places, free[Tier.HOST] - needed[Tier.HOST] - buffers)
        needed = total(states.needs(name, place) for name, place in places.items())
    speculating = set(below) if policy is CommitPolicy.SPECULATIVE else set()
    if _may_speculate(settings, device) and not needed[Tier.DISK]:
        speculating = _speculating(states, places, below, free[Tier.HOST] - needed[Tier.HOST] - buffers)
    _check_host(
        ShortageReport(states, places, settings, mesh), needed[Tier.HOST], buffers, bool(speculating), free[Tier.HOST]
    )
    _check_drives(ShortageReport(states, places, settings, mesh), needed[Tier.DISK], device.machine)
    commits = {name: CommitPolicy.SPECULATIVE if name in speculating else policy for name in below}
    return OffloadPlan(commits, _kept_above(places, kept), states, kept=kept)


def _with_gradients_above(
    states: ModelStates, places: dict[str, TierPlacement], free: float
) -> dict[str, TierPlacement]:
    """Return placements of units whose gradients need not wait on disk: they fit into half of the free bytes."""
    on_disk = {name: place for name, place in places.items() if place.gradient_tier is Tier.DISK}
    waiting = {name: states.waiting(name, place) for name, place in on_disk.items()}
    if not any(waiting.values()):
        return {}
    return {name: places[name]._replace(gradients=Tier.HOST) for name in _that_fit(waiting, _SHARE * free)}


def _may_speculate(settings: Config, device: Device) -> bool:
    """Return whether updates may be computed in other memory before the norm is known, if there is room for it."""
    is_free = settings.shardwell.commit == "auto" and commit_policy(settings) is CommitPolicy.AFTER_NORM
    return is_free and device.has_device_memory


def _speculating(states: ModelStates, places: dict[str, TierPlacement], below: list[str], free: float) -> set[str]:
    """Return the units whose speculative state fits into half of the free bytes."""
    sizes = {name: states.stepped(name, places[name]) + states.sent(name, places[name]) for name in below}
    return _that_fit(sizes, _SHARE * free)


@dataclass(frozen=True)
class ShortageReport:
    """The text of the error if states do not fit where they are asked to be stored."""

    states: ModelStates
    places: dict[str, TierPlacement]
    settings: Config
    rank_group: RankGroup

    def needs(self, num_bytes: int) -> str:
        """Describe the bytes of one rank, for this node and for each parameter."""
        numel = sum(sum(self.states.units[name].values()) for name, place in self.places.items() if place.depth)
        shares = self.rank_group.size if self.settings.zero_optimization.stage else 1
        each = f"{num_bytes * shares / max(1, numel):.3g} bytes for each of {numel:,} parameters"
        here = self.rank_group.local_world_size
        return (
            f"{human(num_bytes * here)} on this node: {each}, over {self.rank_group.size} rank(s), {here} of them here"
        )

    @property
    def ways(self) -> str:
        """What to change so that the states fit."""
        smaller = ', or set shardwell.moments to "8bit"' if self.settings.shardwell.moments == "fp32" else ""
        return f"lower offload_optimizer.ratio, use more ranks{smaller}."


def _check_host(short: ShortageReport, needed: int, buffers: int, speculates: bool, free: float) -> None:
    if any(place.depth for place in short.places.values()) and needed + buffers > free:
        slower = 'set shardwell.commit to "after_norm", ' if speculates else ""
        raise NoRoomError(
            f"state on the host and on disk needs more host memory than there is: {short.needs(needed)}, and "
            f"{human(buffers)} of staging buffers for each rank here. "
            f"{human(free * short.rank_group.local_world_size)} may be used. To fit, {slower}{short.ways}"
        )


def _check_drives(short: ShortageReport, needed: int, machine: Machine) -> None:
    paths = paths_of(short.settings)
    for path, part in bytes_by_path(needed * short.rank_group.local_world_size, paths, machine):
        found = machine.free_disk_bytes(path)
        if found is not None and part > found:
            raise NoRoomError(
                f"state on disk needs {short.needs(needed)}. {human(part)} of it go to {path}, where "
                f"{human(found)} are free. Free space there, name a path on another drive too, {short.ways}"
            )


def open_disk(settings: Config) -> DiskTier | None:
    """Return the disk tier, or None if nothing is stored on disk."""
    if not paths_of(settings):
        return None
    return DiskTier(paths_of(settings), AioSettings(**settings.aio.model_dump()))


def paths_of(settings: Config) -> list[Path]:
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
    left = float(zero.offload_optimizer.ratio) * sum(sizes.values())  # "auto" is a placement, not asked for
    for name in reversed(sizes):
        left -= sizes[name]
        if left < 0:
            break
        places[name] = asked
    if asked.parameters is Tier.DISK:
        above = _that_fit(states.shares(), zero.offload_param.max_in_cpu)
        places |= {name: places[name]._replace(parameters=Tier.HOST) for name in above}
    return places


def _kept_above(places: dict[str, TierPlacement], kept: tuple[str, ...]) -> dict[str, TierPlacement]:
    """Return placements with the optimizer state of some units on the device."""
    return places | {name: places[name]._replace(optimizer=Tier.DEVICE) for name in kept if name in places}


def _that_fit(sizes: dict[str, float] | dict[str, int], free: float) -> set[str]:
    """Return the first names whose bytes fit together."""
    chosen: set[str] = set()
    for name, size in sizes.items():
        free -= size
        if free < 0:
            break
        chosen.add(name)
    return chosen
