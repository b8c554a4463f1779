"""The parameters of `zero.Init` until `initialize`: each rank keeps its shard of each.

A parameter is unsharded while its module is being built, in the dtype that the module gave it. Then it is sharded: rank
0 scatters its values, and each rank keeps its shard, in the dtype that the configuration computes in. A later use
all-gathers it again, and changes that are made then count as rank 0 has them. All collectives here follow from what the
program does to modules and parameters, and never from garbage collection.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.config import Config
from shardwell.errors import ShardwellError
from shardwell.memory import Device, FlatBuffer, MemoryStats, StateKind, TemporaryBuffers, Tier
from shardwell.parallel import Agreement, Collectives, MeshRoles, TrafficStats
from shardwell.parallel.mesh import world_mesh
from shardwell.sharding import released
from shardwell.sharding.context import EngineContext
from shardwell.sharding.layout import Layout, TensorSpec, make_layout
from shardwell.sharding.spec import casts
from shardwell.sharding.tiers import SwappedOut, TierFactory

_ADVICE = (
    "From zero.Init to initialize every rank must build the same modules and use the same parameters. To change a "
    "parameter on one rank, write `with shardwell.zero.GatheredParameters(parameter, modifier_rank=0):` on all ranks, "
    "and the change inside it."
)


@dataclass(frozen=True)
class InitStorage:
    """The way in which shards are stored until `initialize` takes them over."""

    tier: Tier
    dtype: torch.dtype | None  # None: as the modules made them
    pinned: bool
    open_tiers: Callable[[Device, MemoryStats, TemporaryBuffers], TierFactory]  # called if they are stored on disk


class InitRegistry:
    """The registry of the parameters of `zero.Init`; only those of one module are unsharded at a time."""

    def __init__(self, where: torch.device, settings: Config, rest: InitStorage) -> None:
        device, memory_stats, traffic_stats = Device(where, keep_pages=False), MemoryStats(), TrafficStats()
        temporary = TemporaryBuffers(device, memory_stats)
        world = world_mesh(where)
        comm = Collectives(world, device, traffic_stats, temporary)
        comm.agreement = self.agreement = Agreement(world, settings.shardwell.divergence_timeout, comm.abort_links)
        self.agreement.advise, self.agreement.probe = (lambda ours, theirs: _ADVICE), comm.links.probe
        tiers = rest.open_tiers(device, memory_stats, temporary) if rest.tier is Tier.DISK else None
        self._begin(EngineContext(device, memory_stats, temporary, MeshRoles.for_one_axis(comm), tiers), rest)

    def _begin(self, context: EngineContext, rest: InitStorage) -> None:
        self.context, self.rest = context, rest
        self.is_open = False  # a `zero.Init` context is open
        self._whole: list[InitParameter] = []
        self._all: weakref.WeakSet[InitParameter] = weakref.WeakSet()
        self._numbers = itertools.count()

    def adopt(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Take over a parameter, and shard those of other modules."""
        owner = weakref.ref(module)
        self.shard_all_but(owner)
        name = f"{type(module).__name__}.{name} ({next(self._numbers)})"  # the same on all ranks, and unique
        one = InitParameter(self, owner, name, parameter)
        self._whole.append(one)
        self._all.add(one)

    def open(self) -> None:
        """Begin the construction of modules."""
        self.is_open = True

    def close(self) -> None:
        """End the construction: all parameters are sharded, in the dtype in which they are stored."""
        self.is_open = False
        self.shard_all_but(None)
        for one in list(self._all):
            one.settle()

    def shard_all_but(self, module: weakref.ref[nn.Module] | None) -> None:
        """Shard every unsharded parameter of other modules, except those that are held or have a view.

        Modules are compared by weak references, of which a module has one. An `id` may be reused once a module is gone,
        and the moment when it goes differs between ranks.
        """
        self._follow_swaps()
        self._whole = [one for one in self._whole if one.module is module or not one.shard()]

    def _follow_swaps(self) -> None:
        """Update owners after `torch.utils.swap_tensors`, which exchanges or removes the owners of parameters."""
        moved = [n for n in self._whole if released.owner_or_none(n.parameter) is not n]
        for one in moved:
            owner = released.owner_or_none(one.parameter)
            if isinstance(owner, InitParameter):
                owner.belong_to(one.parameter)
        for one in moved:
            if released.owner_or_none(one.parameter) is None:
                released.set_owner(one.parameter, one)

    def unshard(self, one: InitParameter, *, meet: bool) -> None:
        """Make a parameter unsharded.

        With `meet`, some ranks may never arrive: the others wait for them no longer than the time limit. They meet
        before other parameters are sharded, because that is a collective as well.
        """
        if meet:
            one.meet()
        self.shard_all_but(one.module)
        one.unshard(meet=meet)
        if one not in self._whole:
            self._whole.append(one)

    def sharing(self, one: InitParameter, values: Tensor) -> list[InitParameter]:
        """Return the other parameters that have the memory of these values."""
        storage = values.untyped_storage()._cdata
        return [other for other in self._all if other is not one and other.looks_at(storage)]

    def forget(self, one: InitParameter) -> None:
        """Remove a parameter from the registry."""
        self._whole = [other for other in self._whole if other is not one]
        self._all.discard(one)


