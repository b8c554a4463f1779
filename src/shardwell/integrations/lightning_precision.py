"""Lightning's precision plugins around an engine: the engine scales losses, computes in 16 bits and clips.

Lightning chooses a plugin by its argument `precision`; a strategy puts one of these around it. The dtypes of inputs,
outputs and new modules stay the business of the plugin that Lightning chose. Neither class imports Lightning: each
becomes one of its plugins by inheriting from `Precision` of a package, see `lightning.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from shardwell.engine import Engine
from shardwell.errors import ShardwellError

KNOWN = ("32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed")


class AroundPlugin:
    """The base of both plugins: they ask the plugin that Lightning chose for dtypes."""

    plugin: Any
    precision: str

    def _wrap(self, plugin: Any) -> None:
        precision = str(getattr(plugin, "precision", ""))
        if precision not in KNOWN or type(plugin).__name__ not in (
            "Precision",
            "HalfPrecision",
            "MixedPrecision",
            "DoublePrecision",
        ):
            raise ShardwellError(
                f"{type(plugin).__name__} is not supported with a shardwell strategy: it replaces layers or steps "
                f"optimizers itself. Use precision= with one of {', '.join(KNOWN)}."
            )
        self.plugin, self.precision = plugin, precision

    @property
    def is_mixed(self) -> bool:
        """Whether forwards run under autocast."""
        return self.precision.endswith("-mixed")

    @property
    def scaler(self) -> Any:
        """The GradScaler that Lightning made; the engine takes its settings and scales by itself."""
        return getattr(self.plugin, "scaler", None)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast a model to a precision that is true to the end, unless it was made in it."""
        wanted = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}.get(self.precision)
        floating = (t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point())
        if wanted is None or all(tensor.dtype is wanted for tensor in floating):
            return module
        converted: nn.Module = self.plugin.convert_module(module)
        return converted

    def convert_input(self, data: Any) -> Any:
        """Convert what goes into the model."""
        return self.plugin.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        """Convert what comes out of the model."""
        return self.plugin.convert_output(data)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new tensors have this precision."""
        context: AbstractContextManager[Any] = self.plugin.tensor_init_context()
        return context

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new modules have this precision."""
        context: AbstractContextManager[Any] = self.plugin.module_init_context()
        return context

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context of a forward."""
        if self.is_mixed:  # without torch's cache of casts, which would keep a copy of every weight used
            dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
            return torch.autocast(self.plugin.device, dtype=dtype, cache_enabled=False)
        context: AbstractContextManager[Any] = self.plugin.forward_context()
        return context

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the engine saves its loss scale."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing, also not the scale of a GradScaler."""


class TrainerPrecision(AroundPlugin):
    """The precision plugin of the Trainer's strategy."""

    engine: Engine | None = None
    clipped: tuple[nn.Parameter, ...] = ()  # the parameters of the optimizer, which Lightning clips
    is_overridden: Callable[[str, Any], bool]  # Lightning's own function, of its package

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward through the engine, or by the module's own `backward` hook."""
        is_plain = not args and not set(kwargs) - {"retain_graph", "create_graph"}
        if self.engine is None or not is_plain or type(self).is_overridden("backward", model):
            model.backward(tensor, *args, **kwargs)
        else:
            self.engine.backward(tensor, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, then Lightning's hooks and clipping, then the engine's step."""
        if isinstance(optimizer, LBFGS):
            raise ShardwellError("LBFGS evaluates its closure many times in a step, which sharded updates cannot do")
        if kwargs:
            raise ShardwellError(f"optimizer.step takes no {', '.join(sorted(kwargs))} here: the engine steps")
        result = closure()
        self._after_closure(model, optimizer)  # type: ignore[attr-defined]  # Lightning's: hooks, then clipping
        optimizer.step()
        return result

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm of all ranks' gradients; the engine's step does it if its configuration says the same."""
        if self.engine is not None and self.engine.gradient_clipping() == float(clip_val):
            return
        torch.nn.utils.clip_grad_norm_(self._clipped(), clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element of the averaged gradients."""
        torch.nn.utils.clip_grad_value_(self._clipped(), clip_val)

    def _clipped(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.clipped if parameter.grad is not None]


class FabricPrecision(AroundPlugin):
    """The precision plugin of Fabric's strategy, which itself runs backward, step and clipping."""

    def main_params(self, optimizer: Optimizer) -> Iterable[Tensor]:
        """Refuse what would be shards of this rank."""
        raise ShardwellError("an optimizer's param_groups are this rank's shards; use model.parameters()")
