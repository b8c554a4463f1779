"""`PipelineModule`: a list of layers, of which each rank builds those of its own stages. The names are DeepSpeed's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwell.errors import ConfigError, ShardwellError
from shardwell.memory.local_gpus import default_device
from shardwell.parallel import start_process_group
from shardwell.parallel.mesh import rank_in_world, size_of_world
from shardwell.pipeline.layers import FunctionLayer, LayerSpec, TiedLayerSpec
from shardwell.pipeline.partition import NOTHING, LayerCost, cost_of, divide
from shardwell.pipeline.passage import PassThrough
from shardwell.pipeline.stage_modules import Layers, Place


class PipelineModule(nn.Module):
    """A model of layers that are called one after another, each with what the one before returned.

    A layer is a `LayerSpec`, an `nn.Module` or a function. Layer number 3 has the name `3` in checkpoints, and a tied
    one `tied_modules.KEY`, on every rank. This rank builds the layers of its stages only.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Any = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        num_chunks: int = 1,
    ) -> None:
        """Build this rank's layers.

        Args:
            num_stages: The ranks along the pipeline; the others are data-parallel. `topology.get_dim("pipe")` if None.
            loss_fn: A function of the last layer's output and the labels; without it the output is the loss.
            seed_layers: Seed the random numbers with `base_seed` + the layer's number before each layer is built.
            partition_method: `parameters`, `uniform`, `type:REGEX`, or `best`.
            activation_checkpoint_interval: Recompute groups of so many layers in backward; 0: none.
            num_chunks: The stages of each rank, for the schedule `interleaved`.
        """
        super().__init__()
        for name, value in {
            "activation_checkpoint_func": activation_checkpoint_func,
            "checkpointable_layers": checkpointable_layers,
        }.items():
            if value is not None:
                raise ConfigError(f"PipelineModule({name}=...) is not supported: every group of layers is recomputed")
        if num_stages is None and topology is None:
            raise ShardwellError("PipelineModule needs num_stages, the number of ranks along the pipeline, or topology")
        self.num_stages = int(num_stages if num_stages is not None else topology.get_dim("pipe"))
        self.num_chunks, self.num_layers = num_chunks, len(layers)
        self.partition_method, self.interval = partition_method, activation_checkpoint_interval
        self.__dict__["loss_fn"] = loss_fn
        self._specs = list(layers)
        self._seeds = (seed_fn or torch.manual_seed, base_seed) if seed_layers else None
        start_process_group(default_device())
        self.stage_id = _index_along_pipe(self.num_stages)
        if topology is not None:
            _check_topology(topology, self.num_stages)
        self._cut = self._divided(self.num_stages * num_chunks, partition_method)
        self.tied_modules = nn.ModuleDict()
        for index in range(self.num_layers):
            stage = next(number for number, end in enumerate(self._cut[1:]) if index < end)
            is_own = stage % self.num_stages == self.stage_id
            self.add_module(str(index), self._built(index) if is_own else PassThrough())
            if not is_own and isinstance(self._specs[index], nn.Module):
                self._specs[index] = _BuiltElsewhere(_class_name(self._specs[index]))  # its parameters are free then

    @property
    def model(self) -> PipelineModule:
        """Return the model itself, as a `SplitModel` does."""
        return self

    @property
    def specs(self) -> Sequence[Any]:
        """Return what describes the layers, or is one."""
        return self._specs

    @property
    def layers(self) -> Layers:
        """Return the layers, of which those of other ranks are pass-through modules."""
        children = [(str(index), self._modules[str(index)]) for index in range(self.num_layers)]
        places = [Place(self, name, name, child) for name, child in children if child is not None]
        return Layers(self, places)

    def borders(self, num_stages: int, method: str) -> list[int]:
        """Return the index of each stage's first layer, as it was when the layers were built."""
        if num_stages != self.num_stages * self.num_chunks:
            raise ConfigError(
                f"pipeline: the PipelineModule was built for {self.num_stages} stages x {self.num_chunks} chunk(s), "
                f"and the configuration asks for {num_stages} in all"
            )
        return self._cut

    def forward(self, inputs: Any) -> Any:
        """Run the layers one after another."""
        for index in range(self.num_layers):
            inputs = self._modules[str(index)](inputs)  # type: ignore[misc]
        return inputs

    def tied_ranks(self) -> dict[str, tuple[int, ...]]:
        """Return the tied parameters of this rank, by name, with the ranks along the pipeline that have them."""
        ranks: dict[str, set[int]] = {}
        for index, spec in enumerate(self._specs):
            if isinstance(spec, TiedLayerSpec):
                stage = next(number for number, end in enumerate(self._cut[1:]) if index < end)
                ranks.setdefault(spec.key, set()).add(stage % self.num_stages)
        return {
            f"tied_modules.{key}.{name}": tuple(sorted(ranks[key]))
            for key, module in self.tied_modules.items()
            for name, _ in module.named_parameters()
            if len(ranks[key]) > 1
        }

    def _divided(self, num_stages: int, method: str) -> list[int]:
        needs_costs = method in ("best", "parameters")
        costs = [_cost(spec) if needs_costs else NOTHING for spec in self._specs]
        return divide(method, costs, [_class_name(spec) for spec in self._specs], num_stages)

    def _built(self, index: int) -> nn.Module:
        """Return the layer of this index."""
        spec = self._specs[index]
        if self._seeds is not None:
            seed_fn, base_seed = self._seeds
            seed_fn(base_seed + index)
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in self.tied_modules:
                self.tied_modules[spec.key] = spec.build()
            return FunctionLayer(spec.forward_fn or _call, self.tied_modules[spec.key])
        built = spec.build() if isinstance(spec, LayerSpec) else spec
        return built if isinstance(built, nn.Module) else FunctionLayer(built)


