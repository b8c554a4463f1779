"""`deepspeed.zero`: DeepSpeed's signatures over `shardwell.zero`."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

import shardwell.zero
from shardwell.compat.deepspeed_api import configuration
from shardwell.compat.deepspeed_api.optimizers import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLion,
)
from shardwell.compat.deepspeed_api.parameters import is_zero_param, label
from shardwell.errors import ShardwellError
from shardwell.zero import GatheredParameters, TiledLinear

__all__ = [
    "GatheredParameters",
    "Init",
    "LinearModuleForZeroStage3",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeRORuntimeException",
    "is_zero_supported_optimizer",
    "register_external_parameter",
    "restore_init_context",
    "shutdown_init_context",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
    "zero3_linear_wrap",
]


class ZeRORuntimeException(ShardwellError):  # noqa: N818 - DeepSpeed's name
    """DeepSpeed's error of this name, for code that catches it."""


def initialize_on_all_ranks() -> None:
    """Let Transformers remember on all ranks which modules are initialized, not only on rank 0.

    It initializes the modules of a model of `zero.Init` on rank 0, inside `GatheredParameters`, and notes it there. If
    that model is a part of another one, as in `AutoModelForSequenceClassification.from_config`, the other ranks would
    initialize its parameters again. That does nothing to the empty tensors of DeepSpeed, but here they would be
    all-gathered, on all ranks but one.
    """
    place: Any = sys.modules.get("transformers.integrations.deepspeed")
    initialize = getattr(place, "initialize_weights_zero3", None)
    if initialize is None or hasattr(initialize, "__wrapped__"):
        return

    @functools.wraps(initialize)
    def remembering(model: nn.Module) -> None:
        initialize(model)
        for module in model.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]

    place.initialize_weights_zero3 = remembering


class Init(shardwell.zero.Init):
    """`zero.Init` with DeepSpeed's arguments; parameters get `ds_id` and the others as soon as they are registered."""

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        given = config_dict_or_path if config_dict_or_path is not None else config
        others = {
            "data_parallel_group": data_parallel_group,
            "pin_memory": pin_memory,
            "mpu": mpu,
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
            "sequence_data_parallel_group": sequence_data_parallel_group,
            "param_swapper": param_swapper,
        }
        self._labels: list[RemovableHandle] = []
        super().__init__(
            module,
            config_dict_or_path=None if given is None else configuration.as_deepspeed_reads(given),
            remote_device=remote_device,
            enabled=enabled,
            dtype=dtype,
            **{name: value for name, value in others.items() if value},
        )
        if module is not None and self.is_enabled:
            label(module.parameters(), _num_ranks())

    def __enter__(self) -> Self:
        super().__enter__()
        if self.is_enabled:
            initialize_on_all_ranks()
            self._labels.append(register_module_parameter_registration_hook(self._label))
            self._labels.append(register_module_module_registration_hook(self._label_all))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._labels:
            self._labels.pop().remove()
        super().__exit__(kind, error, trace)

    @staticmethod
    def _label(module: nn.Module, name: str, parameter: Any) -> None:
        if isinstance(parameter, nn.Parameter) and not parameter.is_meta:
            label([parameter], _num_ranks())

    @staticmethod
    def _label_all(module: nn.Module, name: str, attached: Any) -> None:
        """Label what was not registered here: parameters that were built on meta, or outside."""
        found = list(attached.parameters()) if isinstance(attached, nn.Module) else []
        label([one for one in found if not one.is_meta and not is_zero_param(one)], _num_ranks())


def _num_ranks() -> int:
    is_on = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_on else int(os.environ.get("WORLD_SIZE", "1"))


def shutdown_init_context() -> None:
    """Do nothing: `initialize` inside of `zero.Init` takes the parameters over as they are."""


def restore_init_context() -> None:
    """Do nothing, as `shutdown_init_context` does."""


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Check the arguments: a parameter that another module uses is gathered at that use, registered or not."""
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError("register_external_parameter expects a torch.nn.Parameter")
    if not isinstance(module, nn.Module):
        raise RuntimeError("register_external_parameter expects the module that uses the parameter")


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Check the arguments, as `register_external_parameter` does."""
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError("unregister_external_parameter expects a torch.nn.Parameter")


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Hold the model whole while it generates, so that its parameters are gathered once and not per token."""
    with GatheredParameters(list(model.parameters())):
        yield model


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """Return whether DeepSpeed lists the optimizer as tested with ZeRO; here others can be sharded, too."""
    listed = torch.optim.Adam, torch.optim.AdamW, FusedAdam, DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion
    return isinstance(optimizer, (*listed, FusedLion))


class TiledLinearReturnBias(TiledLinear):
    """A tiled layer whose tiles return `(output, bias)`, as Megatron's linear layers do; biases are not added."""

    def forward(self, input_: Any) -> Any:
        """Return the output and the bias, or lists of their parts; the bias is None if the tiles have none."""
        outputs, biases = [], []
        for products in self._products(input_):
            outputs.append(sum((output for output, _ in products[1:]), products[0][0]))
            biases.append(products[-1][1])
        has_bias = all(bias is not None for bias in biases)
        if not self.combine_out_splits:
            return outputs, biases if has_bias else None
        return torch.cat(outputs, dim=-1), torch.cat(biases, dim=-1) if has_bias else None


LinearModuleForZeroStage3 = nn.Linear


def zero3_linear_wrap(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer: torch's own keeps no gathered weight alive here."""
    return nn.functional.linear(input, weight, bias)
