"""The first units, whose optimizer state stays on the device although the configuration sends it to the host.

Backward brings their gradients last and the next forward needs their parameters first, so that their updates on the
host are those that the device waits for. Where gradients are clipped, all updates on the host begin when the norm is
known, and the device waits for each that does not end within the forward of the units before it. `initialize` knows no
inputs: how long a step computes, and how much memory it takes, is not known. So the rule is one of bytes alone:

- a share of the device bytes that the states leave free, so that activations have the rest;
- a share of the trained parameters: what the host updates of the others is ready when a forward comes to them.

It is for those who ask for the host and nothing else: a `ratio` or a `placement` in the configuration decides instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwell.config import Config, leaves_open
from shardwell.memory import Tier
from shardwell.memory.machine import SimulatedBlocks
from shardwell.offload.budget import held_bytes
from shardwell.sharding import EngineContext, UnitSpec
from shardwell.sharding.model_states import ModelStates, TierPlacement

ROOM = 1 / 4  # the most of the free device bytes
MOST = 7 / 8  # the most of the trained parameters


def keeps_states(settings: Config) -> bool:
    """Return whether a configuration leaves it open which optimizer state stays on the device.

    Parameters below the device are to leave it empty, and 8-bit moments would be fp32 there: other numbers.
    """
    is_below = settings.zero_optimization.offload_param.device != "none"
    return len(leaves_open(settings)) == 2 and not is_below and settings.shardwell.moments == "fp32"


def units_to_keep(
    states: ModelStates, places: Mapping[str, TierPlacement], specs: Sequence[UnitSpec], context: EngineContext
) -> tuple[str, ...]:
    """Return the first units whose optimizer state stays on the device; all ranks with these units get the same.

    `places` are those of the configuration. Where a simulation has few of a model's blocks, the limits are those of all
    of them. Memory of the model's own parameters counts as free, because it is freed as soon as the units are built.
    """
    device = context.device
    if not device.has_device_memory:
        return ()
    below = {name: states.needs(name, place)[Tier.DEVICE] for name, place in places.items()}
    higher = {name: place._replace(optimizer=Tier.DEVICE) for name, place in places.items()}
    above = {name: states.needs(name, place)[Tier.DEVICE] for name, place in higher.items()}
    trained, whole = states.trained(), _WholeModel(specs, device.machine.blocks)
    held = held_bytes((parameter for one in specs for _, parameter in one.parameters), device)
    free = device.available_bytes() + held[Tier.DEVICE] - whole.total(below) - states.largest_unsharded()
    if not device.is_meta:
        free = context.roles.stage.all_reduce_min(free, "ROOM")
    room, most = ROOM * free, MOST * whole.total(trained)
    kept: list[str] = []
    for name in places:
        room -= whole.of(name, above[name] - below[name])
        most -= whole.of(name, trained[name])
        if min(room, most) < 0:
            break
        kept.append(name)
    return tuple(kept) if any(trained[name] for name in kept) else ()


class _WholeModel:
    """The sizes of units in the whole model, where few of its blocks are simulated.

    A unit outside the blocks has small parameters of all of them; each block is one of several that are alike.
    """

    def __init__(self, specs: Sequence[UnitSpec], blocks: SimulatedBlocks | None) -> None:
        self._blocks = blocks
        self._growth: dict[str, float] = {}
        if blocks is None:
            return
        for one in specs:
            sizes = [(name, parameter.numel()) for name, parameter in one.parameters]
            if not blocks.has(one.name):
                self._growth[one.name] = blocks.on_all(sizes) / max(1, sum(size for _, size in sizes))

    def of(self, name: str, size: int) -> float:
        """Return the size of one unit."""
        return size * self._growth.get(name, 1.0)

    def total(self, sizes: Mapping[str, int]) -> float:
        """Return the size of all units."""
        grown = [(name, round(self.of(name, size))) for name, size in sizes.items()]
        return sum(size for _, size in grown) if self._blocks is None else self._blocks.on_all(grown)