class PartRegistry(InitRegistry):
    """The registry of parts of parameters of `zero.Init`, which were cut: the ranks with the same part share it."""

    def __init__(self, context: EngineContext, rest: InitStorage) -> None:
        stats, self.agreement = MemoryStats(), context.roles.agreement
        temporary = TemporaryBuffers(context.device, stats)
        self._begin(EngineContext(context.device, stats, temporary, context.roles), rest)

    def keep(self, name: str, parameter: nn.Parameter, module: weakref.ref[nn.Module]) -> None:
        """Shard a parameter that is a part, and which all ranks call by this name, until a unit takes it over."""
        one = PartParameter(self, module, name, parameter)
        self._all.add(one)
        one.shard()


class PartKeeper:
    """Keeps parts of parameters sharded over the ranks that have the same ones, from their cut to their units."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._registry: PartRegistry | None = None

    def keep(self, name: str, parameter: nn.Parameter, before: released.ParameterOwner | None) -> None:
        """Shard a parameter that was cut, if it comes from `zero.Init`: `before` was the owner of the whole one."""
        if not isinstance(before, InitParameter) or self._context.roles.shard.rank_group.size == 1:
            return
        if before.rest.tier is not Tier.DISK:
            self._registry = self._registry or PartRegistry(self._context, before.rest)
            self._registry.keep(name, parameter, before.module)


class InitParameter:
    """One parameter of `zero.Init`, and its owner."""

    _layout: Layout
    _flat: FlatBuffer

    def __init__(
        self, registry: InitRegistry, module: weakref.ref[nn.Module], name: str, parameter: nn.Parameter
    ) -> None:
        self.module = module
        self._registry, self._name, self.parameter = registry, name, parameter
        self._shard: FlatBuffer | None = None
        self._swapped: SwappedOut | None = None  # holds the shard, if it is stored on disk
        self._held = 0
        self._is_whole = True
        self._is_sharded = False  # on all ranks, though the full values may still be allocated here
        self._shared: list[list[str]] = []  # one per parameter that had the same memory: which of the two is in a unit
        # this rank's part of the scattered values, while a view may still write to the full ones
        self._scattered: Tensor | None = None
        released.set_owner(parameter, self)
        self._take(parameter.data)

    def _take(self, values: Tensor) -> None:
        """Move the parameter into a flat buffer of its present shape and dtype."""
        context = self._registry.context
        self._layout = make_layout(
            [TensorSpec.dense(self._name, values.shape, values.stride())], context.roles.shard.rank_group.size
        )
        self._flat = self._buffer(self._layout.padded, values.dtype)
        slot = self._layout.slots[0]
        self._flat.tensor[slot.numel :].zero_()
        self._make_view()
        self.parameter.data.copy_(values)

    def _make_view(self) -> None:
        slot = self._layout.slots[0]
        self.parameter.data = self._flat.tensor.as_strided(slot.shape, slot.stride, slot.offset)
        self._views, self._uses = self._flat.num_aliases, self._num_uses()

    def _num_uses(self) -> int:
        """Return how many C++ owners the parameter has: a graph that saved it for backward, a scripted module."""
        with torch._C.DisableTorchFunctionSubclass():
            return int(self.parameter._use_count())  # type: ignore[attr-defined]

    def _buffer(self, numel: int, dtype: torch.dtype, tier: Tier = Tier.DEVICE, *, pinned: bool = False) -> FlatBuffer:
        context = self._registry.context
        entry = StateKind.PARAMETERS, self._name, tier
        return FlatBuffer(context.device, context.memory_stats, entry, numel, dtype, pinned=pinned)

    @property
    def agreement(self) -> Agreement:
        """Return the agreement over which the ranks meet."""
        return self._registry.agreement

    @property
    def tier_and_bytes(self) -> tuple[Tier, int]:
        """Return the tier of the values now, and their bytes."""
        if self._is_whole or self._shard is None:
            return Tier.DEVICE, self._flat.nbytes
        return self._registry.rest.tier, self._shard.nbytes

    @property
    def _local(self) -> slice:
        """Return this rank's part of the flat buffer."""
        return slice(*self._layout.shard_range(self._registry.context.roles.shard.shard_index))

    @property
    def _rest_dtype(self) -> torch.dtype:
        made = self._flat.tensor.dtype
        return self._registry.rest.dtype or made if casts(made) else made

    @property
    def _is_watched(self) -> bool:
        """Whether a view or a graph still uses the full values: freeing them would crash it."""
        return self._flat.num_aliases > self._views or self._num_uses() > self._uses

    # --------------------------------------------------------------------------------------------------- sharding

    def shard(self) -> bool:
        """Keep this rank's shard of rank 0's values and free the rest; false if the full values are still in use.

        A view may live longer on one rank than on another, until garbage is collected there. It therefore decides only
        when memory is freed, and never whether a collective runs.
        """
        if self._held:
            return False
        if not self._is_sharded:
            self._take_replaced()
            if self.parameter.is_meta:
                released.clear_owner(self.parameter)
                return True
            self._scatter_values()
            self._is_sharded = True
            released.release([self.parameter])
        if self._is_watched:
            if self._scattered is None:
                self._scattered = self._flat.tensor[self._local].clone()
            return False
        self._take_late_writes()
        self._flat.free()
        if self._flat.is_replaced:
            with torch._C.DisableTorchFunctionSubclass():
                self._make_view()
            self._flat.end_replacing()
        self._is_whole = False
        if not self._registry.is_open:
            self.settle()
        return True

    def _take_replaced(self) -> None:
        """Take over other memory of the parameter: `.data` was set, or it was converted or swapped."""
        slot, flat = self._layout.slots[0], self._flat.tensor
        values = self.parameter.data
        is_ours = values.untyped_storage()._cdata == flat.untyped_storage()._cdata and values.dtype == flat.dtype
        if is_ours and tuple(values.shape) == slot.shape and (values.stride() == slot.stride or not values.numel()):
            return
        self._shared = []
        for other in self._registry.sharing(self, values):
            bond: list[str] = []
            self._shared.append(bond)
            other._shared.append(bond)
        self._flat.abandon()
        self._free_shard()
        if not values.is_meta:
            self._take(values)

    def looks_at(self, storage: int) -> bool:
        """Return whether the parameter has this memory now."""
        with torch._C.DisableTorchFunctionSubclass():
            return bool(self.parameter.untyped_storage()._cdata == storage)

    def _check_shared(self) -> None:
        """Raise an error if two parameters of the model shared memory, because they are two copies now."""
        for bond in self._shared:
            if bond:
                raise ShardwellError(
                    f"parameters {bond[0]} and {self._name} had one memory, by `.data =`: in plain PyTorch a change "
                    "of one is a change of the other, but split parameters cannot share. Make them one parameter "
                    "(module.weight = other.weight), or copy the values (module.weight.data.copy_(other.weight.data))."
                )
            bond.append(self._name)

    def _scatter_values(self) -> None:
        """Scatter rank 0's values, so that each rank keeps its shard of them."""
        context, flat = self._registry.context, self._flat.tensor
        local = self._local
        dtype = self._rest_dtype
        if self._shard is None:
            rest = self._registry.rest
            pinned = rest.pinned and rest.tier is Tier.HOST
            self._shard = self._buffer(local.stop - local.start, dtype, rest.tier, pinned=pinned)
        token = f"FOLD {self._words}"
        with self._fetched(changes=True):
            context.roles.shard.scatter(flat.to(dtype), self._shard.tensor, token)
        if self._swapped is None and context.tiers is not None:
            self._swapped = context.tiers.swap_out(self._shard.tensor, self._name)

    def _take_late_writes(self) -> None:
        """Copy values that were written through an old view after the parameter was sharded into the shard."""
        if self._scattered is None:
            return
        assert self._shard is not None
        now, before = self._flat.tensor[self._local], self._scattered
        changed = (now != before) & ~(now.isnan() & before.isnan())
        with self._fetched(changes=True):
            shard = self._shard.tensor
            shard.copy_(torch.where(changed.to(shard.device), now.to(shard.device, shard.dtype), shard))
        self._scattered = None

    def _fetched(self, *, changes: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the shard is swapped in."""
        return contextlib.nullcontext() if self._swapped is None else self._swapped.swapped_in(changes=changes)

    def _free_shard(self) -> None:
        if self._swapped is not None:
            self._swapped.free()
            self._swapped = None
        if self._shard is not None:
            self._shard.free()
            self._shard = None

    def local_part(self) -> Tensor:
        """Return a copy of this rank's part of the values (1D), without padding; no collective runs."""
        start, end = self._local.start, self._local.stop
        num_own = max(min(end, self._layout.numel) - start, 0)
        if self._shard is None or not self._is_sharded:
            return self._flat.tensor[start : start + num_own].clone()
        with self._fetched(changes=False):
            return self._shard.tensor[:num_own].clone()

    @property
    def rest(self) -> InitStorage:
        """Return the way in which the shard is stored."""
        return self._registry.rest

    @property
    def _words(self) -> str:
        return f"{self._name} {tuple(self.parameter.shape)}"

    @property
    def _gather_token(self) -> str:
        return f"GATHER {self._words}"

    def meet(self) -> None:
        """Wait for all ranks that will all-gather the parameter, if it is sharded."""
        if self._is_sharded:
            self.agreement.meet(self._gather_token)

    def unshard(self, *, meet: bool) -> None:
        """All-gather the parameter if it is sharded; with `meet`, all ranks have met for it."""
        if not self._is_sharded:
            return
        assert self._shard is not None
        shard = self._registry.context.roles.shard
        if self._is_whole:
            self._take_late_writes()
        self._flat.allocate()
        dtype = self._shard.tensor.dtype
        whole = self._flat.tensor
        if dtype != whole.dtype:
            whole = self._registry.context.device.empty(self._layout.padded, dtype)
        with self._fetched(changes=False):
            whole[self._local].copy_(self._shard.tensor)
        shard.all_gather(whole, None if meet else self._gather_token).wait()
        if whole is not self._flat.tensor:
            self._flat.tensor.copy_(whole)
        self._is_sharded, self._is_whole = False, True
        released.restore([self.parameter])

    def settle(self) -> None:
        """Change to the stored dtype, unless the full values are still in use in the dtype that the module gave."""
        dtype = self._rest_dtype
        if not self._is_whole and dtype != self._flat.tensor.dtype:
            self._flat = self._buffer(self._layout.padded, dtype)
            with torch._C.DisableTorchFunctionSubclass():
                self._make_view()
            self._flat.free()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardwellError(
            f"a model that is built in zero.Init cannot be pickled: this rank has a shard of {self._name} and links "
            "to others. Save `model.state_dict()`, which all ranks must call, or use the engine's save_checkpoint."
        )

    # --------------------------------------------------------------------------------- as a parameter owner

    def belong_to(self, parameter: nn.Parameter) -> None:
        """Take over this parameter: `torch.utils.swap_tensors` moves values from one parameter to another."""
        self.parameter = parameter

    def request_values(self, parameter: nn.Parameter, wanted_by: str) -> None:
        """Make the values readable until `end_request`; all ranks must use them."""
        self.belong_to(parameter)
        if torch._C._get_tracing_state() is not None:
            raise ShardwellError(
                f"torch.jit.trace cannot record parameter {self._name}, which zero.Init has split over the ranks: the "
                "traced graph would read memory that is freed. Trace a copy of the model that is built without "
                "zero.Init, or trace after training from a model with full weights."
            )
        self.open()

    def end_request(self, parameter: nn.Parameter) -> None:
        """End the use of the values that `request_values` began."""
        self.close(None)

    def hand_over(self, parameter: nn.Parameter) -> Tensor:
        """Return the full values for a new owner, and forget the parameter."""
        self.belong_to(parameter)
        self._check_shared()
        self._registry.unshard(self, meet=False)
        self._registry.forget(self)
        released.clear_owner(parameter)
        self._free_shard()
        return parameter.data

    def open(self) -> None:
        """Make the parameter unsharded until `close`; all ranks must call it."""
        self._registry.unshard(self, meet=True)
        self._held += 1

    @property
    def num_sharing(self) -> int:
        """Return the number of ranks among which `modifier_rank` is counted."""
        return self._registry.context.roles.data.rank_group.size

    def close(self, modifier_rank: int | None) -> None:
        """End `open`; with `modifier_rank`, that rank's values are broadcast."""
        self._held -= 1
        if modifier_rank is not None:
            self._take_replaced()
            token = f"WRITE {self._words}"
            self._registry.context.roles.data.broadcast(self._flat.tensor, modifier_rank, token=token)


class PartParameter(InitParameter):
    """A parameter that was cut: other ranks announce parts of other shapes by the same words."""

    @property
    def _words(self) -> str:
        return self._name


def meet_for_initialize(model: nn.Module) -> None:
    """Meet after the construction, so that a rank that failed in it reports its error before others wait for it."""
    owners = [released.owner_or_none(parameter) for parameter in model.parameters()]
    agreements = {id(k.agreement): k.agreement for k in owners if isinstance(k, InitParameter)}
    blank = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if agreements and blank:
        raise ShardwellError(
            f"parameter '{blank[0]}' is on the meta device and has no values, but others of the model have some. Fill "
            "it (module.to_empty(device=...), then an initialiser or load_state_dict), or build all of it on meta."
        )
    for agreement in agreements.values():
        agreement.meet("initialize", limited=False)
