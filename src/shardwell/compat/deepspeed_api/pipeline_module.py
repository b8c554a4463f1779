"""`PipelineModule` with the methods that DeepSpeed's has beside its constructor."""

from __future__ import annotations

from typing import Any, NoReturn

from shardwell import pipeline
from shardwell.activation_checkpointing import checkpoint
from shardwell.compat.deepspeed_api.parallel_grid import PipelineParallelGrid
from shardwell.compat.deepspeed_api.topology import PipeDataParallelTopology, ProcessTopology
from shardwell.errors import ShardwellError
from shardwell.parallel.mesh import rank_in_world, size_of_world

_FILES = "engine.save_checkpoint and engine.load_checkpoint write and read whole checkpoints, in any layout"
_TIED = "the engine sums the gradients of tied weights at the step"
_REFUSED = {
    **dict.fromkeys(("ckpt_prefix", "ckpt_layer_path", "ckpt_layer_path_list"), _FILES),
    **dict.fromkeys(("save_state_dict", "load_state_dir"), _FILES),
    **dict.fromkeys(("allreduce_tied_weight_gradients", "get_tied_weights_and_groups", "tied_comms"), _TIED),
    "set_checkpoint_interval": 'set "pipeline": {"activation_checkpoint_interval": 1} before initialize',
    "forward_funcs": "the layers of this rank are children of the module, named by their numbers",
}


class PipelineModule(pipeline.PipelineModule):
    """A `PipelineModule` of shardwell that answers DeepSpeed's questions about ranks and layers."""

    def __init__(self, layers: Any, num_stages: Any = None, topology: Any = None, *args: Any, **kwargs: Any) -> None:
        """Build this rank's layers; the arguments are DeepSpeed's."""
        if kwargs.get("activation_checkpoint_func") is checkpoint:  # which recomputes layers here
            del kwargs["activation_checkpoint_func"]
        super().__init__(layers, num_stages, topology, *args, **kwargs)
        self.global_rank, self.world_size = rank_in_world(), size_of_world()
        made = PipeDataParallelTopology(self.num_stages, self.world_size // self.num_stages)
        self.__dict__["_topo"] = made if topology is None else topology
        self.__dict__["_grid"] = PipelineParallelGrid(self._topo)

    @property
    def parts(self) -> list[int]:
        """The number of each stage's first layer, and the number of layers."""
        return list(self._cut)

    def topology(self) -> ProcessTopology:
        """Return the axes of ranks."""
        found: ProcessTopology = self._topo
        return found

    def mpu(self) -> PipelineParallelGrid:
        """Return the place of this rank; the engine's `grid` has the process groups, too."""
        found: PipelineParallelGrid = self._grid
        return found

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    def stage_owner(self, layer_idx: int) -> int:
        """Return the rank along the pipeline that has a layer."""
        if not 0 <= layer_idx < self.num_layers:
            raise _NoSuchLayerError(f"stage_owner({layer_idx}): the layers are 0 to {self.num_layers - 1}")
        return next(number for number, end in enumerate(self._cut[1:]) if layer_idx < end) % self.num_stages

    def get_additional_losses(self) -> None:
        """Return that there are no losses beside the one that is trained on."""

    def __getattr__(self, name: str) -> Any:
        """Look a layer up; say what to use instead of what DeepSpeed's module has."""
        if name in _REFUSED:
            _refuse(name)
        return super().__getattr__(name)


class _NoSuchLayerError(ShardwellError, AssertionError):
    """A number of a layer that there is not."""


class _NotHereError(ShardwellError, AttributeError):
    """A method of DeepSpeed's module that is not offered."""


def _refuse(name: str) -> NoReturn:
    raise _NotHereError(f"PipelineModule.{name} is not offered: {_REFUSED[name]}")
