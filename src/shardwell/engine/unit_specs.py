"""Which units a configuration makes of a model: wrapped, small parameters in the root, small neighbours bundled."""

from __future__ import annotations

from torch import nn

from shardwell.config import Config
from shardwell.engine.persistence import persistent_in
from shardwell.memory.machine import SimulatedBlocks, current_machine
from shardwell.sharding import UnitSpec, wrap_model
from shardwell.sharding.bundle import LARGEST_BUNDLE, SMALLEST_SHARE, bundle_neighbours, gather_in_root, numel_of
from shardwell.sharding.wrap import LeafRules

_LIVE_SHARE = 4  # of stage3_max_live_parameters: a bundle runs, the next one is all-gathered, and the root has some


def unit_specs(model: nn.Module, settings: Config) -> list[UnitSpec]:
    """Return the units of a model."""
    zero = settings.zero_optimization
    leaf = zero.leaf_module
    specs = wrap_model(model, LeafRules(leaf.classes, leaf.names, leaf.name_suffixes))
    blocks = current_machine().blocks
    if _is_one_unit(specs, settings, blocks):
        return [UnitSpec("", model, [pair for one in specs for pair in one.parameters])]
    specs = gather_in_root(model, specs, persistent_in(specs, zero), blocks)
    return bundle_neighbours(model, specs, _largest_bundle(specs, settings, blocks))


def _is_one_unit(specs: list[UnitSpec], settings: Config, blocks: SimulatedBlocks | None) -> bool:
    """Return whether a pipeline stage, which is reduced and published once a step, is no larger than a bundle.

    A rank with several stages has a boundary for each of them.
    """
    pipeline, most = settings.pipeline, settings.shardwell.bundle_size
    if pipeline.stages == 1 or pipeline.chunks > 1 or settings.zero_optimization.stage > 1 or isinstance(most, str):
        return False
    total = numel_of((pair for one in specs for pair in one.parameters), blocks)
    return total <= most and not any(one.is_user_unit or one.is_tile for one in specs)


def _largest_bundle(specs: list[UnitSpec], settings: Config, blocks: SimulatedBlocks | None) -> int:
    """Return the elements that a bundle of neighbouring units may have."""
    zero, asked = settings.zero_optimization, settings.shardwell.bundle_size
    if not isinstance(asked, str):
        return asked
    total = numel_of((pair for one in specs for pair in one.parameters), blocks)
    live = zero.stage3_max_live_parameters // _LIVE_SHARE if zero.stage == 3 else LARGEST_BUNDLE
    return min(LARGEST_BUNDLE, total // SMALLEST_SHARE, live)
