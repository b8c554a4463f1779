"""What the user holds: a module that trains sharded, in a plain PyTorch loop."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwell.comm import Agreement, Ledger, TrafficReport
from shardwell.config import Config
from shardwell.engine.fingerprint import Fingerprint
from shardwell.engine.flow import Flow
from shardwell.engine.hooks import attach
from shardwell.engine.inputs import moved
from shardwell.engine.trace import Trace
from shardwell.errors import BackwardError, NonFiniteError, PeerError, ShardwellError
from shardwell.memory import MemoryReport
from shardwell.optim import ShardedOptimizer
from shardwell.unit import Context


class Engine(nn.Module):
    """Wraps a model whose parameters, gradients and optimizer state are split over the ranks.

    Call it like the model, call `backward` on the loss (or the loss' own), then `step`. Averaging over ranks and
    accumulation steps happens where gradients are reduced; the loss is never touched.
    """

    module: nn.Module
    optimizer: ShardedOptimizer | None
    lr_scheduler: Any
    _flow: Flow
    _context: Context
    _ledger: Ledger
    _agreement: Agreement

    def __init__(
        self, model: nn.Module, config: Config, flow: Flow, context: Context, ledger: Ledger, agreement: Agreement
    ) -> None:
        super().__init__()
        self.module = model
        self.config = config
        self.optimizer = None
        self.lr_scheduler = None
        self.global_steps = 0
        self.micro_steps = 0
        self._flow, self._context, self._ledger, self._agreement = flow, context, ledger, agreement
        self._fingerprint = Fingerprint(model)
        self._handles: list[RemovableHandle] = attach(flow)
        self._spent: weakref.ref[Tensor] | None = None
        self._boundary_override: bool | None = None

    # ------------------------------------------------------------------------------------------------ the loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; inputs are moved to the engine's device and, under mixed precision, to its dtype."""
        self._fingerprint.check()
        self._flow.is_boundary = self.is_gradient_accumulation_boundary()
        self._flow.start_forward()
        args, kwargs = moved((args, kwargs), self.device, self._compute_dtype)
        with self._failing_together("forward"):
            return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run the loss' backward. `scale_wrt_gas=False` is for loops that divide by the accumulation steps by hand."""
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise BackwardError(
                "backward needs a tensor that depends on trainable parameters; this loss does not require a gradient. "
                "Was the model run under torch.no_grad(), or are all its parameters frozen?"
            )
        if self._spent is not None and self._spent() is loss:
            raise BackwardError(
                "backward was called twice on the same loss. Run the forward again, or pass retain_graph=True the "
                "first time if the gradients are meant to be added twice."
            )
        self._flow.divide_by_steps = scale_wrt_gas
        try:
            with self._failing_together("backward"):
                loss.backward(retain_graph=retain_graph)
        finally:
            self._flow.divide_by_steps = True
        if not retain_graph:
            self._spent = weakref.ref(loss)
        return loss

    def step(self) -> None:
        """At a boundary apply the gradients, otherwise only count the micro-step."""
        if self.optimizer is None:
            raise ShardwellError(
                "this engine has no optimizer: pass one to initialize, or name one in the configuration"
            )
        at_boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._boundary_override = None
        if not at_boundary:
            return
        try:
            with self._failing_together("step"):
                self.optimizer.step()
        finally:
            self._ledger.close_step()
            self._agreement.turn_page()
        self.global_steps += 1
        if self.lr_scheduler is not None and not self.optimizer.overflow:
            self.lr_scheduler.step()
        self._print_progress()

    def _print_progress(self) -> None:
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            rates = ", ".join(f"{rate:g}" for rate in self.get_lr())
            print(f"step {self.global_steps}: lr {rates}, gradient norm {self.get_global_grad_norm()}", flush=True)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the coming `step` applies the gradients."""
        if self._boundary_override is not None:
            return self._boundary_override
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide for the coming micro-step, instead of counting."""
        self._boundary_override = is_boundary
        self._flow.is_boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on this rank, in full, until the next backward outside; legal at every stage.

        Costs one gradient buffer of the whole model in the accumulation dtype; `memory()` shows it.
        """
        self._flow.sync = False
        try:
            yield
        finally:
            self._flow.sync = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.optimizer is not None:
            self._flow.finish()
            self.optimizer.zero_grad()

    @contextlib.contextmanager
    def _failing_together(self, where: str) -> Iterator[None]:
        """An error on this rank would leave the others waiting: tell them before it goes up."""
        try:
            yield
        except (PeerError, NonFiniteError):  # all ranks get these together
            raise
        except Exception as error:
            self._agreement.fail(ShardwellError(f"{type(error).__name__} in {where}: {error}"))
            raise

    # ------------------------------------------------------------------------------------------------- readings

    def get_global_grad_norm(self) -> float | None:
        """The norm of the averaged gradient at the last step, before clipping. Waits for the device."""
        norm = self.optimizer.global_norm() if self.optimizer is not None else None
        return None if norm is None or norm.is_meta else float(norm)

    def memory(self) -> MemoryReport:
        """Bytes on this rank by state, unit and tier, now and at the peak."""
        return self._context.account.report()

    def traffic(self) -> TrafficReport:
        """Bytes that this rank received during the last optimizer step, by collective."""
        return self._ledger.last

    def trim(self) -> None:
        """Give freed memory that the allocator keeps back to the system."""
        self._context.device.trim()

    @contextlib.contextmanager
    def record(self) -> Iterator[Trace]:
        """Record what happens as short tokens."""
        trace = Trace([unit.name for unit in self._flow.units])
        before, self._flow.trace = self._flow.trace, trace
        try:
            yield trace
        finally:
            self._flow.trace = before

    @property
    def skipped_steps(self) -> int:
        return self.optimizer.skipped_steps if self.optimizer is not None else 0

    @property
    def device(self) -> torch.device:
        return self._context.device.torch_device

    @property
    def world_size(self) -> int:
        return self._context.world.mesh.size

    @property
    def global_rank(self) -> int:
        return self._context.world.mesh.rank

    @property
    def _compute_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.config.bf16.enabled else None

    def train_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.train_micro_batch_size_per_gpu or 1

    def gradient_accumulation_steps(self) -> int:
        return self.config.gradient_accumulation_steps or 1

    def gradient_clipping(self) -> float:
        return self.config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        return self.config.zero_optimization.stage

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer is not None else []

    # ---------------------------------------------------------------------------------------------------- the end

    def destroy(self) -> None:
        """Unhook the model and drop gradients and optimizer state. Parameters of released units stay away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
            self.optimizer.state.clear()
        self._context.world.mesh.close()
        self.trim()

    def __getattr__(self, name: str) -> Any:
        """What the engine does not have, the model may have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):
                raise
            return getattr(module, name)
