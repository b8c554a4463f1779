"""What other stages, tiers, codecs, ranks, batches and sequences would take: the forms that a page is sent with.

Forms hold where runs have the same buffers in the same order: on several nodes, or in one, and where units of a single
parameter can be divided evenly over the ranks, or cannot. The ranks of the plan decide which of them is exported; all
else is named with the command to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import log2
from typing import Any

from shardwell.config import load
from shardwell.memory.machine import SimulatedMachine
from shardwell.plan.estimate import fewest_blocks
from shardwell.plan.forms import Forms, StructureClass, compare, compare_all_blocks, make_forms
from shardwell.plan.models import PlanModel
from shardwell.plan.simulation import FEWEST_STEPS, BlockModel
from shardwell.plan.terms import SEQUENCE, NoFormError, Point
from shardwell.sharding.layout import TensorSpec, make_layout

Place = tuple[int, int]  # nodes, and ranks of a node

_CODECS = {"none": (False, False), "weights": (True, False), "both": (True, True)}
_NUM_POINTS = 3  # that forms are made from: ranks near those of the plan or, if none hold there, of these
_PLACES = (  # nodes and ranks of a node
    (2, 4), (4, 2), (8, 4), (2, 8), (4, 8), (2, 2), (2, 3), (3, 2), (5, 3), (3, 5), (7, 3)
)  # fmt: skip
_NODES = tuple(2**power for power in range(8))
_LOCAL = (2, 4, 8, 16)
_AWAY = 4  # blocks: from the depths that forms are made from to those at which they are compared


@dataclass(frozen=True)
class Structure:
    """A stage, the tiers of optimizer state and parameters, and what is quantised."""

    stage: int
    optimizer: str = "none"  # as `device` of an offload block
    parameters: str = "none"
    codec: str = "none"

    @property
    def key(self) -> str:
        """The name of the class on the page."""
        return f"{self.stage} {self.optimizer} {self.parameters} {self.codec}"

    def zero(self, nvme_path: str = "/nvme") -> dict[str, Any]:
        """Return the keys of `zero_optimization` that make the class."""
        weights, gradients = _CODECS[self.codec]
        found: dict[str, Any] = {"stage": self.stage}
        for name, device in (("offload_optimizer", self.optimizer), ("offload_param", self.parameters)):
            if device != "none":
                found[name] = {"device": device} | ({"nvme_path": nvme_path} if device == "nvme" else {})
        if self.optimizer == "cpu" and self.parameters == "none":  # what memory allows to keep follows no form
            found["offload_optimizer"]["ratio"] = 1.0
        if self.parameters == "nvme":
            found["offload_param"]["max_in_cpu"] = 0
        return found | {
            name: True
            for name, is_on in (("zero_quantized_weights", weights), ("zero_quantized_gradients", gradients))
            if is_on
        }


STRUCTURES = (
    *(Structure(stage) for stage in (3, 2, 1, 0)),
    *(Structure(3, codec=codec) for codec in ("weights", "both")),
    *(Structure(stage, "cpu") for stage in (2, 3)),
    Structure(3, "nvme"),
    Structure(3, "cpu", "cpu"),
    Structure(3, "nvme", "nvme"),
)
_KEYS = ("stage", "offload_optimizer", "offload_param", "zero_quantized_weights", "zero_quantized_gradients")


@dataclass(frozen=True)
class WhatIf:
    """Forms by class, where they may be asked, and why a class has none."""

    begin: Structure
    layers: int
    ranks: list[tuple[int, int, bool]]  # nodes, ranks of a node, and whether the forms are for them
    forms: dict[Structure, Forms] = field(default_factory=dict)
    # nodes and ranks of a node at which the forms of a class were compared with a simulation, and hold
    places: dict[Structure, list[Place]] = field(default_factory=dict)
    refused: dict[Structure, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """A plan, whose classes are asked for."""

    model: PlanModel
    config: dict[str, Any]
    machine: SimulatedMachine
    sequence: int
    recomputes: bool

    def what_if(self, structures: tuple[Structure, ...] = STRUCTURES, said: Callable[[str], None] = print) -> WhatIf:
        """Return the forms of all classes that hold; raise where the plan itself is outside of what forms are for."""
        micro_batch: int = self.config["train_micro_batch_size_per_gpu"]
        ranks = self.machine.ranks
        per_node = self.machine.local_world_size(ranks.size)
        block = self.model.make(micro_batch, self.sequence, self.recomputes)
        if not isinstance(block, BlockModel):
            raise NoFormError("a model of a function of your own is planned at one depth only")
        if ranks.size == 1 or ranks.size % per_node or self.sequence % SEQUENCE:
            raise NoFormError(
                f"forms are for 2 ranks or more on full nodes and sequences of a multiple of {SEQUENCE} tokens"
            )
        numels = self._single_parameters(Point(1, 2, 1, SEQUENCE, 4))
        wanted = _evenness(numels, ranks.size)
        if len(wanted) > 1:
            raise NoFormError(
                f"some units of a single parameter can be divided evenly over {ranks.size} ranks, not all"
            )
        nodes = ranks.size // per_node

        def is_even(place: Place) -> bool:
            return _evenness(numels, place[0] * place[1]) == wanted

        offered = [
            (one, local, (one > 1) == (nodes > 1) and one * local > 1 and is_even((one, local)))
            for one, local in _offered(nodes, per_node)
        ]
        made_from = self._made_from(offered, [one for one in _places(nodes) if is_even(one)])
        if not made_from:
            raise NoFormError("too few numbers of ranks divide the units of a single parameter as these ranks do")
        found = WhatIf(self._begin(), block.layers, offered)
        for structure in dict.fromkeys((found.begin, *structures)):
            said(f"stage {structure.stage}, optimizer {structure.optimizer}, parameters {structure.parameters}, "
                 f"quantised {structure.codec}")  # fmt: skip
            for places in made_from:
                try:
                    forms = self._forms(structure, places, (nodes, per_node), block.layers)
                except NoFormError as error:
                    found.refused[structure] = str(error)
                    continue
                found.refused.pop(structure, None)
                possible = [(one, local) for one, local, is_in in offered if is_in]
                found.places[structure] = self._holding(structure, forms, (nodes, per_node), possible, block.layers)
                found.forms[structure] = forms
                break
        return found

    def _made_from(self, offered: list[tuple[int, int, bool]], others: list[Place]) -> list[list[Place]]:
        """Return the ranks to make forms from: those near the plan, first fewer ones, whose shards are as large."""
        size = self.machine.ranks.size
        near = sorted(
            (place for *place, is_in in offered if is_in),
            key=lambda place: (place[0] * place[1] > size, abs(log2(place[0] * place[1] / size))),
        )
        both = others[:_NUM_POINTS], [(nodes, local) for nodes, local in near[:_NUM_POINTS]]
        return [places for places in both if len(places) == _NUM_POINTS]

    def _begin(self) -> Structure:
        """Return the class of the plan itself, or that of its stage if its own is not among them."""
        zero = self.config.get("zero_optimization", {})
        tiers = [(zero.get(name) or {}).get("device", "none") for name in ("offload_optimizer", "offload_param")]
        flags = bool(zero.get("zero_quantized_weights")), bool(zero.get("zero_quantized_gradients"))
        codec = next((name for name, values in _CODECS.items() if values == flags), "none")
        exact = Structure(zero.get("stage", 0), tiers[0], tiers[1], codec)
        return exact if exact in STRUCTURES else Structure(exact.stage)

    def settings(self, structure: Structure) -> dict[str, Any]:
        """Return the plan's configuration with the keys of a class."""
        loaded = load(self.config, world_size=self.machine.ranks.size)
        kept = {key: value for key, value in self.config.items() if key != "train_batch_size"}
        zero = {key: value for key, value in kept.get("zero_optimization", {}).items() if key not in _KEYS}
        steps = loaded.gradient_accumulation_steps
        return {**kept, "gradient_accumulation_steps": steps, "zero_optimization": {**zero, **structure.zero()}}

    def structure_class(self, structure: Structure) -> StructureClass:
        """Return what can be simulated at any point."""
        config = self.settings(structure)

        def model(batch: int, sequence: int) -> BlockModel:
            made = self.model.make(batch, sequence, self.recomputes)
            assert isinstance(made, BlockModel)
            return made

        return StructureClass(model, lambda _: config, fewest_blocks(config))

    def _single_parameters(self, point: Point) -> list[int]:
        _, recording = self.structure_class(Structure(2)).run(point, FEWEST_STEPS, touching=1)
        return [numel for groups in recording.groups.values() for numel, parameters in groups if parameters == 1]

    def _forms(self, structure: Structure, places: list[Place], plan: Place, layers: int) -> Forms:
        """Return the forms of a class, compared at the plan's own ranks."""
        found = self.structure_class(structure)
        batch = self.config["train_micro_batch_size_per_gpu"]
        forms = make_forms(found, places, [])
        point = Point(*plan, batch, self.sequence, found.first_depth + _AWAY)
        compare_all_blocks(found, forms, point, compare(found, forms, point), layers)
        return forms

    def _holding(
        self, structure: Structure, forms: Forms, plan: Place, offered: list[Place], layers: int
    ) -> list[Place]:
        """Return the ranks that forms hold at: with others, more or fewer small shards may be updated at a time.

        They were compared at those of the plan. Beyond ranks at which they do not hold none are tried.
        """
        found, held = self.structure_class(structure), [plan]
        at = offered.index(plan)
        for direction in (offered[at + 1 :], offered[:at][::-1]):
            for place in direction:
                point = Point(*place, 2, self.sequence, found.first_depth)
                try:
                    costs = compare(found, forms, point, FEWEST_STEPS, touching=1)
                    compare_all_blocks(found, forms, point, costs, layers)
                except NoFormError:
                    break
                held.append(place)
        return sorted(held)


def _places(nodes: int) -> Iterator[Place]:
    yield from _PLACES if nodes > 1 else ((1, count) for count in (2, 4, 8, 3, 5, 6, 7))


def _offered(nodes: int, per_node: int) -> list[Place]:
    """Return the nodes and ranks of a node that the page offers."""
    if nodes == 1:
        return [*((1, count) for count in sorted({*_LOCAL, per_node})), (2, per_node)]
    return [(count, per_node) for count in sorted({*_NODES, nodes})]


def _evenness(numels: list[int], ranks: int) -> set[bool]:
    """Return whether these units can be divided over ranks without padding."""
    return {make_layout([TensorSpec("", (numel,))], ranks).padded == numel for numel in numels} or {True}
