"""The parameters that stay unsharded on every rank at stage 3, because they are small."""

from __future__ import annotations

from shardwell.config import ZeroConfig
from shardwell.sharding import UnitSpec
from shardwell.sharding.tensor_part import numel_on_all

_SMALL = 100_000  # elements: larger parameters are worth an all-gather in any model
_SHARE = 0.01  # of a model: what small parameters may cost in all if the configuration sets no bound


def persistent_in(specs: list[UnitSpec], zero: ZeroConfig) -> set[int]:
    """Return the ids of persistent parameters, smallest first while their sum is below the model's threshold.

    "auto" has a bound of its own: a small model consists of small parameters, and none of it would be sharded.
    """
    parameters = sorted((p for one in specs for _, p in one.parameters), key=numel_on_all)
    threshold, most = zero.stage3_param_persistence_threshold, zero.stage3_model_persistence_threshold
    bounds = [] if most is None else [most]
    if isinstance(threshold, str):
        threshold = _SMALL
        bounds.append(int(_SHARE * sum(map(numel_on_all, parameters))))
    chosen, total = set(), 0
    for parameter in parameters:
        total += numel_on_all(parameter)
        if numel_on_all(parameter) >= threshold or any(total > bound for bound in bounds):
            break
        chosen.add(id(parameter))
    return chosen
