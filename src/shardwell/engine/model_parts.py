"""Which part of the model a checkpoint gets from this rank: all of it, or this rank's pipeline stages.

A checkpoint knows names and not stages, so what describes the whole model is brought together when it is saved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shardwell.checkpoint.rank_contents import aliases_of, buffers_of, extra_state_of
from shardwell.engine.checkpoint_values import frozen_names
from shardwell.errors import CheckpointError
from shardwell.parallel import Collectives, MeshRoles
from shardwell.sharding import Unit


class WholeModel:
    """Every rank has the whole model, and rank 0 saves what is not sharded."""

    is_divided = False  # other ranks have other parts of the model

    def __init__(self, roles: MeshRoles) -> None:
        self._roles = roles
        self.alike = roles.all  # the ranks that have the same units

    def buffers(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the buffers that this rank saves."""
        return buffers_of(model) if self._roles.all.rank_group.rank == 0 else {}

    def names(self, model: nn.Module, units: Sequence[Unit]) -> dict[str, Any]:
        """Return the names in the whole model that rank 0 saves: aliases of shared parameters, frozen parameters."""
        return {"aliases": aliases_of(model, units), "frozen": frozen_names(units, model)}

    def optimizer(self, described: Any) -> Any:
        """Return the description of the optimizer, whose parameter groups name the parameters of the whole model."""
        return described

    def elsewhere(self, model: nn.Module) -> list[str]:
        """Return the names of parameters and buffers that only other ranks have."""
        return []


class StageOfModel(WholeModel):
    """A part of a model for ranks that have some stages: the first rank of each stage saves what is not sharded."""

    is_divided = True

    def __init__(self, roles: MeshRoles, layers: Sequence[str]) -> None:
        """Save the part of a model that has these layers."""
        super().__init__(roles)
        assert roles.pipe is not None
        self._pipe, self.alike = roles.pipe, roles.stage
        self._is_first = roles.grid.position(roles.all.rank_group.rank)["pipe"] == 0
        self._layers = tuple(f"{name}." for name in layers)

    def buffers(self, model: nn.Module) -> Mapping[str, Tensor]:
        if self._roles.stage.rank_group.rank != 0:
            return {}
        # Modules without parameters are on all stages: the first stage saves their buffers.
        found = buffers_of(model)
        return {name: buffer for name, buffer in found.items() if self._is_first or name.startswith(self._layers)}

    def names(self, model: nn.Module, units: Sequence[Unit]) -> dict[str, Any]:
        told = _told(self._pipe, {**super().names(model, units), "extra": list(extra_state_of(model))})
        for extra in (name for one in told[1:] for name in one["extra"]):
            raise CheckpointError(
                f"'{extra}' is extra state of a module on a later pipeline stage, which is not saved: use a buffer"
            )
        aliases = {other: name for one in told for other, name in one["aliases"].items()}
        return {"aliases": aliases, "frozen": [name for one in told for name in one["frozen"]]}

    def optimizer(self, described: Any) -> Any:
        groups = [] if described is None else [group["params"] for group in described["param_groups"]]
        told = _told(self._pipe, groups)
        for index, group in enumerate([] if described is None else described["param_groups"]):
            names = [name for one in told if index < len(one) for name in one[index]]
            group["params"] = list(dict.fromkeys(names))
        return described

    def elsewhere(self, model: nn.Module) -> list[str]:
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        told = _told(self._pipe, [*names, *buffers_of(model)])
        return sorted({name for one in told for name in one} - set(names))


def _told(pipe: Collectives, mine: Any) -> list[Any]:
    """Return what each rank of the pipeline tells, in their order."""
    text = json.dumps(mine).encode()
    size = int(-pipe.all_reduce_min(-len(text), "SIZES"))
    return [json.loads(one) for one in pipe.tell_all(text.ljust(size), "NAMES")]
