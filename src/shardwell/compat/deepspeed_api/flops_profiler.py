"""DeepSpeed's FLOPs profiler: the operations of a model's forward, counted by torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwell.memory.statistics import render
from shardwell.monitor.flops_profile import FlopCount
from shardwell.monitor.numbers import counted, milliseconds

_MACS = 2  # a multiply-accumulate is two floating-point operations


class FlopsProfiler:
    """A profiler of one model, between `start_profile` and `stop_profile`."""

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started = False
        self._count = FlopCount(model)

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Count from here; operations of all modules count, also of those in `ignore_list`."""
        self._count.begin()
        self.started = True

    def stop_profile(self) -> None:
        """Stop counting."""
        if self._count.is_open:
            self._count.end()

    def reset_profile(self) -> None:
        """Forget what was counted."""
        self.stop_profile()
        self._count = FlopCount(self.model)

    def end_profile(self) -> None:
        """Stop, and forget what was counted."""
        self.reset_profile()
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Return the FLOPs of the forward."""
        return f"{counted(self._count.total, ' ')}FLOPs" if as_string else self._count.total

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return the multiply-accumulates of the forward."""
        macs = self._count.total // _MACS
        return f"{counted(macs, ' ')}MACs" if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Return the seconds of the forward on the host."""
        return milliseconds(self._count.seconds) if as_string else self._count.seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Return the number of the model's parameters."""
        number = self._count.parameters_of("")
        return counted(number, " ").strip() if as_string else number

    def is_expert_tensor_parallelism_enabled(self) -> bool:
        """Return False: experts are not split."""
        return False

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print what was counted, or write it to a file."""
        text = self._count.report(
            depth=module_depth, top=top_modules, detailed=detailed, recomputed=self.recompute_fwd_factor
        )
        if output_file is None:
            print(text, flush=True)
        else:
            with open(output_file, "w", encoding="utf-8") as file:
                file.write(text + "\n")

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the table of modules."""
        print(render(self._count.table(module_depth)), flush=True)


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Run a model once, and return its FLOPs, multiply-accumulates and parameters."""
    if input_shape is not None:
        parameter = next(model.parameters())
        args = [torch.ones(tuple(input_shape), dtype=parameter.dtype, device=parameter.device)]
    profiler = FlopsProfiler(model)
    model.eval()
    run: Any = model.generate if mode == "generate" else model
    with torch.no_grad():
        for _ in range(warm_up):
            run(*args, **(kwargs or {}))
        profiler.start_profile(ignore_modules)
        run(*args, **(kwargs or {}))
        profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    return profiler.get_total_flops(as_string), profiler.get_total_macs(as_string), profiler.get_total_params(as_string)
