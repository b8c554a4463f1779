"""`Init`: a model whose parameters are born sharded.

Every parameter that a module registers gets a keeper at once. The parameters of the module that was touched last are
whole; when another module is touched they are split, and each rank keeps its shard. An initialiser that comes back to
a released parameter is served: it is gathered, changed, and split again. All ranks run the whole construction, so the
same seed gives the same weights as without `Init`. `initialize` then regroups the shards into units. Until then they
rest on the device where they were made, or, with `remote_device`, in host memory or on disk.
"""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from shardwell.comm import Agreement, Axis, Collectives, Ledger, start_process_group
from shardwell.comm.mesh import world_mesh
from shardwell.config import Config, load
from shardwell.errors import ConfigError
from shardwell.layout import Spec, dense_stride, lay_out
from shardwell.memory import Account, Buffer, Device, Scratch, State, Tier
from shardwell.memory.chest import Chest
from shardwell.memory.device import default_device
from shardwell.memory.disk import DiskSettings, DiskTier
from shardwell.unit import guard
from shardwell.unit.context import Context

_TIERS = {None: Tier.DEVICE, "none": Tier.DEVICE, "cuda": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


class Init(contextlib.AbstractContextManager["Init"]):
    """Inside this context, parameters are split over the ranks as soon as the next module is touched."""

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        config_dict_or_path: Any = None,
        config: Any = None,
        remote_device: str | None = None,
        enabled: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        self._settings = load(config_dict_or_path if config_dict_or_path is not None else config)
        if remote_device not in _TIERS:
            known = ", ".join(f"'{name}'" for name in _TIERS if name)
            raise ConfigError(f"zero.Init(remote_device='{remote_device}'): expected one of {known}, or none of them")
        self._tier = _TIERS[remote_device]
        if self._tier is Tier.DISK and not _folders(self._settings):
            raise ConfigError(
                "zero.Init(remote_device='nvme') needs a folder: name one on a local drive, or several with ',' "
                "between them, in zero_optimization.offload_param.nvme_path"
            )
        self._enabled = enabled and self._settings.zero_optimization.stage == 3
        self._where = torch.device(device) if device is not None else default_device()
        self._handle: RemovableHandle | None = None
        self._scope: contextlib.ExitStack = contextlib.ExitStack()
        self._nursery: Nursery | None = None
        if module is not None and self._enabled:
            with self:
                for child in module.modules():
                    for parameter in child.parameters(recurse=False):
                        self._adopt(child, "", parameter)

    def __enter__(self) -> Init:
        if self._enabled:
            start_process_group(self._where)
            self._nursery = self._nursery or Nursery(self._where, self._settings, self._tier)
            self._scope.enter_context(self._where)
            self._handle = register_module_parameter_registration_hook(self._adopt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            self._scope.close()
            if self._nursery is not None and error is None:
                self._nursery.focus(None)

    def _adopt(self, module: nn.Module, name: str, parameter: Any) -> None:
        if isinstance(parameter, nn.Parameter) and not guard.is_kept(parameter) and not parameter.is_meta:
            assert self._nursery is not None
            self._nursery.adopt(module, name, parameter)


class Nursery:
    """Parameters between their birth and `initialize`. Only those of one module are whole at a time."""

    def __init__(self, where: torch.device, settings: Config, tier: Tier) -> None:
        device, account, ledger = Device(where), Account(), Ledger()
        scratch = Scratch(device, account)
        world = world_mesh(where)
        comm = Collectives(world, device, ledger, scratch)
        comm.agreement = Agreement(world, settings.shardwell.divergence_timeout, comm.cut_links)
        disk = None
        if tier is Tier.DISK:
            disk = DiskTier(_folders(settings), DiskSettings(**settings.aio.model_dump(exclude={"use_gds"})))
        self.context = Context(device, account, scratch, {Axis.WORLD: comm}, disk)
        self.tier = tier  # where shards rest
        self._whole: list[Newborn] = []
        self._numbers = itertools.count()

    def adopt(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        self.focus(id(module))
        name = f"{type(module).__name__}.{name} ({next(self._numbers)})"  # the same on all ranks, and no other's
        self._whole.append(Newborn(self, id(module), name, parameter))

    def focus(self, module: int | None) -> None:
        """Split every whole parameter of other modules, except those that somebody holds or has a view of."""
        self._whole = [newborn for newborn in self._whole if newborn.module == module or not newborn.fold()]

    def unfold(self, newborn: Newborn) -> None:
        self.focus(newborn.module)
        newborn.unfold()
        if newborn not in self._whole:
            self._whole.append(newborn)

    def forget(self, newborn: Newborn) -> None:
        self._whole = [other for other in self._whole if other is not newborn]


class Newborn:
    """One parameter in the nursery, and its keeper."""

    def __init__(self, nursery: Nursery, module: int, name: str, parameter: nn.Parameter) -> None:
        self.module = module
        self._nursery, self._name, self._parameter = nursery, name, parameter
        context = nursery.context
        shape = tuple(parameter.shape)
        spec = Spec(name, shape, dense_stride(shape, parameter.stride()))
        self._layout = lay_out([spec], context.world.mesh.size)
        self._range = self._layout.shard_range(context.world.mesh.rank)
        slot = self._layout.slots[0]
        self._flat = self._buffer(self._layout.padded, parameter.dtype)
        self._flat.tensor[slot.numel :].zero_()
        view = self._flat.tensor.as_strided(slot.shape, slot.stride, slot.offset)
        view.copy_(parameter.data)
        parameter.data = view
        del view  # or it would be counted below
        self._shard: Buffer | None = None
        self._chest: Chest | None = None  # that the shard is in, if it rests on disk
        self._held = 0
        self._is_whole = True
        self._is_folded = False  # for all ranks, though it may still be whole here
        guard.keep(parameter, self)
        self._views = self._flat.num_views

    def _buffer(self, numel: int, dtype: torch.dtype, tier: Tier = Tier.DEVICE) -> Buffer:
        context = self._nursery.context
        return Buffer(context.device, context.account, (State.PARAMETERS, self._name, tier), numel, dtype)

    @property
    def at_rest(self) -> tuple[Tier, int]:
        """Where the values are now, and their bytes."""
        if self._is_whole or self._shard is None:
            return Tier.DEVICE, self._flat.nbytes
        return self._nursery.tier, self._shard.nbytes

    def fold(self) -> bool:
        """Keep this rank's shard and free the rest; false if somebody still looks at the whole.

        A view may live longer on one rank than on another, until garbage is collected there. So it decides when memory
        is freed, and nothing that ranks do together.
        """
        if self._held:
            return False
        self._is_folded = True
        guard.send_away([self._parameter])
        if self._flat.num_views > self._views:
            return False
        self._keep_shard()
        self._flat.drop()
        self._is_whole = False
        return True

    def _keep_shard(self) -> None:
        start, end = self._range
        if self._shard is None:
            self._shard = self._buffer(end - start, self._flat.tensor.dtype, self._nursery.tier)
        with self._fetched(changes=True):
            self._shard.tensor.copy_(self._flat.tensor[start:end])
        if self._chest is None and self._nursery.context.disk is not None:
            self._chest = Chest(self._nursery.context.disk, self._nursery.context.account, self._name)
            self._chest.keep([self._shard.tensor])

    def _fetched(self, *, changes: bool) -> contextlib.AbstractContextManager[None]:
        """Have the shard in memory."""
        return contextlib.nullcontext() if self._chest is None else self._chest.opened(changes=changes)

    def unfold(self) -> None:
        if not self._is_folded:
            return
        if not self._is_whole:
            assert self._shard is not None
            self._flat.grow()
            start, end = self._range
            with self._fetched(changes=False):
                self._flat.tensor[start:end].copy_(self._shard.tensor)
        self._nursery.context.world.gather(self._flat.tensor, f"GATHER {self._name}").wait()
        self._is_folded, self._is_whole = False, True
        guard.bring_back([self._parameter])

    # ------------------------------------------------------------------------------------------ as a keeper

    def serve(self, parameter: nn.Parameter, wanted_by: str) -> None:
        self.open()

    def served(self, parameter: nn.Parameter) -> None:
        self.close(None)

    def surrender(self, parameter: nn.Parameter) -> Tensor:
        self._nursery.unfold(self)
        self._nursery.forget(self)
        guard.let_go(parameter)
        if self._chest is not None:
            self._chest.free()
        if self._shard is not None:
            self._shard.drop()
        return parameter.data

    def open(self) -> None:
        self._nursery.unfold(self)
        self._held += 1

    def close(self, modifier_rank: int | None) -> None:
        self._held -= 1
        if modifier_rank is not None:
            self._nursery.context.world.broadcast(self._flat.tensor, modifier_rank, token=f"WRITE {self._name}")


def _folders(settings: Config) -> list[Path]:
    named = settings.zero_optimization.offload_param.nvme_path or ""
    return [Path(path.strip()) for path in named.split(",") if path.strip()]
