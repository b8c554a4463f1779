"""Autotuning of ZeRO++: features are measured on the links of this job, and turned on if they save time.

`zero_quantized_weights` (qwZ), `zero_quantized_gradients` (qgZ) and `zero_hpz_partition_size` (hpZ) may be "auto". Each
is measured with the collectives of training, on a probe as large as the largest shard that is transferred or as time
allows, and turned on if it takes less than 0.9 of the time without it. The time of the slowest rank counts, so that all
ranks decide alike.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardwell.config import Config
from shardwell.kernels.quantize import BLOCK, Codec
from shardwell.memory import StateKind
from shardwell.memory.statistics import human
from shardwell.parallel import TrafficKind, Work
from shardwell.sharding import EngineContext
from shardwell.sharding.model_states import GroupKey as GroupKind
from shardwell.sharding.model_states import ModelStates

WORTH_IT = 0.9  # of the time without the feature
_MOST = 1 << 20  # elements of a shard
_FIRST = 1 << 16  # elements of all shards together
_GROWTH = 4  # factor from a probe that takes little time to the next
_TIMEOUT = 0.1  # seconds for a probe that is not quantised
_ROUNDS = 3
_ROOM = 0.5  # share of the free device memory, for secondary shards
_TOKEN, _PROBE = "TRIAL", "(trial)"
_BLOCK = "zero_optimization"
WEIGHTS, GRADIENTS, COPIES = "zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size"

Move = Callable[[Tensor], Work]  # a collective on a flat buffer


class AutotuneChoice(NamedTuple):
    """The value that replaces "auto", and the reason."""

    value: bool | int
    why: str


class Timing(NamedTuple):
    """The seconds of a collective without the feature, and with it."""

    without: float
    with_it: float

    @property
    def are_worth_it(self) -> bool:
        """Whether the feature saves enough time to be turned on."""
        return self.with_it < WORTH_IT * self.without

    def told(self, move: str, with_it: str, without: str) -> str:
        """Return the times as text."""
        return f"a {move} takes {1e3 * self.with_it:.2f} ms {with_it}, {1e3 * self.without:.2f} ms {without}"


class TrialShard(NamedTuple):
    """A rank's shard of a group."""

    kind: GroupKind
    numel: int


def autotune(settings: Config, context: EngineContext, states: ModelStates) -> Config:
    """Return the configuration with a value in place of every measured "auto", and the times as its origin."""
    zero, trial = settings.zero_optimization, Autotuner(settings, context, states)
    chosen: dict[str, AutotuneChoice] = {}
    if zero.zero_quantized_weights == "auto":
        chosen[WEIGHTS] = trial.weights()
    if zero.zero_quantized_gradients == "auto":
        chosen[GRADIENTS] = trial.gradients()
    if zero.zero_hpz_partition_size == "auto":
        encoded = chosen[WEIGHTS].value if WEIGHTS in chosen else zero.zero_quantized_weights
        chosen[COPIES] = trial.copies(bool(encoded))
    if not chosen:
        return settings
    told = {key: f"auto -> {json.dumps(choice.value)} ({choice.why})" for key, choice in chosen.items()}
    if context.roles.all.rank_group.rank == 0:
        logging.getLogger("shardwell").info("%s", "; ".join(f"{key}: {text}" for key, text in told.items()))
    origins = {**settings.origins, **{f"{_BLOCK}.{key}": text for key, text in told.items()}}
    values = {key: choice.value for key, choice in chosen.items()}
    return settings.with_origins(origins, {_BLOCK: zero.model_copy(update=values)})


