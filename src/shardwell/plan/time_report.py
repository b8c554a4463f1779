"""The time of a step in words, as a table and as values of JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwell.memory.machine import SimulatedMachine
from shardwell.plan.step_time import StepTime

if TYPE_CHECKING:
    from rich.table import Table

_HOUR = 3600.0


def time_table(time: StepTime) -> Table:
    """Return a rich table of what a step takes by resource."""
    from rich.table import Table

    table = Table(title="time of one step")
    for column in ("", "works", "is waited for", "share of the step"):
        table.add_column(column, justify="right" if column else "left")
    for name, one in time.by_resource.items():
        share = one.exposed / time.seconds if time.seconds else 0.0
        table.add_row(name, said(one.busy), said(one.exposed), f"{share:.1%}")
    return table


def time_sentence(time: StepTime) -> str:
    """Return in words how long a step takes, and what it goes by for."""
    speed = "" if time.tokens_per_second is None else f", {time.tokens_per_second:,.0f} tokens a second"
    share = "" if time.mfu is None else f", MFU {time.mfu:.1%}"
    parts = ", ".join(f"{name} {share:.0%}" for name, share in time.bounds.items())
    return f"A step takes {said(time.seconds)}{speed}{share}. It is bound by {time.bound}: {parts}."


def cost_sentence(found: dict[str, Any]) -> str:
    """Return in words what `cost` found."""
    price = found.get("price_per_gpu_hour")
    money = "" if price is None else f", {found['price']:,.2f} at {price:g} for a GPU and hour"
    return (
        f"{found['tokens']:,} tokens take {found['steps']:,} steps, {found['hours']:,.2f} hours, "
        f"{found['gpu_hours']:,.1f} GPU hours{money}."
    )


def cost(time: StepTime, tokens: int, num_gpus: int, price: float | None) -> dict[str, Any]:
    """Return steps, hours, GPU hours and, with a price for a GPU and hour, the cost of a number of tokens."""
    steps = -(-tokens // time.tokens)
    hours = steps * time.seconds / _HOUR
    found = {"tokens": tokens, "steps": steps, "hours": hours, "gpu_hours": hours * num_gpus}
    return found if price is None else {**found, "price": hours * num_gpus * price, "price_per_gpu_hour": price}


def time_values(time: StepTime) -> dict[str, Any]:
    """Return everything as values of JSON; all times are seconds."""
    return {
        "seconds": time.seconds,
        "tokens": time.tokens,
        "tokens_per_second": time.tokens_per_second,
        "mfu": time.mfu,
        "bound": time.bound,
        "bounds": time.bounds,
        "by_resource": {name: asdict(one) for name, one in time.by_resource.items()},
        "bytes": time.num_bytes,
        "blocks_in_events": time.num_blocks,
        "events": [asdict(one) for one in time.events],
    }


def assumptions(time: StepTime, machine: SimulatedMachine) -> tuple[str, ...]:
    """Return what the times are true under."""
    speeds = machine.speeds
    if speeds is None:
        return ()
    blocks = (
        () if time.num_blocks is None else (f"up to {time.num_blocks} blocks were timed, and each more adds the same",)
    )
    return (
        *speeds.origins.values(),
        f"kernels over tensors with gaps write {speeds.strided_share * speeds.device_memory / 1e9:.3g} billion "
        "elements a second",
        f"fused attention reaches {speeds.attention_share:.0%} of the rate of matrix products",
        f"a kernel takes {speeds.kernel_seconds * 1e6:g} us at least, the host {speeds.launch_seconds * 1e6:g} us to "
        f"start one; a collective takes {speeds.inside_seconds * 1e6:g} us beside its bytes, and "
        f"{speeds.between_seconds * 1e6:g} us for each doubling of the nodes",
        f"updates on the host reach {speeds.out_of_place_share:.0%} of their rate where they are speculative, and "
        f"{speeds.eight_bit_share:.0%} with moments in 8 bits",
        "all ranks are equally fast, and the data is there when it is needed",
        *blocks,
    )


def said(seconds: float) -> str:
    """Return a time in words."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.2f} ms"
