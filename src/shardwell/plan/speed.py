"""What orders plans: the seconds of a token, or where time is not known, what a token moves.

Before time is simulated, a bound from below stands for it: the busiest of matrix products, links, copies and drives at
their full speeds, if all others hid behind it. Without speeds the order goes by bytes, from what is slowest: to and
from host and disk, between nodes, inside a node, each for a token, then whether blocks are computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwell.memory.statistics import human
from shardwell.plan.axes import ranks_along
from shardwell.plan.report import PlanReport
from shardwell.virtual_time.speeds import Speeds

WORTH_IT = 0.9  # of the time with exact collectives: quantised ones must be at least this much faster
ALIKE = 1.03  # a ratio up to which two plans are said to be alike


@dataclass(frozen=True, order=True)
class PlanSpeed:
    """The cost of a token on one rank; the smallest is the fastest. Ranks that train on the same rows share tokens."""

    seconds: float  # 0 where time is not known
    offloaded: float  # bytes to and from host and disk
    between: float  # bytes between nodes
    inside: float  # bytes inside a node
    recomputes: bool

    @classmethod
    def of(cls, report: PlanReport, sequence: int, *, recomputes: bool) -> PlanSpeed:
        """Return what a token of one rank costs in a plan."""
        shared = tokens_of_rows(report.config, report.num_ranks, sequence)
        hops = {
            hop: sum(size for key, size in report.costs.traffic.items() if key.endswith(f" {hop}"))
            for hop in ("between", "inside")
        }
        seconds = report_seconds(report) or _bound(report, shared, hops, recomputes=recomputes)
        tokens, copied = shared / ranks_of_batch(report.config), sum(report.costs.copies.values())
        return cls(seconds / tokens, copied / tokens, hops["between"] / tokens, hops["inside"] / tokens, recomputes)

    @property
    def cost(self) -> float:
        """One number for all of it: seconds, or bytes on the slowest links that are used."""
        return self.seconds or self.offloaded or self.between or self.inside


def tokens_of_rows(config: Mapping[str, Any], num_ranks: int, sequence: int) -> int:
    """Return the tokens of one rank's rows in a step; ranks along the axes pipe, sequence and tensor share them."""
    train = config.get("train_batch_size")
    if isinstance(train, int):
        return train * sequence * ranks_of_batch(config) // num_ranks
    accumulation = config.get("gradient_accumulation_steps")
    steps = accumulation if isinstance(accumulation, int) else 1
    return int(config["train_micro_batch_size_per_gpu"]) * steps * sequence


def ranks_of_batch(config: Mapping[str, Any]) -> int:
    """Return how many ranks train on the same rows: those along the axes pipe, sequence and tensor."""
    return math.prod(ranks_along(config, axis) for axis in ("pipe", "sequence", "tensor"))


def _bound(report: PlanReport, tokens: int, hops: Mapping[str, float], *, recomputes: bool) -> float:
    """Return seconds that a step takes at least; 0 without speeds."""
    speeds, costs = report.machine.speeds, report.costs
    if speeds is None:
        return 0.0
    fastest = matmul_rate(speeds, report.config)
    each = passes_of_token(costs.num_parameters, costs.num_trainable, recomputes=recomputes) * report.active_share
    tokens //= ranks_along(report.config, "sequence")
    per_node = report.machine.local_world_size(report.num_ranks)
    return max(
        tokens * each / fastest,
        hops["between"] / speeds.between,
        hops["inside"] / speeds.inside,
        costs.copies.get("to device", 0) / speeds.copy_up,
        costs.copies.get("to host", 0) / speeds.copy_down,
        per_node * costs.copies.get("disk read", 0) / speeds.disk_read,
        per_node * costs.copies.get("disk written", 0) / speeds.disk_write,
    )


def matmul_rate(speeds: Speeds, config: Mapping[str, Any]) -> float:
    """Return the most FLOP/s that matrix products reach."""
    dtype = "bf16" if (config.get("bf16") or {}).get("enabled") else "fp16"
    return max(rate for _, rate in speeds.matmul_in(dtype).points)


def passes_of_token(num_parameters: int, num_trainable: int, *, recomputes: bool) -> int:
    """Return the FLOPs of a token's matrix products, forward and backward."""
    return 2 * num_parameters * (2 if recomputes else 1) + 4 * num_trainable


def compared(one: PlanSpeed, best: PlanSpeed) -> str:
    """Return in words why a plan is not the best one."""
    if one.seconds and best.seconds:
        ratio = one.seconds / best.seconds
        words = f"{ratio:.2f} times the time of a token"
        if ratio * ALIKE < 1:
            return f"{words}, but quantised: not a tenth faster than an exact plan"
        return f"{words}, which is alike, and the first plan is simpler" if ratio < 1 else words
    for name, ours, theirs in (
        ("to and from host and disk", one.offloaded, best.offloaded),
        ("between nodes", one.between, best.between),
        ("inside the node", one.inside, best.inside),
    ):
        if ours > ALIKE * theirs:
            return f"a token moves {human(ours)} {name}, and {human(theirs)} with the first plan"
        if theirs > ALIKE * ours:
            return f"a token moves {human(ours)} {name}, and {human(theirs)} with the first plan, which is exact"
    if one.recomputes and not best.recomputes:
        return "blocks are computed twice"
    return "as fast, as far as bytes tell"


def report_seconds(report: PlanReport) -> float:
    """Return the seconds of a step; 0 where they are not known."""
    return 0.0 if report.time is None else report.time.seconds