@dataclass(frozen=True)
class Autotuner:
    """Measures the features, for the ranks, the links and the model of an engine."""

    settings: Config
    context: EngineContext
    states: ModelStates

    def weights(self) -> AutotuneChoice:
        """Choose whether parameters are all-gathered quantised (qwZ)."""
        # frozen parameters that are stored quantised are transferred as they are stored
        rests_encoded = self.settings.zero_optimization.zero_quantized_nontrainable_weights

        def travels(kind: GroupKind) -> bool:
            return Codec.takes(kind.precision.compute) and (kind.trains or not rests_encoded)

        found = self._largest(3, travels)
        if isinstance(found, str):
            return AutotuneChoice(False, found)
        dtype = found.kind.precision.compute
        times = self._compare(self._gather(None), self._gather(self._codec), dtype, found.numel)
        return AutotuneChoice(times.are_worth_it, times.told("gather", "encoded", "as it is"))

    def gradients(self) -> AutotuneChoice:
        """Choose whether gradients are reduce-scattered quantised (qgZ)."""
        found = self._largest(2, lambda kind: kind.trains and Codec.takes(kind.precision.compute))
        if isinstance(found, str):
            return AutotuneChoice(False, found)
        precision, codecs = found.kind.precision, self.settings.shardwell.codecs
        dtype = precision.wire.dtype or precision.compute
        into = torch.promote_types(precision.compute, dtype)
        encoded = self._reduce(into, (Codec(codecs.inside), Codec(codecs.between)))
        times = self._compare(self._reduce(into, None), encoded, dtype, found.numel)
        return AutotuneChoice(times.are_worth_it, times.told("reduce", "encoded", "as it is"))

    def copies(self, encoded: bool) -> AutotuneChoice:
        """Choose whether parameters have a secondary shard in the node (hpZ), compared with all-gathers over all ranks.

        `encoded` says whether all-gathers over all ranks are quantised.
        """
        found, hops = self._largest(3, lambda _: True), self.context.roles.shard.hops
        if isinstance(found, str):
            return AutotuneChoice(1, found)
        if hops is None:
            return AutotuneChoice(1, "no nodes of several ranks, all alike")
        if (why := self._too_large(hops.inside.rank_group.size)) is not None:
            return AutotuneChoice(1, why)
        dtype = found.kind.precision.compute
        plain = self._gather(self._codec if encoded and Codec.takes(dtype) else None)
        times = self._compare(
            plain, lambda flat: hops.inside.all_gather(flat, None, TrafficKind.SETUP), dtype, found.numel
        )
        size = hops.inside.rank_group.size if times.are_worth_it else 1
        return AutotuneChoice(size, times.told("gather", "in the node", "over all ranks"))

    # ---------------------------------------------------------------------------------------------- the model

    def _split(self) -> list[TrialShard]:
        """Return the shard of each group that is not unsharded on every rank."""
        groups = [group for kinds in self.states.units.values() for group in kinds.items()]
        size = self.context.roles.shard.rank_group.size
        return [TrialShard(kind, -(-numel // size)) for kind, numel in groups if numel and not kind.persistent]

    def _largest(self, least_stage: int, travels: Callable[[GroupKind], bool]) -> TrialShard | str:
        """Return the largest shard that `travels`, or the reason why nothing is measured."""
        stage, shard = self.settings.zero_optimization.stage, self.context.roles.shard
        if shard.rank_group.size == 1:
            return "one rank"
        if stage < least_stage:
            return f"stage {stage}"
        if shard.rank_group.backend == "fake" or shard.device.is_meta:
            return "simulated ranks"
        found = [one for one in self._split() if travels(one.kind)]
        return max(found, key=lambda one: one.numel) if found else "nothing travels so"

    def _too_large(self, ranks_per_copy: int) -> str | None:
        """Return why the device has no room for secondary shards; None if it has."""
        device = self.context.device
        if not device.has_device_memory:
            return None
        shard = self.context.roles.shard
        mine = sum(one.numel * one.kind.precision.compute.itemsize for one in self._split())
        room = shard.all_reduce_min(_ROOM * device.available_bytes(), _TOKEN)
        needed = mine * shard.rank_group.size / ranks_per_copy
        return f"copies of {human(needed)}, and room for {human(room)}" if needed > room else None

    # ---------------------------------------------------------------------------------------- the collectives

    @property
    def _codec(self) -> Codec:
        return Codec(self.settings.shardwell.codecs.weights)

    def _gather(self, codec: Codec | None) -> Move:
        return lambda flat: self.context.roles.shard.all_gather(flat, None, TrafficKind.SETUP, codec)

    def _reduce(self, dtype: torch.dtype, codecs: tuple[Codec, Codec] | None) -> Move:
        shard, temporary = self.context.roles.shard, self.context.temporary

        def move(flat: Tensor) -> Work:
            into = temporary.allocate(flat.numel() // shard.rank_group.size, dtype, StateKind.STAGING, _PROBE)
            reduced = shard.reduce_scatter(
                flat, into, 1 / shard.rank_group.size, False, None, codecs, TrafficKind.SETUP
            )
            return reduced.then(lambda: temporary.free(into))

        return move

    # ---------------------------------------------------------------------------------------------- the clock

    def _compare(self, plain: Move, other: Move, dtype: torch.dtype, numel: int) -> Timing:
        """Return the seconds of each: the best of some rounds, on the slowest rank."""
        numel = self._affordable(plain, dtype, min(numel, _MOST))
        times = [math.inf, math.inf]
        for turn in range(1 + _ROUNDS):
            for which, move in enumerate((plain, other)):
                seconds = self._seconds(move, dtype, numel)
                times[which] = min(times[which], seconds) if turn else math.inf  # the first round warms up
        return Timing(self._slowest(times[0]), self._slowest(times[1]))

    def _affordable(self, move: Move, dtype: torch.dtype, most: int) -> int:
        """Return the elements of a shard that are transferred in about the time allowed."""
        numel = min(most, max(BLOCK, _FIRST // self.context.roles.shard.rank_group.size))
        self._seconds(move, dtype, numel)  # the first collective takes longer
        while numel < most and _GROWTH * self._slowest(self._seconds(move, dtype, numel)) < _TIMEOUT:
            numel = min(most, _GROWTH * numel)
        return numel

    def _seconds(self, move: Move, dtype: torch.dtype, numel: int) -> float:
        """Return the seconds of a collective on this rank, if all ranks begin at the same time."""
        shard, device, temporary = self.context.roles.shard, self.context.device, self.context.temporary
        flat = temporary.allocate(numel * shard.rank_group.size, dtype, StateKind.STAGING, _PROBE)
        flat.fill_(1)
        shard.barrier(_TOKEN)
        device.now().synchronize()
        begin = time.perf_counter()
        move(flat).wait()
        device.now().synchronize()
        seconds = time.perf_counter() - begin
        temporary.free(flat)
        return seconds

    def _slowest(self, seconds: float) -> float:
        return -self.context.roles.shard.all_reduce_min(-seconds, _TOKEN)
