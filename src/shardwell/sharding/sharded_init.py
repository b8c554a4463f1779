"""`zero.Init`: construct a model whose parameters are sharded from the start.

Every parameter that a module registers gets an owner immediately, and so does every parameter of a module that is
attached to another module. The parameters of the module that was used last are unsharded. When another module is used
they are sharded, and each rank keeps its shard of rank 0's values (`init_parameters.py`). All ranks run the full
construction, so the same seed gives the same weights as without `Init`. `initialize` then regroups the shards into
units. Until then they are stored on the device where they were made, in host memory or on disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from shardwell.config import Config, load, stage_is_open
from shardwell.errors import ConfigError, ShardwellError
from shardwell.memory import Device, MemoryStats, TemporaryBuffers, Tier
from shardwell.memory.host_memory import returning_freed_pages
from shardwell.memory.local_gpus import default_device
from shardwell.memory.statistics import TIERS_BY_NAME
from shardwell.parallel import start_process_group
from shardwell.sharding import released
from shardwell.sharding.init_arguments import ExtraInitArguments
from shardwell.sharding.init_parameters import InitRegistry, InitStorage
from shardwell.sharding.parameter_subclasses import has_no_size, own_rules
from shardwell.sharding.tiers import TierFactory

_TIERS = {"none": Tier.DEVICE, "cuda": Tier.DEVICE, **TIERS_BY_NAME}

_active: list[tuple[int, ShardedInit]] = []  # the open contexts, with the thread of each; the last one is active
_said: set[str] = set()

_REGISTER = nn.Module.register_parameter


class ShardedInit(contextlib.AbstractContextManager["ShardedInit"]):
    """`zero.Init` without a disk: a subclass says how tiers are opened, since this package knows none of them."""

    @staticmethod
    def _open_tiers(
        settings: Config, folders: list[Path], device: Device, stats: MemoryStats, temporary: TemporaryBuffers
    ) -> TierFactory:
        """Return what stores shards on disk, in these folders."""
        raise NotImplementedError

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        config_dict_or_path: Any = None,
        config: Any = None,
        remote_device: str | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        given = config_dict_or_path if config_dict_or_path is not None else config
        self._settings = load({"zero_optimization": {"stage": 3}} if given is None else given)
        # With "auto", `initialize` will choose stage 3, because the model comes sharded.
        is_sharded = self._settings.zero_optimization.stage == 3 or stage_is_open(self._settings)
        self._enabled = enabled and is_sharded
        if enabled and not self._enabled:
            _say_once(
                f"zero.Init does nothing: its configuration has ZeRO stage {self._settings.zero_optimization.stage}, "
                "which keeps parameters unsharded. Set zero_optimization.stage to 3, or leave zero.Init out."
            )
        self._others = ExtraInitArguments.of(others)
        self._where = self._others.device or default_device()
        self._rest = self._storage(remote_device, dtype, self._others.pin_memory)
        self._scope: contextlib.ExitStack = contextlib.ExitStack()
        self._registry: InitRegistry | None = None
        if module is not None and self._enabled:
            with self:
                self._adopt_all(module)

    def __enter__(self) -> Self:
        if not self._enabled:
            return self
        if _active and _active[-1][0] != threading.get_ident():
            raise ShardwellError(
                "zero.Init is open in another thread: ranks split parameters together, so all of a process's models "
                "must be built in one thread, one after the other."
            )
        start_process_group(self._where)
        if words := self._others.about_groups():
            _say_once(words)
        self._registry = self._registry or InitRegistry(self._where, self._settings, self._rest)
        with contextlib.ExitStack() as scope:
            scope.enter_context(returning_freed_pages(self._where))
            scope.enter_context(self._where)
            scope.callback(_active.pop)
            _active.append((threading.get_ident(), self))
            scope.callback(register_module_parameter_registration_hook(self._on_new_parameter).remove)
            scope.callback(register_module_module_registration_hook(self._on_new_module).remove)
            self._registry.open()
            self._scope = scope.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._enabled or self._registry is None:
            return
        with self._scope:
            if error is not None:
                self._registry.agreement.failures.post_message(f"{type(error).__name__} in zero.Init: {error}")
            else:
                self._registry.close()

    @property
    def is_enabled(self) -> bool:
        """Whether parameters are sharded: not if that was turned off, or at a stage below 3."""
        return self._enabled

    @property
    def _is_listening(self) -> bool:
        """Whether this is the innermost context, and open in this thread: other threads build their own models."""
        return bool(_active) and _active[-1] == (threading.get_ident(), self)

    def _on_new_parameter(self, module: nn.Module, name: str, parameter: Any) -> None:
        """Take over a parameter that a module registers.

        A `register_parameter` that is not torch's, as that of Accelerate's `init_empty_weights`, may replace what is
        registered here. The parameter is then taken over when its module is attached.
        """
        is_torchs = nn.Module.register_parameter is _REGISTER
        if is_torchs and self._is_listening and isinstance(parameter, nn.Parameter):
            self._adopt(module, name, parameter)

    def _on_new_module(self, module: nn.Module, name: str, attached: Any) -> None:
        """Take over the parameters of an attached module that were never registered here: copies, or a loader's."""
        if self._is_listening and isinstance(attached, nn.Module):
            self._adopt_all(attached)

    def _adopt_all(self, module: nn.Module) -> None:
        for child in module.modules():
            if isinstance(child, torch.jit.ScriptModule):
                raise ShardwellError(
                    f"zero.Init cannot split the parameters of a scripted or traced module ({child.original_name}): "
                    "TorchScript reads them where no gather can come first. Attach the module itself, and use "
                    "engine.compile() for speed."
                )
            for name, parameter in child._parameters.items():
                if parameter is not None and not has_no_size(parameter) and not own_rules(parameter):
                    self._adopt(child, name, parameter)

    def _adopt(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if released.is_owned(parameter):
            return
        if has_no_size(parameter):
            _say_once(
                f"zero.Init leaves the parameters of {type(module).__name__} whole, on every rank, until initialize: "
                "they have no size before its first forward, which must come before initialize."
            )
        elif rules := own_rules(parameter):
            raise ShardwellError(
                f"zero.Init cannot split parameter '{name}' of {type(module).__name__}: {rules}, and splitting it over "
                "the ranks would lose that. Build this module outside of zero.Init; it may be attached inside."
            )
        elif not parameter.is_meta:
            assert self._registry is not None
            self._registry.adopt(module, name, parameter)

    def _storage(self, remote_device: str | None, dtype: torch.dtype | None, pin_memory: bool) -> InitStorage:
        """Return how shards are stored: as the caller says, else as the configuration says."""
        settings = self._settings
        block = settings.zero_optimization.offload_param
        if remote_device is None:
            remote_device = block.device
        if remote_device not in _TIERS:
            known = ", ".join(f"'{name}'" for name in _TIERS)
            raise ConfigError(f"zero.Init(remote_device='{remote_device}'): expected one of {known}, or none of them")
        tier = _TIERS[remote_device]
        folders = [Path(path.strip()) for path in (block.nvme_path or "").split(",") if path.strip()]
        if tier is Tier.DISK and not folders:
            raise ConfigError(
                "zero.Init(remote_device='nvme') needs a folder: name one on a local drive, or several with ',' "
                "between them, in zero_optimization.offload_param.nvme_path"
            )
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"zero.Init(dtype={dtype}): expected a floating-point dtype")
        computes_in = torch.bfloat16 if settings.bf16.enabled else torch.float16 if settings.fp16.enabled else None
        return InitStorage(tier, dtype or computes_in, pin_memory, partial(self._open_tiers, settings, folders))


def _say_once(words: str) -> None:
    if words not in _said and os.environ.get("RANK", "0") == "0":
        logging.getLogger("shardwell").warning(words)
    _said.add(words)
