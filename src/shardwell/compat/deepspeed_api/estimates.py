"""DeepSpeed's memory estimates: its functions and its table, with the bytes that shardwell stores.

The bytes are those of `sharding/model_states.py`, for a bf16 model with Adam. Activations are not counted.
"""

from __future__ import annotations

import torch
from torch import nn

from shardwell.memory.statistics import Tier
from shardwell.sharding.model_states import GroupKey, StateFormula, TierPlacement
from shardwell.sharding.spec import GroupPrecision

_GIB = 1 << 30
_FP32 = 4  # bytes: of a model that is built on the host before it is sharded


def _stored(stage: int, total: int, num_ranks: int, place: TierPlacement) -> tuple[float, float]:
    """Return the bytes of one rank on the host and on the device: parameters, masters, moments and gradients."""
    kind = GroupKey(GroupPrecision.of(torch.bfloat16, torch.bfloat16, True), trains=True, persistent=False)
    found = StateFormula(stage, num_ranks).needs(kind, total, place)
    return found[Tier.HOST], found[Tier.DEVICE]


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return the bytes of a node's host memory and of each GPU at stage 2."""
    place = TierPlacement(optimizer=Tier.HOST) if cpu_offload else TierPlacement()
    host, device = _stored(2, total_params, num_gpus_per_node * num_nodes, place)
    built = _FP32 * total_params
    return int(max(host, built) * num_gpus_per_node * additional_buffer_factor), int(device)


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
    parameters = Tier.HOST if cpu_offload and cpu_offload_params else Tier.DEVICE
    place = TierPlacement(parameters, Tier.HOST if cpu_offload else Tier.DEVICE)
    host, device = _stored(3, total_params, num_gpus_per_node * num_nodes, place)
    unsharded = 2 * largest_layer_params * torch.bfloat16.itemsize
    built = _FP32 * (largest_layer_params if zero_init else total_params)
    in_node = int(max(host, built) * num_gpus_per_node * additional_buffer_factor)
    return in_node, int(device) + unsharded, unsharded


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """Return the elements of a model, shared parameters once, and of its largest module without those inside it."""
    total = sum(parameter.numel() for parameter in model.parameters())
    own = [sum(one.numel() for one in module.parameters(recurse=False)) for module in model.modules()]
    return total, max(own, default=0)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of stage 2 for a model."""
    total, _ = model_to_params(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of stage 3 for a model."""
    total, largest = model_to_params(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


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


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of stage 2 for a number of parameters."""
    _print_head(num_nodes, num_gpus_per_node, f"{int(total_params / 1e6)}M total params")
    for offloads in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offloads, additional_buffer_factor
        )
        _print_row(host, device, f"offload_optimizer={'cpu ' if offloads else 'none'}")


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the table of stage 3 for a number of parameters, and those of the largest layer."""
    sizes = f"{int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M largest layer params"
    _print_head(num_nodes, num_gpus_per_node, sizes)
    for states, parameters in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                states,
                parameters,
                zero_init,
                additional_buffer_factor,
            )
            words = [f"offload_param={'cpu ' if parameters else 'none'}"]
            words += [f"offload_optimizer={'cpu ' if states else 'none'}", f"zero_init={int(zero_init)}"]
            _print_row(host, device, ", ".join(words))
