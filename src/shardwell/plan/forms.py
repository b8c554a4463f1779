"""Forms: what a rank of one structure class holds and receives, as trees over ranks, batch, sequence and depth.

A structure class is a stage, tiers and codecs: runs of it have the same buffers in the same order, of other sizes. It
is simulated at three points and at two depths; every buffer becomes a term (`plan/terms.py`), every instant a sum of
terms, and a peak the largest of those instants that no others exceed. The forms are then compared with simulations that
they were not made from, and a class whose forms are wrong by one byte is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from shardwell.memory import StateKind, Tier
from shardwell.memory.machine import SimulatedMachine, SimulatedRanks
from shardwell.plan.estimate import record
from shardwell.plan.recording import ACTIVATIONS, Change, Recording
from shardwell.plan.simulation import FEWEST_STEPS, MOMENTS, STEPS, BlockModel, StepCosts
from shardwell.plan.terms import NoFormError, Point, Sizes, Terms, shard_tree
from shardwell.plan.trees import Tree, as_json, evaluate, largest, plus, times
from shardwell.plan.update_chunks import UpdateChunks

Parts = dict[str, Terms]  # by state

_SHARD = "shard{}".format
_NEAR = 1e-9


@dataclass(frozen=True)
class Forms:
    """Trees of one structure class."""

    shards: dict[str, Tree]  # variables, in order: the elements of a rank's shard of each kind of group
    rest: dict[str, Tree]  # "state tier": bytes between steps
    peaks: dict[str, list[dict[str, Tree]]]  # "moment tier": bytes by state at each instant that may be the peak
    traffic: dict[str, Tree]  # "kind hop": bytes received in a step

    def values(self, point: Point) -> dict[str, int]:
        """Return the values of all variables at a point."""
        values = point.values()
        for name, tree in self.shards.items():
            values[name] = evaluate(tree, values)
        return values

    def at(self, point: Point) -> dict[str, dict[str, int]]:
        """Return what a report of a simulation at a point has: `rest`, `peaks` and `traffic`, without zeros."""
        values = self.values(point)
        totals = {
            key: evaluate(largest(*(plus(*parts.values()) for parts in instants)), values)
            for key, instants in self.peaks.items()
        }
        found = {
            "rest": {key: evaluate(tree, values) for key, tree in self.rest.items()},
            "peaks": totals,
            "traffic": {key: evaluate(tree, values) for key, tree in self.traffic.items()},
        }
        return {name: {key: size for key, size in sizes.items() if size} for name, sizes in found.items()}

    def json(self) -> dict[str, Any]:
        """Return the trees as values of JSON."""
        return {
            "shards": {name: as_json(tree) for name, tree in self.shards.items()},
            "rest": {key: as_json(tree) for key, tree in self.rest.items()},
            "peaks": {
                key: [{state: as_json(tree) for state, tree in parts.items()} for parts in instants]
                for key, instants in self.peaks.items()
            },
            "traffic": {key: as_json(tree) for key, tree in self.traffic.items()},
        }


def simulated_sizes(costs: StepCosts) -> dict[str, dict[str, int]]:
    """Return the numbers of a simulation that forms have, without zeros."""
    found = {"rest": costs.rest, "peaks": costs.peaks, "traffic": costs.traffic}
    return {name: {key: size for key, size in sizes.items() if size} for name, sizes in found.items()}


@dataclass(frozen=True)
class StructureClass:
    """A family of simulations: a model for each batch and sequence, and a configuration for each node."""

    model: Callable[[int, int], BlockModel]  # of batch and sequence
    config: Callable[[int], dict[str, Any]]  # of the ranks of a node
    first_depth: int

    def run(self, point: Point, steps: int = STEPS, *, touching: int = 0) -> tuple[StepCosts, Recording]:
        """Simulate one point; the last step is the same if first ones only touch parameters."""
        machine = SimulatedMachine(ranks=SimulatedRanks(0, point.ranks, point.per_node))
        model = self.model(point.batch, point.sequence)
        built, config = model.build(point.depth), self.config(point.per_node)
        return record(built, config, machine, model.inputs, steps, touching=touching)


@dataclass(frozen=True)
class _Trace:
    """The changes as terms, and the instants, from which forms are made at one depth."""

    start: list[tuple[Change, Terms]]
    changes: list[tuple[Change, Terms]]
    recording: Recording
    traffic: dict[str, Terms]


def make_forms(structure: StructureClass, points: Sequence[tuple[int, int]], unseen: Sequence[Point]) -> Forms:
    """Return the forms of a class, or raise if there are none that hold.

    Args:
        structure: The class.
        points: Nodes and ranks of a node at three points, which the forms are made from.
        unseen: Points at which the forms are compared with simulations.
    """
    depths = structure.first_depth, structure.first_depth + 1
    batches = ((1, 256), (3, 256), (2, 768))
    places = [[Point(*ranks, *batch, depth) for ranks, batch in zip(points, batches, strict=True)] for depth in depths]
    runs = [[structure.run(point, FEWEST_STEPS, touching=1)[1] for point in row] for row in places]
    shards, names = _groups([row[0] for row in runs], depths)
    by_depth = _constants(runs, depths)
    traces = [
        _trace(found, Sizes(_values(row, shards), by_depth[at]), list(shards), names[at])
        for at, (found, row) in enumerate(zip(runs, places, strict=True))
    ]
    forms = _Joined(depths).forms(traces, shards)
    for point in unseen:
        compare(structure, forms, point)
    return forms


def compare_all_blocks(structure: StructureClass, forms: Forms, point: Point, few: StepCosts, layers: int) -> None:
    """Raise if forms do not hold for all blocks at a point, of which a simulation of few blocks has these costs.

    Small blocks are bundled, and small shards are stepped together, until there are enough of them.
    """
    ((block, number),) = Counter(few.updated).most_common(1)
    chunks = UpdateChunks(point.depth, few.updated, (*few.updated, block))
    if number < point.depth or (few.updates_on_device and not chunks.is_plain(layers)):
        compare(structure, forms, replace(point, depth=layers), FEWEST_STEPS, touching=FEWEST_STEPS)


def compare(
    structure: StructureClass, forms: Forms, point: Point, steps: int = STEPS, *, touching: int = 0
) -> StepCosts:
    """Raise if forms are not what a simulation at a point takes, to the byte; return what it takes.

    If blocks compute nothing in all steps, the device's peaks in forward and backward are not compared.
    """
    costs, _ = structure.run(point, steps, touching=touching)
    expected, found = simulated_sizes(costs), forms.at(point)
    if touching >= steps:
        for moment in MOMENTS[:2]:
            expected["peaks"].pop(f"{moment} device", None)
            found["peaks"].pop(f"{moment} device", None)
    if expected != found:
        raise NoFormError(f"at {point} {_difference(expected, found)}")
    return costs


def _difference(expected: dict[str, dict[str, int]], found: dict[str, dict[str, int]]) -> str:
    for name, sizes in expected.items():
        for key in {**sizes, **found[name]}:
            if sizes.get(key) != found[name].get(key):
                ours, theirs = found[name].get(key, 0), sizes.get(key, 0)
                return f"the forms have {ours:,} bytes of {name} {key}, and a simulation has {theirs:,}"
    raise AssertionError("nothing differs")


# --------------------------------------------------------------------------------------------------------------- groups


def _groups(
    recordings: Sequence[Recording], depths: tuple[int, int]
) -> tuple[dict[str, Tree], list[dict[str, list[str]]]]:
    """Return the shard of each kind of group, and at each depth the kinds that a unit has.

    Kinds are told apart by their elements. A group whose elements grow with the depth, such as that of small persistent
    parameters, has so many for each block.
    """
    counts = [list(dict.fromkeys(numel for groups in one.groups.values() for numel, _ in groups)) for one in recordings]
    if len(counts[0]) != len(counts[1]):
        raise NoFormError(f"units have {len(counts[0])} kinds of groups, and with another block {len(counts[1])}")
    shards: dict[str, Tree] = {}
    for place, (first, second) in enumerate(zip(*counts, strict=True)):
        numel = plus(first - (second - first) * depths[0], times(second - first, "depth"))
        shards[_SHARD(place)] = shard_tree(numel)
    names = []
    for one, found in zip(recordings, counts, strict=True):
        names.append({unit: [_SHARD(found.index(numel)) for numel, _ in groups] for unit, groups in one.groups.items()})
    return shards, names


# --------------------------------------------------------------------------------------------------------------- traces


def _values(points: Sequence[Point], shards: dict[str, Tree]) -> list[dict[str, int]]:
    found = []
    for point in points:
        known = point.values()
        found.append(known | {name: evaluate(tree, known) for name, tree in shards.items()})
    return found


def _constants(runs: Sequence[Sequence[Recording]], depths: tuple[int, int]) -> list[dict[int, Tree]]:
    """Return for each depth the sizes that depend on the depth alone, as trees over it.

    They are those that all runs of one depth have and no run of the other; both depths have them in the same order.
    """
    sizes: list[list[int]] = []
    for row in runs:
        same = zip(*([abs(change.size) for change in run.changes] for run in row), strict=False)
        sizes.append(list(dict.fromkeys(one[0] for one in same if len(set(one)) == 1)))
    first, second = ([size for size in sizes[at] if size not in sizes[1 - at]] for at in (0, 1))
    pairs = list(zip(first, second, strict=True)) if len(first) == len(second) else _growing(first, second, depths[0])
    trees = [plus(a - (b - a) * depths[0], times(b - a, "depth")) for a, b in pairs]
    return [{pair[at]: tree for pair, tree in zip(pairs, trees, strict=True)} for at in (0, 1)]


def _growing(first: list[int], second: list[int], depth: int) -> list[tuple[int, int]]:
    """Return the sizes that grow with the depth, in order: others are of one depth by chance, as two may be equal."""
    pairs, begin = [], 0
    for size in first:
        for place, other in enumerate(second[begin:], begin):
            if 0 < (other - size) * depth <= size:
                pairs.append((size, other))
                begin = place + 1
                break
    return pairs


def _trace(runs: Sequence[Recording], sizes: Sizes, names: list[str], units: dict[str, list[str]]) -> _Trace:
    """Turn the changes of aligned runs into terms."""
    known_terms: dict[tuple[Any, ...], Terms] = {}
    first = runs[0]
    kinds = [[(one.state, one.tier, one.unit, one.size > 0) for one in run.changes] for run in runs]
    if any(other != kinds[0] for other in kinds) or len({run.begin for run in runs}) > 1:
        raise NoFormError("the buffers of a step are others at other ranks or batches")
    found = []
    for same in zip(*(run.changes for run in runs), strict=True):
        change, at = same[0], tuple(abs(one.size) for one in same)
        is_staging = change.state == StateKind.STAGING.value
        key = change.state == ACTIVATIONS, is_staging, change.unit, at
        if key not in known_terms:
            own = list(dict.fromkeys(units.get(change.unit, ())))
            known_terms[key] = (
                sizes.activation(at, names)
                if change.state == ACTIVATIONS
                else sizes.buffer(at, own, names, is_staging=is_staging)
            )
        sign = 1 if change.size > 0 else -1
        found.append((change, {tree: sign * factor for tree, factor in known_terms[key].items()}))
    traffic: dict[str, Counter[Tree]] = {}
    known_traffic: dict[tuple[int, ...], Terms] = {}
    if any([one[:2] for one in run.received] != [one[:2] for one in first.received] for run in runs):
        raise NoFormError("the collectives of a step are others at other ranks")
    for received in zip(*(run.received for run in runs), strict=True):
        kind, hop, _ = received[0]
        total = traffic.setdefault(f"{kind} {hop}", Counter())
        at = tuple(size for *_, size in received)
        if at not in known_traffic:
            known_traffic[at] = sizes.received(at, names)
        for tree, factor in known_traffic[at].items():
            total[tree] += factor
    return _Trace(found[: first.begin], found[first.begin :], first, {key: dict(one) for key, one in traffic.items()})


def _instants(trace: _Trace, tier: Tier) -> Iterator[tuple[str, Parts]]:
    """Yield for each instant at which a tier may have its peak the moment and what is there."""
    now: dict[str, Counter[Tree]] = {}
    for change, terms in trace.start:
        _add(now, change, terms, tier)
    looks = {look - trace.recording.begin for look in trace.recording.looks}
    moments = {number - trace.recording.begin: name for name, number in trace.recording.moments}
    moment = ""
    for number in range(len(trace.changes) + 1):
        begins = number in moments
        if begins:
            moment = moments[number]
        if number:
            change, _ = trace.changes[number - 1]
            grows = change.tier is tier and change.size > 0
        else:
            grows = False
        if begins or (grows and tier is not Tier.DEVICE) or (tier is Tier.DEVICE and number in looks):
            yield moment, {state: {tree: count for tree, count in one.items() if count} for state, one in now.items()}
        if number < len(trace.changes):
            _add(now, *trace.changes[number], tier)


def _add(now: dict[str, Counter[Tree]], change: Change, terms: Terms, tier: Tier) -> None:
    if change.tier is tier:
        total = now.setdefault(change.part, Counter())
        for tree, factor in terms.items():
            total[tree] += factor


# ---------------------------------------------------------------------------------------------------------------- peaks


def _highest(instants: list[Parts]) -> list[Parts]:
    """Return those instants that may be the highest: no other, and no mixture of two, has as much of all terms."""
    trees = list(dict.fromkeys(tree for parts in instants for terms in parts.values() for tree in terms))
    place = {tree: number for number, tree in enumerate(trees)}
    table = np.zeros((len(instants), len(trees)), dtype=np.int64)
    for number, parts in enumerate(instants):
        for terms in parts.values():
            for tree, count in terms.items():
                table[number, place[tree]] += count
    _, first = np.unique(table, axis=0, return_index=True)
    kept = sorted(int(one) for one in first)
    rows = table[kept]  # which all differ
    kept = [one for one in kept if int((rows >= table[one]).all(axis=1).sum()) == 1]
    for one in list(kept):
        if _is_below_any(table[one], table[[other for other in kept if other != one]]):
            kept.remove(one)
    return [instants[one] for one in kept]


def _is_below_any(one: Any, others: Any) -> bool:
    """Return whether a mixture of any two of other instants has as much of all terms as one."""
    lacks = (others < one).astype(np.float32)
    places = np.nonzero(np.triu(lacks @ lacks.T == 0, 1))  # of each term one of the two has enough
    gap, needed = others[places[0]] - others[places[1]], one - others[places[1]]
    share = needed / np.where(gap == 0, 1, gap)
    low = np.where(gap > 0, share, 0.0).max(axis=1, initial=0.0)
    high = np.where(gap < 0, share, 1.0).min(axis=1, initial=1.0)
    may_be = (low <= high + _NEAR) & ~((gap == 0) & (needed > 0)).any(axis=1)
    return any(_is_below(one, others[a], others[b]) for a, b in np.transpose(places)[may_be])


def _is_below(one: Any, first: Any, second: Any) -> bool:
    """Return whether a mixture of two instants has as much of all terms as one; a mixture is never above both.

    Blocks in the middle are exact mixtures of those at the ends, which floats may miss by a bit.
    """
    gap, needed = first - second, one - second
    shares = [(Fraction(int(part), int(whole)), whole > 0) for part, whole in zip(needed, gap, strict=True) if whole]
    least = max([Fraction(0), *(share for share, is_rising in shares if is_rising)])
    return least <= min([Fraction(1), *(share for share, is_rising in shares if not is_rising)])


# --------------------------------------------------------------------------------------------------------------- depths


@dataclass(frozen=True)
class _Joined:
    """Terms at two depths as trees over the depth: every factor is a constant and an amount for each block."""

    depths: tuple[int, int]

    def forms(self, traces: Sequence[_Trace], shards: dict[str, Tree]) -> Forms:
        peaks: dict[str, list[dict[str, Tree]]] = {}
        rest: dict[str, Tree] = {}
        for tier in Tier:
            instants = [list(_instants(trace, tier)) for trace in traces]
            for moment in MOMENTS:
                found = [_highest([parts for name, parts in one if name == moment]) for one in instants]
                if len(found[0]) != len(found[1]):
                    raise NoFormError(
                        f"the {tier.value} has {len(found[0])} or {len(found[1])} peaks in {moment}, by depth"
                    )
                peaks[f"{moment} {tier.value}"] = [self._parts(*pair) for pair in zip(*found, strict=True)]
            last: list[Parts] = []
            for trace in traces:
                now: dict[str, Counter[Tree]] = {}
                for change, terms in (*trace.start, *trace.changes):
                    _add(now, change, terms, tier)
                last.append({state: dict(terms) for state, terms in now.items() if state != ACTIVATIONS})
            rest |= {f"{state} {tier.value}": tree for state, tree in self._parts(*last).items()}
        traffic = self._parts(traces[0].traffic, traces[1].traffic)
        return Forms(shards, {key: tree for key, tree in rest.items() if tree != 0}, peaks, traffic)

    def _parts(self, first: Parts, second: Parts) -> dict[str, Tree]:
        return {state: self._sum(first.get(state, {}), second.get(state, {})) for state in {**first, **second}}

    def _sum(self, first: Terms, second: Terms) -> Tree:
        parts = []
        for tree in {**first, **second}:
            begin, growth = first.get(tree, 0), second.get(tree, 0) - first.get(tree, 0)
            parts.append(times(plus(begin - growth * self.depths[0], times(growth, "depth")), tree))
        return plus(*parts)
