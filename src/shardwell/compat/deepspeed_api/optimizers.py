"""DeepSpeed's optimizers by name, each an optimizer of torch or of the engine whose step it inherits.

The engine knows the step, so shards are updated by the same kernels as with torch's own class: fused on a device, the
host kernels under offload. What torch's or the engine's optimizer cannot do is refused with the way out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from shardwell.compat.deepspeed_api.op_builders import __compatible_ops__ as COMPATIBLE_OPS
from shardwell.errors import ConfigError
from shardwell.optim.lamb import Lamb
from shardwell.optim.lion import Lion
from shardwell.optim.muon import Muon

Betas = tuple[float, float]
_FUSED_ON = ("cpu", "cuda")


def _refuse(name: str, option: str, value: Any, why: str) -> None:
    raise ConfigError(f"{name}: {option}={value!r} is not supported: {why}")


class _Adam(torch.optim.Adam):
    """Adam of torch with DeepSpeed's choice of weight decay, by its fused kernel."""

    adam_w_mode: bool

    def _begin(self, params: ParamsT, adam_w_mode: bool, bias_correction: bool, **options: Any) -> None:
        name = type(self).__name__
        if not bias_correction:
            _refuse(name, "bias_correction", False, "use True, or pass an optimizer of your own")
        self.adam_w_mode = adam_w_mode
        super().__init__(params, fused=True, decoupled_weight_decay=adam_w_mode, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which decays weights as the others do, whatever optimizer it comes from."""
        if param_group.get("amsgrad", self.defaults["amsgrad"]):
            _refuse(type(self).__name__, "amsgrad", True, "use torch.optim.AdamW(amsgrad=True)")
        if not param_group.get("bias_correction", True):
            _refuse(type(self).__name__, "bias_correction", False, "use True, or pass an optimizer of your own")
        param_group["decoupled_weight_decay"] = self.adam_w_mode
        if param_group.get("fused") is None and not param_group.get("foreach"):
            tensors = param_group["params"]
            tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            param_group["params"] = tensors
            only = [one[1] if isinstance(one, tuple) else one for one in tensors]
            param_group["fused"] = all(tensor.device.type in _FUSED_ON for tensor in only)
        super().add_param_group(param_group)


class FusedAdam(_Adam):
    """Adam with decoupled weight decay, unless `adam_w_mode` is false; on the CPU, too."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        self.set_grad_none = set_grad_none
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        self._begin(params, adam_w_mode, bias_correction, **options)


class DeepSpeedCPUAdam(_Adam):
    """Adam for states in host memory; the engine steps it by its host kernels, which keep fp32 states.

    Outside an engine the moments have the dtype of the parameters, as `fp32_optimizer_states=False` asks.
    """

    optimizer_id = 0

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        self.opt_id, DeepSpeedCPUAdam.optimizer_id = DeepSpeedCPUAdam.optimizer_id, DeepSpeedCPUAdam.optimizer_id + 1
        self.fp32_optimizer_states = fp32_optimizer_states
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        self._begin(model_params, adamw_mode, bias_correction, **options)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad for states in host memory. It takes torch's own arguments, too, and `adamw_mode`, which clients pass."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        *,
        adamw_mode: bool = False,
        **options: Any,
    ) -> None:
        if amsgrad:
            _refuse("DeepSpeedCPUAdagrad", "amsgrad", True, "Adagrad has no such variant; use False")
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay, **options)


class DeepSpeedCPULion(Lion):
    """Lion for states in host memory, with DeepSpeed's defaults."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
        *,
        adamw_mode: bool = True,
    ) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(model_params, lr, betas, weight_decay)


class FusedLion(Lion):
    """Lion with DeepSpeed's defaults."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, betas, weight_decay)


class FusedLamb(Lamb):
    """LAMB with DeepSpeed's arguments; over shards it needs one all-reduce of sums in each step."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            _refuse("FusedLamb", "amsgrad", True, "LAMB has no such variant here; use False")
        if eps_inside_sqrt:
            _refuse("FusedLamb", "eps_inside_sqrt", True, "eps is added to the square root, as in the paper; use False")
        if max_grad_norm:
            _refuse("FusedLamb", "max_grad_norm", max_grad_norm, "write gradient_clipping into the configuration")
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction, max_coeff, min_coeff)


class MuonWithAuxAdam(Muon):
    """Muon for parameter groups with `use_muon` true, and Adam for the others; every group must say which.

    `ns_method` chooses between ways to compute the same orthogonalisation, and changes nothing.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        adam_optimizer: Any = None,
        adam_optimizer_kwargs: dict[str, Any] | None = None,
        adam_w_mode: bool = True,
        fallback_to_inline: bool = False,
    ) -> None:
        if not adam_w_mode:
            _refuse("MuonWithAuxAdam", "adam_w_mode", False, "the parameters beside Muon's are stepped by AdamW")
        super().__init__([self._completed(dict(group)) for group in param_groups], weight_decay=0.0)

    @staticmethod
    def _completed(group: dict[str, Any]) -> dict[str, Any]:
        if "use_muon" not in group:
            raise ConfigError("MuonWithAuxAdam: a parameter group has no use_muon; set it to true or false in each")
        group.pop("ns_method", None)
        if group["use_muon"]:
            return {"lr": 0.02, **group}
        return {"lr": 3e-4, **group, "adam_eps": group.pop("eps", 1e-10)}


SingleDeviceMuonWithAuxAdam = MuonWithAuxAdam

# What a configuration names: DeepSpeed's class for a device, and for states in host memory.
_CLASSES: dict[Any, tuple[type[torch.optim.Optimizer], type[torch.optim.Optimizer]]] = {
    torch.optim.Adam: (FusedAdam, DeepSpeedCPUAdam),
    torch.optim.AdamW: (FusedAdam, DeepSpeedCPUAdam),
    Lion: (FusedLion, DeepSpeedCPULion),
}
_OPTIONS = {"lr", "betas", "eps", "weight_decay"}


def of_deepspeed(factory: Any, options: dict[str, Any], *, on_host: bool) -> tuple[Any, dict[str, Any]]:
    """Return DeepSpeed's class for an optimizer of torch's or of the engine's, if it has one for these options."""
    asked = {name: value for name, value in options.items() if name not in ("fused", "amsgrad")}
    if factory not in _CLASSES or options.get("amsgrad") or options.get("fused") is False or asked.keys() - _OPTIONS:
        return factory, options
    kind = _CLASSES[factory][on_host]
    if issubclass(kind, _Adam):
        asked["adamw_mode" if on_host else "adam_w_mode"] = factory is torch.optim.AdamW
    return kind, asked


__all__ = [
    "COMPATIBLE_OPS",
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "Muon",
    "MuonWithAuxAdam",
    "SingleDeviceMuonWithAuxAdam",
    "of_deepspeed",
]
