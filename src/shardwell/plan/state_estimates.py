"""The well-known estimates of model states: DeepSpeed's functions and its table, with the bytes that shardwell stores.

The bytes are those of `sharding/model_states.py`, for bf16 with Adam. From a model they are those of its units, with
frozen parameters as such; from numbers alone everything is one unit that is trained. Activations are not counted:
`estimate` simulates them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shardwell.errors import ConfigError
from shardwell.memory.statistics import Tier
from shardwell.sharding import wrap_model
from shardwell.sharding.model_states import GroupKey, ModelStates, StateFormula, TierPlacement, total
from shardwell.sharding.spec import GroupPrecision
from shardwell.sharding.ways import states_of
from shardwell.sharding.wrap import LeafRules

_GIB = 1 << 30
_NUMBERS = "(numbers)"  # the unit of an estimate without a model
_BF16 = torch.bfloat16
_FP32 = 4  # bytes: of a model that is built on the host before it is sharded
_ON_HOST, _ALL_ON_HOST = TierPlacement(optimizer=Tier.HOST), TierPlacement(Tier.HOST, Tier.HOST)
States = Callable[[int, int], ModelStates]  # of a stage and a number of ranks


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return the bytes of a node's host memory and of each GPU at stage 2."""
    host, device = _stored(_of_numbers(total_params), 2, num_gpus_per_node, num_nodes, _zero2(cpu_offload))
    return _in_node(host, _FP32 * total_params, num_gpus_per_node, additional_buffer_factor), device


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return the bytes of a node's host memory, of each GPU, and of the layers that are unsharded, at stage 3.

    One layer is unsharded while the next one is all-gathered. Without `zero_init` each rank builds the model on the
    host first.
    """
    place = _zero3(cpu_offload, cpu_offload_params)
    host, device = _stored(_of_numbers(total_params), 3, num_gpus_per_node, num_nodes, place)
    unsharded = 2 * largest_layer_params * _BF16.itemsize
    built = _FP32 * (largest_layer_params if zero_init else total_params)
    return _in_node(host, built, num_gpus_per_node, additional_buffer_factor), device + unsharded, unsharded


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """Return the elements of a model, shared parameters once, and of its largest module without those inside it."""
    size = sum(parameter.numel() for parameter in model.parameters())
    own = [sum(one.numel() for one in module.parameters(recurse=False)) for module in model.modules()]
    return size, max(own, default=0)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of stage 2 for a model."""
    size, _ = model_to_params(model)
    _print_zero2(_of_model(model), size, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of stage 3 for a model; what is unsharded at a time are two units, such as blocks."""
    size, largest = model_to_params(model)
    _print_zero3(_of_model(model), size, largest, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of stage 2 for a number of parameters."""
    states = _of_numbers(total_params)
    _print_zero2(states, total_params, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the table of stage 3 for a number of parameters, and those of the largest layer."""
    states = _of_numbers(total_params)
    _print_zero3(states, total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor)


# ------------------------------------------------------------------------------------------------------------ bytes


def _of_numbers(total_params: int) -> States:
    kind = GroupKey(GroupPrecision.of(_BF16, _BF16, True), trains=True, persistent=False)
    return lambda stage, num_ranks: ModelStates({_NUMBERS: {kind: total_params}}, StateFormula(stage, num_ranks))


def _of_model(model: nn.Module) -> States:
    specs = wrap_model(model, LeafRules())
    return lambda stage, num_ranks: states_of(specs, stage, num_ranks, _BF16, False)


def _stored(
    states: States, stage: int, num_gpus_per_node: int, num_nodes: int, place: TierPlacement
) -> tuple[int, int]:
    """Return the bytes of one rank on the host and on the device: parameters, masters, moments and gradients."""
    for name, number in (("num_gpus_per_node", num_gpus_per_node), ("num_nodes", num_nodes)):
        if number < 1:
            raise ConfigError(f"{name} is {number}: expected 1 or more")
    sizes = states(stage, num_gpus_per_node * num_nodes)
    found = total(sizes.needs(name, place) for name in sizes.units)
    return found[Tier.HOST], found[Tier.DEVICE]


def _zero2(cpu_offload: bool) -> TierPlacement:
    return _ON_HOST if cpu_offload else TierPlacement()


def _zero3(cpu_offload: bool, cpu_offload_params: bool) -> TierPlacement:
    return TierPlacement() if not cpu_offload else _ALL_ON_HOST if cpu_offload_params else _ON_HOST


def _in_node(host: int, built: int, num_gpus_per_node: int, factor: float) -> int:
    """Return the host memory of a node, which also has what each rank builds before it is sharded."""
    return int(max(host, built) * num_gpus_per_node * factor)


# ------------------------------------------------------------------------------------------------------------ tables


def _print_zero2(states: States, size: int, num_gpus_per_node: int, num_nodes: int, factor: float) -> None:
    _print_head(num_nodes, num_gpus_per_node, f"{int(size / 1e6)}M total params")
    for offloads in (True, False):
        host, device = _stored(states, 2, num_gpus_per_node, num_nodes, _zero2(offloads))
        in_node = _in_node(host, _FP32 * size, num_gpus_per_node, factor)
        _print_row(in_node, device, f"offload_optimizer={'cpu ' if offloads else 'none'}")


def _print_zero3(
    states: States, size: int, largest: int, num_gpus_per_node: int, num_nodes: int, factor: float
) -> None:
    sizes = f"{int(size / 1e6)}M total params, {int(largest / 1e6)}M largest layer params"
    _print_head(num_nodes, num_gpus_per_node, sizes)
    for offloads, parameters in ((True, True), (True, False), (False, False)):
        host, device = _stored(states, 3, num_gpus_per_node, num_nodes, _zero3(offloads, parameters))
        units = [sum(one.values()) for name, one in states(3, 1).units.items() if name != _NUMBERS]
        device += 2 * max(units, default=largest) * _BF16.itemsize
        for zero_init in (True, False):
            in_node = _in_node(host, _FP32 * (largest if zero_init else size), num_gpus_per_node, factor)
            words = [f"offload_param={'cpu ' if parameters else 'none'}"]
            words += [f"offload_optimizer={'cpu ' if offloads else 'none'}", f"zero_init={int(zero_init)}"]
            _print_row(in_node, device, ", ".join(words))


def _print_head(num_nodes: int, num_gpus_per_node: int, model: str) -> None:
    nodes = "node" if num_nodes == 1 else "nodes"
    gpus = "GPU" if num_gpus_per_node == 1 else "GPUs"
    print(
        "Estimated memory needed for params, optim states and gradients for a:\n"
        f"HW: Setup with {num_nodes} {nodes}, {num_gpus_per_node} {gpus} per node.\n"
        f"SW: Model with {model}.\n"
        "  per CPU  |  per GPU |   Options"
    )


def _print_row(host: int, device: int, options: str) -> None:
    print(f" {host / _GIB:7.2f}GB | {device / _GIB:6.2f}GB | {options}")
