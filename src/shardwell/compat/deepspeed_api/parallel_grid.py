"""`PipelineParallelGrid`: where a rank is in the layout of an engine, and its groups, under DeepSpeed's names.

It answers Megatron's getters as well, so that `deepspeed.utils.groups` can ask it.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from shardwell.compat.deepspeed_api.topology import PipeDataParallelTopology, ProcessTopology
from shardwell.errors import ConfigError, ShardwellError
from shardwell.parallel import MeshRoles
from shardwell.parallel.grid import Grid
from shardwell.parallel.mesh import rank_in_world, size_of_world

_GROUP_WAY_OUT = "ask the engine's grid after initialize, engine.grid"


def topology_of(grid: Grid) -> ProcessTopology:
    """Return the layout of an engine as DeepSpeed's topology: pipe x data, and model and sequence where there are."""
    sizes = {"pipe": grid.pipe, "data": grid.num_batches, "sequence": grid.sequence, "model": grid.tensor}
    kept = {axis: size for axis, size in sizes.items() if size > 1 or axis in ("pipe", "data")}
    return ProcessTopology(list(kept), list(kept.values()), ranks=grid.ranks)


class PipelineParallelGrid:
    """The place of this rank in a topology. The groups are an engine's; before `initialize` there are none."""

    def __init__(
        self, topology: ProcessTopology | None = None, process_group: Any = None, *, roles: MeshRoles | None = None
    ) -> None:
        """Read the place of this rank; without a topology all ranks are stages of one pipeline's replicas."""
        if process_group is not None:
            raise ConfigError("PipelineParallelGrid(process_group=...) is not supported: it is about all ranks")
        self.global_rank, self.world_size = rank_in_world(), size_of_world()
        self._topo = topology or PipeDataParallelTopology(1, self.world_size)
        if self._topo.world_size() != self.world_size:
            raise ConfigError(
                f"PipelineParallelGrid: the topology has {self._topo.world_size()} ranks, this job {self.world_size}"
            )
        self._roles, self._alone = roles, list[Any]()
        for axis in ("data", "pipe", "model", "sequence"):
            setattr(self, f"{axis}_parallel_size", max(self._topo.get_dim(axis), 1))
        self.slice_parallel_size = self._size("model")
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self._size("pipe") - 1
        self.dp_groups, self.pipe_groups = self._lines("data"), self._lines("pipe")
        self.dp_group, self.pp_group, self.slice_group = self._line("data"), self._line("pipe"), self._line("model")

    def topology(self) -> ProcessTopology:
        """Return the axes of ranks."""
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank at the same place of another stage; other axes may be named, too."""
        here = self._topo.get_coord(self.global_rank)._asdict()
        return self._topo.get_rank(**{**here, "pipe": stage_id, **kwargs})

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_stage_id(self) -> int:
        return self._at("pipe")

    def get_data_parallel_id(self) -> int:
        return self._at("data")

    # ------------------------------------------------------------------------------------------------------ pipeline

    def get_pipe_parallel_rank(self) -> int:
        return self._at("pipe")

    def get_pipe_parallel_world_size(self) -> int:
        return self._size("pipe")

    def get_pipe_parallel_group(self) -> Any:
        """Return the group of the ranks at the same place of all stages."""
        roles = self._roles_of_engine()
        return self._group(roles.pipe)

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group

    # ---------------------------------------------------------------------------------------------------------- data

    def get_data_parallel_rank(self) -> int:
        """Return which share of the rows this rank trains on."""
        return self._at("data")

    def get_data_parallel_world_size(self) -> int:
        """Return the number of ranks that train on rows of their own."""
        return self._size("data")

    def get_data_parallel_group(self) -> Any:
        """Return the group of ranks that hold the same parameters and train on other rows."""
        roles = self._roles_of_engine()
        if self._size("sequence") > 1:
            raise ShardwellError(
                "there is no group of data-parallel ranks without those that share sequences: "
                "get_sequence_data_parallel_group() is of both, over which gradients are averaged"
            )
        return self._group(roles.averaged)

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_group

    # ------------------------------------------------------------------------------------------------------ sequence

    def get_sequence_parallel_rank(self) -> int:
        return self._at("sequence")

    def get_sequence_parallel_world_size(self) -> int:
        return self._size("sequence")

    def get_sequence_parallel_group(self) -> Any:
        """Return the group of ranks that share sequences."""
        return self._group(self._roles_of_engine().sequence)

    def get_sequence_data_parallel_rank(self) -> int:
        return self._at("data") * self._size("sequence") + self._at("sequence")

    def get_sequence_data_parallel_world_size(self) -> int:
        return self._size("data") * self._size("sequence")

    def get_sequence_data_parallel_group(self) -> Any:
        """Return the group of ranks over which gradients are averaged."""
        return self._group(self._roles_of_engine().averaged)

    # ------------------------------------------------------------------------------------------ tensors, and all model

    def get_slice_parallel_rank(self) -> int:
        return self._at("model")

    def get_slice_parallel_world_size(self) -> int:
        return self._size("model")

    def get_slice_parallel_group(self) -> Any:
        """Return the group of ranks that share each tensor."""
        return self._group(self._roles_of_engine().tensor)

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group

    def get_model_parallel_rank(self) -> int:
        """Return this rank's index among those that hold one model: of stages and of shared tensors."""
        return self._at("pipe") * self._size("model") + self._at("model")

    def get_model_parallel_world_size(self) -> int:
        return self._size("pipe") * self._size("model")

    def get_model_parallel_group(self) -> Any:
        """Return the group of the ranks that hold one model."""
        if self._size("pipe") > 1 and self._size("model") > 1:
            raise ShardwellError(
                "there is no group of all stages and tensor-parallel ranks of one model: get_pipe_parallel_group() and "
                "get_slice_parallel_group() are of one axis each"
            )
        return self.get_pipe_parallel_group() if self._size("pipe") > 1 else self.get_slice_parallel_group()

    # ------------------------------------------------------------------------------------------------------- insides

    def _at(self, axis: str) -> int:
        return int(getattr(self._topo.get_coord(self.global_rank), axis, 0))

    def _size(self, axis: str) -> int:
        return max(self._topo.get_dim(axis), 1)

    def _lines(self, axis: str) -> list[list[int]]:
        return self._topo.get_axis_comm_lists(axis)

    def _line(self, axis: str) -> list[int]:
        return next((line for line in self._lines(axis) if self.global_rank in line), [self.global_rank])

    def _roles_of_engine(self) -> MeshRoles:
        if self._roles is None:
            raise ShardwellError(f"this PipelineParallelGrid has no process groups: {_GROUP_WAY_OUT}")
        return self._roles

    def _group(self, collectives: Any) -> Any:
        """Return the process group of an axis; of this rank alone where the axis has one."""
        size = 1 if collectives is None else collectives.rank_group.size
        if size == 1 and self.world_size > 1:
            if not self._alone:  # only this rank makes it
                self._alone.append(dist.new_group([self.global_rank], use_local_synchronization=True))
            return self._alone[0]
        group = None if collectives is None else collectives.rank_group.group
        return dist.group.WORLD if group is None else group
