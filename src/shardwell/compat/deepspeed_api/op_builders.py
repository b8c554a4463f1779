"""`deepspeed.ops.op_builder`: builders by name, of which none builds anything.

Clients and tests ask a builder whether an extension is compatible, and skip what is not. Here that means: what the
extension does is done by the engine's own kernels or by torch.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from shardwell.errors import ShardwellError

_SERVED = {  # name -> what serves it here
    "async_io": "threads read and write; offload to NVMe has queues of its own",
    "cpu_adagrad": "DeepSpeedCPUAdagrad is stepped by the engine's host kernels",
    "cpu_adam": "DeepSpeedCPUAdam is stepped by the engine's host kernels",
    "cpu_lion": "DeepSpeedCPULion is stepped by the engine's host kernels",
    "fused_adam": "FusedAdam is torch's fused Adam",
    "fused_lamb": "FusedLamb is the engine's own",
    "fused_lion": "FusedLion is the engine's own",
    "utils": "torch flattens tensors",
}
_CLASSES = {
    "AsyncIOBuilder": "async_io",
    "CCLCommBuilder": "deepspeed_ccl_comm",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPUAdamBuilder": "cpu_adam",
    "CPULionBuilder": "cpu_lion",
    "DeepCompileBuilder": "dc",
    "EvoformerAttnBuilder": "evoformer_attn",
    "FPQuantizerBuilder": "fp_quantizer",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
    "GDSBuilder": "gds",
    "InferenceBuilder": "transformer_inference",
    "InferenceCoreBuilder": "inference_core_ops",
    "InferenceCutlassBuilder": "cutlass_ops",
    "PinMemoryBuilder": "pin_memory",
    "QuantizerBuilder": "quantizer",
    "RaggedOpsBuilder": "ragged_device_ops",
    "RaggedUtilsBuilder": "ragged_ops",
    "RandomLTDBuilder": "random_ltd",
    "ShareMemCommBuilder": "deepspeed_shm_comm",
    "SparseAttnBuilder": "sparse_attn",
    "SpatialInferenceBuilder": "spatial_inference",
    "StochasticTransformerBuilder": "stochastic_transformer",
    "TransformerBuilder": "transformer",
    "UtilsBuilder": "utils",
}


class OpBuilder:
    """DeepSpeed's builder of one extension, by name."""

    NAME = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """Tell whether what the extension does is done here."""
        return self.NAME in _SERVED

    def load(self, verbose: bool = False) -> Any:
        """Return the functions of the extension; only those that flatten tensors or move files exist by themselves."""
        if self.NAME == "utils":
            return SimpleNamespace(flatten=_flatten_dense_tensors, unflatten=_unflatten_dense_tensors)
        if self.NAME == "async_io":
            from shardwell.compat.deepspeed_api import aio

            return aio
        why = _SERVED.get(self.NAME, "shardwell has nothing in its place")
        raise ShardwellError(f"{type(self).__name__}().load(): DeepSpeed's extension {self.NAME} is not built: {why}")


class CUDAOpBuilder(OpBuilder):
    """DeepSpeed's name for a builder of an extension for GPUs."""


_BUILDERS: dict[str, type[OpBuilder]] = {
    kind: type(kind, (CUDAOpBuilder,), {"NAME": name, "__doc__": f"The builder of {name}."})
    for kind, name in _CLASSES.items()
}
NotImplementedBuilder = type("NotImplementedBuilder", (OpBuilder,), {"NAME": "deepspeed_not_implemented"})
ALL_OPS: dict[str, OpBuilder] = {kind.NAME: kind() for kind in _BUILDERS.values()}
__compatible_ops__: dict[str, bool] = {name: builder.is_compatible() for name, builder in ALL_OPS.items()}


def __getattr__(name: str) -> Any:
    if name in _BUILDERS:
        return _BUILDERS[name]
    raise AttributeError(f"deepspeed.ops.op_builder has no {name!r}; it has {', '.join(sorted(_BUILDERS))}")


def by_class_name(name: str) -> Any:
    """Return a builder's class; for an unknown name, one that is not compatible."""
    return _BUILDERS.get(name, NotImplementedBuilder)
