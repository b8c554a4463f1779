"""The monitor of rank 0: it notes losses and times as the engine works, and reports every `steps_per_print` steps.

In a step whose values nobody will read it counts the samples, and that is all (`_wants_values`). Of the others it keeps
references to scalars and, with `wall_clock_breakdown`, records events: the host waits for the device when a report is
due, and not before.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwell.config import Config
from shardwell.memory import Device, MemoryReport, MemoryStats, Tier
from shardwell.memory.statistics import human
from shardwell.monitor.comms_log import CommsLog
from shardwell.monitor.display import Display
from shardwell.monitor.flops import flops_per_token, peak_flops
from shardwell.monitor.flops_profile import FlopCount
from shardwell.monitor.inputs import BatchSize, loss_in
from shardwell.monitor.numbers import counted, duration, short
from shardwell.monitor.phases import Phases, phases_line
from shardwell.monitor.records import PREFIX, Output, StepRecord, StepValues
from shardwell.monitor.writers import MetricEvent, writers_for
from shardwell.parallel.traffic import TrafficStats

_DEFAULT_INTERVAL = 10  # steps, if metrics are written and no lines are asked for


class WatchedEngine(Protocol):
    """The members of an engine that a monitor reads."""

    settings: Config
    global_steps: int
    global_samples: int
    lr_scheduler: Any
    optimizer: Any
    module: nn.Module

    @property
    def world_size(self) -> int: ...
    @property
    def data_size(self) -> int: ...
    @property
    def skipped_steps(self) -> int: ...
    @property
    def loss_scale(self) -> float: ...
    def get_lr(self) -> list[float]: ...
    def memory(self) -> MemoryReport: ...
    def gradient_accumulation_steps(self) -> int: ...
    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool = False) -> Any: ...
    def register_forward_hook(self, hook: Callable[..., Any], *, always_call: bool = False) -> Any: ...


class Monitor:
    """The monitor of one engine. `total_steps`, where it is known, gives the lines an ETA and the bar an end."""

    enabled = True

    def __init__(self, engine: WatchedEngine, device: Device, traffic: TrafficStats, memory_stats: MemoryStats) -> None:
        config = engine.settings
        self._engine = weakref.ref(engine)
        self._config, self._device, self._memory_stats = config, device, memory_stats
        self._interval = config.steps_per_print or _DEFAULT_INTERVAL
        self._output = Output(Display(with_bar=bool(config.steps_per_print)), writers_for(config))
        self.total_steps = _planned_steps(config, engine.lr_scheduler)
        self._losses: list[Tensor] = []
        self._shown: Tensor | None = None  # the model's own loss, for loops that call loss.backward()
        self._sums_losses = False
        self._rate: float | None = None
        self._flops: float | None = None  # of a token
        dtype = torch.bfloat16 if config.bf16.enabled or config.torch_autocast.enabled else None
        self._peak = peak_flops(device.name, torch.float16 if config.fp16.enabled else dtype)
        self._profiled_samples = 0  # of the forward whose FLOPs were counted
        self._profile = FlopCount(engine.module) if config.flops_profiler.enabled else None
        self.phases = Phases(device) if config.wall_clock_breakdown else None
        self.comms = CommsLog(config.comms_logger, device, traffic) if config.comms_logger.enabled else None
        traffic.observer = self.comms
        self._wants_all = (
            bool(self._output.writers) or self.phases is not None
        )  # files have all steps, phases all times
        self.begin_anew()
        engine.register_forward_pre_hook(self._forward_begins, with_kwargs=True)
        engine.register_forward_hook(self._forward_ends, always_call=self._profile is not None)  # a count must end
        weakref.finalize(engine, self._output.close)

    # ------------------------------------------------------------------------------------------------ the engine calls

    def begin_anew(self) -> None:
        """Measure from here, at the step that the engine is at: what came before, such as a load, is no step."""
        if (engine := self._engine()) is not None:
            self._wants_values = self._wants_all or (engine.global_steps + 1) % self._interval == 0
            self._reported, self._began, self._skipped = engine.global_steps, time.perf_counter(), engine.skipped_steps
            self._size = BatchSize()  # of the micro-steps since the last report

    def _forward_begins(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        self._size.add(args, kwargs)
        if self._wants_values:
            self._take_shown_loss()
        if (profile := self._profile) is not None:
            is_due = engine.global_steps + 1 >= self._config.flops_profiler.profile_step
            if is_due and not profile.by_module and not profile.is_open:
                profile.begin()

    def _forward_ends(self, engine: Any, args: Any, output: Any) -> None:
        if self._profile is not None and self._profile.is_open:
            self._profile.end()
            self._show_profile(self._profile)
        if self._wants_values and torch.is_grad_enabled():
            self._mark("forward")
            self._shown = loss_in(output)

    def backward_begins(self, loss: Tensor, *, is_divided: bool) -> None:
        """Note the loss of a micro-step; `is_divided`: by the accumulation steps."""
        if self._wants_values:
            self._mark("other")
            self._sums_losses, self._shown = is_divided, None
            self._losses.append(loss.detach().reshape(()))

    def backward_ends(self) -> None:
        """Note the end of `engine.backward`."""
        self._mark("backward")

    def batch_ends(self, batches: Iterable[Any], loss: Tensor) -> None:
        """Note the micro-batches of a pipeline's step and their average loss, when all its passes have ended."""
        for batch in batches:
            self._size.add((batch,), {})
        self._losses.append(loss.detach().reshape(()))
        self._mark("forward and backward")

    def step_begins(self) -> None:
        """Note that gradients are applied. After a plain `loss.backward()` this is the end of the backward, too."""
        if self._wants_values and (engine := self._engine()) is not None:
            self._take_shown_loss()
            self._rate = next(iter(engine.get_lr()), None)  # before the schedule's step

    def _take_shown_loss(self) -> None:
        """End what follows a forward: it was the backward, if `engine.backward` was not called and a loss is known."""
        if self._shown is None:
            self._mark("other")
        else:
            self._losses.append(self._shown)
            self._sums_losses, self._shown = False, None
            self._mark("backward")

    def step_ends(self) -> None:
        """Note a step, and report if that is due."""
        engine = self._engine()
        if engine is None:
            return
        step = engine.global_steps
        is_due = step % self._interval == 0 or step == self.total_steps
        if is_due or self._wants_values:
            self._mark("step")
            if is_due or self._output.writers:
                self._keep(engine, step)
            self._losses.clear()
            if is_due:
                self._report(engine)
        self._wants_values = (step + 1) % self._interval == 0 or self._wants_all or step + 1 == self.total_steps
        if self._output.display.wants_bar:
            self._output.display.tick(step, self.total_steps)

    def _keep(self, engine: WatchedEngine, step: int) -> None:
        """Keep the values of a step until they are read."""
        optimizer = engine.optimizer
        norm = None if optimizer is None else optimizer.global_norm()
        is_scaled = optimizer is not None and self._config.fp16.enabled
        scaled = optimizer.loss_scale if is_scaled else None  # `DeepSpeedEngine.loss_scale` is a method
        losses = tuple(self._losses)
        record = StepRecord(step, engine.global_samples, losses, self._sums_losses, norm, self._rate, scaled)
        self._output.waiting.append(record)

    def _mark(self, phase: str) -> None:
        if self.phases is not None:
            self.phases.mark(phase)

    # -------------------------------------------------------------------------------------------------- users may call

    def write_events(self, events: Iterable[MetricEvent]) -> None:
        """Write metrics of your own, as (name, value, x), to all places that the configuration names."""
        self._output.write((name, float(value), int(place)) for name, value, place in events)

    def write_steps(self) -> None:
        """Write the steps that wait for the next report to the files now. This waits for the device."""
        if self._output.writers and self._output.waiting:
            self._output.read()

    def close(self) -> None:
        """Write what waits, and close files and bar."""
        self._output.close()

    # ---------------------------------------------------------------------------------------------------------- report

    def _report(self, engine: WatchedEngine) -> None:
        """Print the lines that are due. This waits for the device."""
        values = self._output.read()
        now = time.perf_counter()
        steps, seconds = engine.global_steps - self._reported, now - self._began
        if steps < 1 or not values:  # the script has set `global_steps`: nothing was measured
            self.begin_anew()
            return
        speed = self._speed(engine, seconds)
        if self._output.writers:
            self._output.write(
                (PREFIX + name, value, engine.global_samples)
                for name, value in {"seconds_per_step": seconds / steps, **speed}.items()
            )
        show = self._output.display.line
        if self._config.steps_per_print:
            show(self._line(engine, values[-1], seconds / steps, speed))
        if self.phases is not None:
            show(phases_line(self.phases.take(), steps))
        if self._config.memory_breakdown:
            show(str(engine.memory()))
        for line in self.comms.take() if self.comms is not None else ():
            show(line)
        self.begin_anew()

    def _speed(self, engine: WatchedEngine, seconds: float) -> dict[str, float]:
        """Return samples and tokens a second over all ranks; TFLOP/s and their share of the peak on this one."""
        size, ranks = self._size, engine.data_size
        found = {"samples_per_sec": size.samples * ranks / seconds}
        if size.tokens:
            found["tokens_per_sec"] = size.tokens * ranks / seconds
            if self._flops is None:
                self._flops = flops_per_token(engine.module, size.length) or 0.0
        per_second = self._flops_done(size) / seconds
        if per_second:
            found["tflops"] = per_second / 1e12
            if self._peak is not None:
                found["mfu"] = per_second / self._peak
        return found

    def _flops_done(self, size: BatchSize) -> float:
        """Return the model FLOPs since the last report: as profiled, or as they follow from the parameters."""
        if self._profile is not None and self._profile.total and self._profiled_samples:
            return 3.0 * self._profile.total * size.samples / self._profiled_samples
        return (self._flops or 0.0) * size.tokens

    def _line(self, engine: WatchedEngine, last: StepValues, seconds: float, speed: Mapping[str, float]) -> str:
        total = self.total_steps
        parts = [f"step {last.record.step}" + (f"/{total}" if total else "")]
        parts += [] if last.loss is None else [f"loss {short(last.loss)}"]
        parts += [] if last.norm is None else [f"norm {short(last.norm)}"]
        parts += [] if last.record.rate is None else [f"lr {short(last.record.rate)}"]
        parts += [] if last.record.loss_scale is None else [f"scale {short(last.record.loss_scale)}"]
        if engine.skipped_steps > self._skipped:
            parts.append(f"skipped {engine.skipped_steps - self._skipped}")
        parts.append(f"{short(seconds)} s/step")
        if "tokens_per_sec" in speed:
            parts.append(f"{counted(speed['tokens_per_sec'])} tokens/s")
        else:
            parts.append(f"{counted(speed['samples_per_sec'])} samples/s")
        if "tflops" in speed:
            share = f" (MFU {speed['mfu']:.1%})" if "mfu" in speed else ""
            parts.append(f"{counted(1e12 * speed['tflops'], ' ')}FLOP/s{share}")
        parts.append(self._memory())
        if total and total > last.record.step:
            parts.append(f"ETA {duration((total - last.record.step) * seconds)}")
        return "  ".join(parts)

    def _memory(self) -> str:
        """Return the bytes on each tier; of a GPU the most that all tensors had, with activations."""
        sizes = {tier: self._memory_stats.total(tier) for tier in Tier}
        peak = self._device.peak_bytes()
        words = [f"{tier.value} {human(size)}" for tier, size in sizes.items() if size]
        if peak:
            words[:1] = [f"device {human(sizes[Tier.DEVICE])} (peak {human(peak)})"]
        return ", ".join(words)

    def _show_profile(self, profile: FlopCount) -> None:
        self._profiled_samples, block = self._size.last_samples, self._config.flops_profiler
        text = profile.report(
            depth=block.module_depth,
            top=block.top_modules,
            detailed=block.detailed,
            recomputed=block.recompute_fwd_factor,
        )
        if block.output_file is None:
            self._output.display.line(text)
        else:
            with open(block.output_file, "w", encoding="utf-8") as file:
                file.write(text + "\n")


def _planned_steps(config: Config, schedule: Any) -> int | None:
    """Return how many steps the schedule is made for, which is how long training is likely to go on."""
    found = (config.scheduler.params if config.scheduler is not None else {}).get("total_num_steps")
    for name in ("total_num_steps", "total_steps", "T_max"):
        found = found or getattr(schedule, name, None)
    return int(found) if isinstance(found, int | float) and found >= 1 else None
