"""The parameters that stay unsharded on every rank at stage 3, because they are small."""

from __future__ import annotations

from shardwell.config import ZeroConfig
from shardwell.memory.machine import current_machine
from shardwell.sharding import UnitSpec
from shardwell.sharding.bundle import numel_of, sizes_of_parameters

_SMALL = 100_000  # elements: larger parameters are worth an all-gather in any model
_SHARE = 0.01  # of a model: what small parameters may cost in all if the configuration sets no bound


def persistent_in(specs: list[UnitSpec], zero: ZeroConfig) -> set[int]:
    """Return the ids of persistent parameters, smallest first while their sum is below the model's threshold.

    Parameters of one size are persistent or not together, so that the blocks of a model stay alike. "auto" has a bound
    of its own: a small model consists of small parameters, and none of it would be sharded.
    """
    by_size = sizes_of_parameters(pair for one in specs for pair in one.parameters)
    blocks = current_machine().blocks
    totals = {numel: numel_of(pairs, blocks) for numel, pairs in by_size.items()}
    threshold, most = zero.stage3_param_persistence_threshold, zero.stage3_model_persistence_threshold
    bounds = [] if most is None else [most]
    if isinstance(threshold, str):
        threshold = _SMALL
        bounds.append(int(_SHARE * sum(totals.values())))
    chosen: set[int] = set()
    total = 0
    for numel, pairs in by_size.items():
        total += totals[numel]
        if numel >= threshold or any(total > bound for bound in bounds):
            break
        chosen |= {id(parameter) for _, parameter in pairs}
    return chosen