@dataclass(frozen=True)
class _BuiltElsewhere:
    """A layer that came built, and that other ranks have."""

    class_name: str


def _call(module: nn.Module, inputs: Any) -> Any:
    return module(inputs)


def _cost(spec: Any) -> LayerCost:
    if isinstance(spec, LayerSpec):
        return spec.cost()
    return cost_of([spec] if isinstance(spec, nn.Module) else [])


def _class_name(spec: Any) -> str:
    return spec.class_name if isinstance(spec, LayerSpec | _BuiltElsewhere) else type(spec).__name__


def _index_along_pipe(num_stages: int) -> int:
    """Return this rank's index along the pipeline, which is the outermost axis of the ranks."""
    size = size_of_world()
    if size % num_stages:
        raise ConfigError(
            f"PipelineModule: {size} rank(s) cannot be {num_stages} stages (num_stages) of the same number of ranks: "
            f"start a multiple of {num_stages}"
        )
    return rank_in_world() // (size // num_stages)


def _check_topology(topology: Any, num_stages: int) -> None:
    """Refuse a topology that lays ranks out in another way than the engine does."""
    sizes = {axis: topology.get_dim(axis) for axis in topology.get_axis_names()}
    shown = " x ".join(f"{size} ({axis})" for axis, size in sizes.items())
    if others := [axis for axis, size in sizes.items() if axis not in ("pipe", "data") and size > 1]:
        raise ConfigError(
            f"PipelineModule(topology=...): the axis '{others[0]}' of {shown} is not read from a topology: leave its "
            "size at 1, and set tensor_parallel.autotp_size in the configuration"
        )
    size, first = size_of_world(), next(iter(sizes), "")
    if sizes.get("pipe") != num_stages or topology.world_size() != size or (first != "pipe" and 1 < num_stages < size):
        raise ConfigError(
            f"PipelineModule(topology=...): {shown} is not the layout of {size} rank(s) in {num_stages} stages: the "
            "pipeline is the first axis, as in PipeDataParallelTopology"
        )
