"""The report of a plan: memory of a rank by state, tier and moment, traffic of a step, and whether it fits."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from shardwell.memory import Tier
from shardwell.memory.machine import SimulatedMachine
from shardwell.memory.statistics import human
from shardwell.plan.simulation import MOMENTS, StepCosts, highest_moment
from shardwell.plan.step_time import StepTime
from shardwell.plan.time_report import assumptions, time_sentence, time_table, time_values

if TYPE_CHECKING:
    from rich.console import RenderableType

RESERVE = 0.06  # share of a device for the runtime, its libraries and fragmentation, which are not simulated
ASSUMPTIONS = (
    "nothing is clipped, no step is skipped, all ranks have the same shapes, and rows are whole sequences, not padded",
    "staging buffers whose number depends on time are counted as the most that there can be",
    f"{RESERVE:.0%} of a device are left to the runtime, its libraries and fragmentation; they are not simulated",
    "attention is a fused kernel, and updates on the device are fused kernels, as on a GPU",
)


@dataclass(frozen=True)
class TierVerdict:
    """The bytes that a tier needs and that it has, for one device, or for all ranks of a node."""

    tier: Tier
    needed: int
    free: float

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.needed <= self.free


@dataclass(frozen=True)
class PlanReport:
    """The memory, traffic and time that one step of a model takes on one rank of a machine."""

    name: str
    config: dict[str, Any]
    machine: SimulatedMachine
    costs: StepCosts
    notes: tuple[str, ...] = ()
    time: StepTime | None = None  # where the machine has speeds
    active_share: float = 1.0  # the parameters that a token meets over those of this rank, which has some experts

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.machine.ranks.size

    def peak(self, tier: Tier) -> int:
        """Return the most bytes that a rank has on a tier at a time."""
        return max((self.costs.peaks.get(f"{moment} {tier.value}", 0) for moment in MOMENTS), default=0)

    def at_rest(self, tier: Tier) -> int:
        """Return the bytes that a rank has on a tier between steps."""
        return sum(size for key, size in self.costs.rest.items() if key.endswith(f" {tier.value}"))

    @staticmethod
    def room_of(machine: SimulatedMachine) -> float | None:
        """Return the bytes of a device that a plan may use; None where devices have no memory of their own."""
        return machine.device_bytes * (1 - RESERVE) if machine.has_gpus else None

    @property
    def device_room(self) -> float:
        """The bytes of a device that a plan may use."""
        room = self.room_of(self.machine)
        return float("inf") if room is None else room

    def verdicts(self) -> list[TierVerdict]:
        """Return for each tier in use what is needed and what there is."""
        here = self.machine.local_world_size(self.num_ranks)
        found = []
        if self.machine.has_gpus:
            found.append(TierVerdict(Tier.DEVICE, self.peak(Tier.DEVICE), self.device_room))
        found.append(TierVerdict(Tier.HOST, here * self.peak(Tier.HOST), self.machine.host_bytes))
        found.append(TierVerdict(Tier.DISK, here * self.peak(Tier.DISK), self.machine.disk_bytes))
        return [one for one in found if one.needed]

    @property
    def fits(self) -> bool:
        """Whether all tiers have room."""
        return all(one.fits for one in self.verdicts())

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the figures are true under."""
        return (*ASSUMPTIONS, *self.notes, *(() if self.time is None else assumptions(self.time, self.machine)))

    def sentence(self) -> str:
        """Return in one sentence whether it fits, and by how much or where not."""
        if not self.fits:
            return f"It does not fit: {self.lack()}."
        room = [one for one in self.verdicts() if one.tier is Tier.DEVICE and one.free < 1 << 59]
        left = f", with {human(room[0].free - room[0].needed)} left on the device" if room else ""
        return f"It fits{left}."

    def lack(self) -> str:
        """Return in words what the tiers without room need and have."""
        return "it needs " + ", ".join(
            f"{human(one.needed)} on the {one.tier.value} where {human(one.free)} may be used"
            for one in self.verdicts()
            if not one.fits
        )

    # ------------------------------------------------------------------------------------------------- rendering

    def as_dict(self) -> dict[str, Any]:
        """Return everything as values of JSON; all sizes are bytes."""
        costs = asdict(replace(self.costs, instants={}))
        for name in ("at_moments", "at_step", "updated", "updates_on_device", "instants"):
            del costs[name]
        costs["largest_unit"] = dict(zip(("name", "bytes"), self.costs.largest_unit, strict=True))
        return {
            "model": self.name,
            "ranks": self.num_ranks,
            "ranks_per_node": self.machine.local_world_size(self.num_ranks),
            "fits": self.fits,
            "verdict": self.sentence(),
            "tiers": [
                {"tier": v.tier.value, "needed": v.needed, "free": int(v.free), "fits": v.fits} for v in self.verdicts()
            ],
            **costs,
            "time": None if self.time is None else time_values(self.time),
            "config": self.config,
            "assumptions": list(self.assumptions),
        }

    def json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    def _parts(self) -> list[RenderableType]:
        from rich.table import Table

        costs = self.costs
        memory = Table(title=f"{self.name}: memory of each of {self.num_ranks:,} ranks")
        for column in ("", *(tier.value for tier in Tier)):
            memory.add_column(column, justify="right" if column else "left")
        states = dict.fromkeys(key.rpartition(" ")[0] for key in costs.rest)
        for state in states:
            memory.add_row(state, *(human(costs.rest.get(f"{state} {tier.value}", 0)) for tier in Tier))
        memory.add_row("between steps", *(human(self.at_rest(tier)) for tier in Tier), end_section=True)
        for moment in MOMENTS:
            memory.add_row(f"peak in {moment}", *(human(costs.peaks[f"{moment} {tier.value}"]) for tier in Tier))
        at_peak = Table(title="the device at its peak")
        at_peak.add_column(f"in {highest_moment(costs.peaks)}")
        at_peak.add_column("bytes", justify="right")
        for state, size in costs.at_peak.items():
            at_peak.add_row(state, human(size))
        traffic = Table(title="received by a rank in one step")
        for column in ("", "calls", "inside the node", "between nodes"):
            traffic.add_column(column, justify="right" if column else "left")
        for kind, number in costs.calls.items():
            inside, between = (costs.traffic.get(f"{kind} {hop}", 0) for hop in ("inside", "between"))
            traffic.add_row(kind, f"{number:,}", human(inside), human(between))
        for name, size in costs.copies.items():
            if size:
                traffic.add_row(name, "", human(size), "")
        return [memory, at_peak, traffic, *([] if self.time is None else [time_table(self.time)])]

    def __str__(self) -> str:
        from shardwell.memory.statistics import render

        name, size = self.costs.largest_unit
        lines = [
            *(render(part) for part in self._parts()),  # type: ignore[arg-type]
            f"{self.costs.num_parameters:,} parameters, {self.costs.num_trainable:,} of them trained; the largest unit "
            f"is {name} with {human(size)} when it is unsharded.",
            *([] if self.time is None else [time_sentence(self.time)]),
            self.sentence(),
            *(f"Assumed: {one}." for one in self.assumptions),
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"
