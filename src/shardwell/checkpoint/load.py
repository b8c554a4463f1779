"""Loading: every rank reads the slices that it holds, from any source and any sharding.

First everything is read and checked; then the ranks agree that all of them could; only then the engine is changed. In
between, the values are in host memory; if there is too little of it, they are read twice. On the CPU, optimizer state
is read in place. State on NVMe is written there unit by unit.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.checkpoint.boxes import Box, Region, order_of, reordered, stride_in_order
from shardwell.checkpoint.narrowing import check_holds, holds_all
from shardwell.checkpoint.rank_contents import aliases_of, buffers_of, is_part
from shardwell.checkpoint.reader import allocate_flat
from shardwell.checkpoint.sources import MODEL, SCALAR, STATE, ShardwellSource, Source
from shardwell.checkpoint.sources.base import StoredTensor
from shardwell.checkpoint.sources.reading import into, region_into
from shardwell.errors import CheckpointError
from shardwell.long_work import LongWork
from shardwell.memory.host_memory import prefault
from shardwell.memory.machine import current_machine
from shardwell.memory.statistics import human
from shardwell.optim import ShardedOptimizer
from shardwell.optim.odd_state import state_from_json
from shardwell.optim.param_slices import ParamSlice
from shardwell.sharding import ShardedGroup, Unit
from shardwell.sharding.layout import Slot, contiguous_stride

_THREADS = 4
_SHARE = 0.5  # of the free host memory that may hold the values
_MOST_NAMES = 5  # in a message


@dataclass(frozen=True)
class ReadRequest:
    """A slice of a stored tensor to read."""

    name: str
    slot: Slot  # the parameter, as the model has it
    start: int  # in the parameter
    numel: int
    at: int = field(compare=False)  # in the destination
    dtype: torch.dtype = field(compare=False)  # of the destination


class StoredModel:
    """A source that is looked up by names of a model's parameters; `shared` has their other names in the model."""

    def __init__(self, source: Source, shared: Mapping[str, str]) -> None:
        self.source = source
        aliases: Mapping[str, str] = source.values.get("aliases", {})
        self._names: dict[str, str] = {}  # a name that a parameter had when it was saved -> the one it is stored under
        for name in [name.removeprefix(MODEL) for name in source.tensors if name.startswith(MODEL)]:
            first = aliases.get(name, name)
            for other in [first, *(alias for alias, target in aliases.items() if target == first)] if aliases else []:
                self._names.setdefault(other, name)
            self._names[name] = name
        for other, name in shared.items():
            if other in self._names:
                self._names.setdefault(name, self._names[other])
        self._shared = shared
        self._keys: defaultdict[str, list[str]] = defaultdict(list)
        for entry in source.tensors:
            if entry.startswith(STATE):
                name, _, key = entry.removeprefix(STATE).rpartition("/")
                self._keys[name].append(key)
        self._scalars: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for entry, value in source.values.items():
            if entry.startswith(SCALAR):
                name, _, key = entry.removeprefix(SCALAR).rpartition("/")
                self._scalars[name][key] = value if isinstance(value, dict) else float(value)

    def find(self, name: str) -> str | None:
        """Return the name under which a parameter or buffer of the model is stored."""
        return self._names.get(name)

    def keys(self, name: str) -> list[str]:
        """Return the keys of a parameter's optimizer state that have its shape."""
        return self._keys.get(self._names.get(name, name), [])

    def scalars(self, name: str) -> dict[str, Any]:
        """Return the other entries of a parameter's optimizer state, as JSON: numbers, mostly."""
        return self._scalars.get(self._names.get(name, name), {})

    def state(self, name: str, key: str) -> str:
        return f"{STATE}{self._names.get(name, name)}/{key}"

    def unused(self, names: Iterable[str]) -> list[str]:
        """Return the stored names that a model with `names` does not use."""
        used = {self._names.get(name) for name in (*names, *self._shared)}
        return sorted({name for name in self._names.values() if name not in used})


class CheckpointLoader:
    """Loads this rank's values from a source: `fetch` reads and checks them, `apply` stores them in the engine."""

    def __init__(
        self,
        source: Source,
        model: nn.Module,
        units: Sequence[Unit],
        optimizer: ShardedOptimizer | None,
        *,
        strict: bool = True,
        elsewhere: Iterable[str] = (),
    ) -> None:
        """Load into these units; other pipeline stages load the tensors with the names in `elsewhere`."""
        self._elsewhere = list(elsewhere)
        self._source, self._units, self._optimizer = source, units, optimizer
        self._stock = StoredModel(source, aliases_of(model, units))
        self._buffers = buffers_of(model)
        self._staged: dict[ReadRequest, Tensor] = {}
        self._states: dict[tuple[ParamSlice, str], Tensor] = {}  # staging tensors for slices of a state
        self._check(strict)

    def _check(self, strict: bool) -> None:
        """Raise unless every parameter is stored in its shape. All ranks come to the same result."""
        slots = {slot.name: (slot.box[0], group.trainable) for group in self._groups for slot in group.layout.slots}
        slots.update({name: (tuple(buffer.shape), True) for name, buffer in self._buffers.items()})
        may_lack_frozen = bool(self._source.values.get("frozen_excluded"))
        missing = []
        for name, (shape, trainable) in slots.items():
            found = self._stock.find(name)
            if found is None:
                if trainable or not may_lack_frozen:
                    missing.append(name)
                continue
            for entry in (MODEL + found, *(self._stock.state(name, key) for key in self._stock.keys(name))):
                if self._source.tensors[entry].shape != shape:
                    raise CheckpointError(
                        f"{self._source.where}: '{entry}' has shape {self._source.tensors[entry].shape}, but '{name}' "
                        f"of the model has {shape}. Is it a checkpoint of another model?"
                    )
        surplus = self._stock.unused([*slots, *self._elsewhere])
        if strict and (missing or surplus):
            raise CheckpointError(
                f"{self._source.where}: does not fit the model: it lacks {_listed(missing)}, and holds "
                f"{_listed(surplus)} that the model lacks. To load the tensors that fit, pass load_module_strict=False."
            )

    @property
    def _groups(self) -> Iterator[ShardedGroup]:
        return (group for unit in self._units for group in unit.groups)

    # -------------------------------------------------------------------------------------------------- reading

    def fetch(self) -> None:
        """Read everything that this rank needs, and check it. Nothing is changed."""
        self._check_odd_states()
        requests = list(self._requests())
        num_bytes = sum(request.numel * self._source.tensors[request.name].dtype.itemsize for request in requests)
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if num_bytes > _SHARE * current_machine().free_host_bytes(local_world_size) / local_world_size:
            for request in requests:
                self._read(request)  # for the checksums; it is read again when it is needed
            return
        loading = LongWork(
            f"loading {self._source.where}", num_bytes, speaks=os.environ.get("RANK", "0") == "0", shown=human
        )
        places = list(self._places())  # here, because malloc gives each thread fresh pages, and this one used ones
        self._read_all(deque(places), loading)
        self._staged = dict(places)

    def _read_all(self, pending: deque[tuple[ReadRequest, Tensor]], loading: LongWork) -> None:
        """Read on several threads. Each takes one request after the other: a future for each would cost more."""

        def work() -> None:
            while True:
                try:
                    request, flat = pending.popleft()  # which is atomic
                except IndexError:
                    return
                try:
                    self._read_into(request, flat)
                    loading.add(flat.nbytes)
                except BaseException:
                    pending.clear()
                    raise

        with ThreadPoolExecutor(_THREADS) as pool:
            for one in [pool.submit(work) for _ in range(min(_THREADS, len(pending)))]:
                one.result()

    def _places(self) -> Iterator[tuple[ReadRequest, Tensor]]:
        """Yield all read requests, each with its destination."""
        for request in self._model_requests():
            yield request, allocate_flat(request.numel, self._source.tensors[request.name].dtype, self._source.where)
        for shard, key in self._requested_states():
            state = prefault(allocate_flat(shard.tensor.numel(), self._dtype_of(shard, key), self._source.where))
            self._states[shard, key] = state
            for request in self._state_requests(shard, key):
                yield request, state[request.at : request.at + request.numel]

    def _requests(self) -> Iterator[ReadRequest]:
        yield from self._model_requests()
        for shard, key in self._requested_states():
            yield from self._state_requests(shard, key)

    def _model_requests(self) -> Iterator[ReadRequest]:
        for group in self._groups:
            yield from self._master_requests(group)
        for name, buffer in self._buffers.items():
            yield from self._buffer_request(name, buffer)

    def _requested_states(self) -> Iterator[tuple[ParamSlice, str]]:
        for shard in self._optimizer.shards if self._optimizer is not None else ():
            for key in sorted({key for piece in shard.pieces for key in self._stock.keys(piece.slot.name)}):
                yield shard, key

    def _dtype_of(self, shard: ParamSlice, key: str) -> torch.dtype:
        """Return the dtype for a state entry: that of the masters, unless both were saved in different dtypes."""
        name = next(p.slot.name for p in shard.pieces if key in self._stock.keys(p.slot.name))
        found = self._stock.find(name)
        saved = self._source.tensors[self._stock.state(name, key)].dtype
        if (
            found is None
            or not isinstance(self._source, ShardwellSource)
            or saved == self._source.tensors[MODEL + found].dtype
        ):
            return shard.tensor.dtype
        return saved

    def _master_requests(self, group: ShardedGroup) -> Iterator[ReadRequest]:
        for run in group.spans:
            for piece in run.pieces:
                found = self._stock.find(piece.slot.name)
                if found is not None:
                    where = (piece.in_parameter, piece.numel, piece.in_shard)
                    yield ReadRequest(MODEL + found, piece.slot, *where, group.precision.master)

    def _buffer_request(self, name: str, buffer: Tensor) -> Iterator[ReadRequest]:
        found = self._stock.find(name)
        if found is not None:
            shape = tuple(buffer.shape)
            slot = Slot(name, shape, contiguous_stride(shape), 0, buffer.numel())
            yield ReadRequest(MODEL + found, slot, 0, slot.numel, 0, buffer.dtype)

    def _state_requests(self, shard: ParamSlice, key: str) -> Iterator[ReadRequest]:
        dtype = self._dtype_of(shard, key)
        for piece in shard.pieces:
            if key in self._stock.keys(piece.slot.name):
                name = self._stock.state(piece.slot.name, key)
                where = (piece.in_parameter, piece.numel, piece.in_shard - shard.start)
                yield ReadRequest(name, piece.slot, *where, dtype)

    def _read(self, request: ReadRequest) -> Tensor:
        """Return the slice as 1D, in the parameter's own memory order; raise if its destination cannot hold a value."""
        flat = self._read_stored(request)
        check_holds(flat, request.dtype, f"{self._source.where}: '{request.name}'")
        return flat

    def _read_stored(self, request: ReadRequest) -> Tensor:
        stored = self._source.tensors[request.name]
        if is_part(request.slot):
            flat = allocate_flat(request.numel, stored.dtype, self._source.where)
            self._read_box_into(request, stored, flat)
            return flat
        if _same_order(request.slot, stored.order):
            return self._source.read(request.name, request.start, request.start + request.numel)
        full = self._source.read(request.name, 0, stored.numel).as_strided(stored.shape, stored.order)
        flat = torch.empty(stored.numel, dtype=stored.dtype, device="cpu")
        flat.as_strided(request.slot.shape, request.slot.stride).copy_(full)
        return flat[request.start : request.start + request.numel]

    def _read_box_into(self, request: ReadRequest, stored: StoredTensor, flat: Tensor) -> None:
        """Fill a tensor with a slice of a parameter that is a box of the stored tensor."""
        slot, order = request.slot, order_of(stored.order)
        if slot.packed is not None:
            self._read_packed_into(request, stored, flat)
            return
        box = Box(reordered(slot.box[1], order), reordered(slot.shape, order))
        stride = stride_in_order(slot.shape, order)  # of the box, if its elements are in the stored order
        if _same_order(slot, stride):
            region = Region(box, request.start, request.start + request.numel)
            region_into(self._source, request.name, region, flat)
            return
        full, mine = (allocate_flat(slot.numel, stored.dtype, self._source.where) for _ in range(2))
        region_into(self._source, request.name, Region(box, 0, box.numel), full)
        mine.as_strided(slot.shape, slot.stride).copy_(full.as_strided(slot.shape, stride))
        flat.copy_(mine[request.start : request.start + request.numel])

    def _read_packed_into(self, request: ReadRequest, stored: StoredTensor, flat: Tensor) -> None:
        """Fill a tensor with a slice of a parameter that is packed of several boxes of the stored tensor."""
        if not _same_order(request.slot, contiguous_stride(request.slot.shape)) or tuple(stored.order) != tuple(
            contiguous_stride(stored.shape)
        ):
            raise CheckpointError(
                f"{self._source.where}: '{request.name}' {stored.shape} is packed and cut, and is not contiguous"
            )
        at = 0
        for one in request.slot.boxes(request.start, request.numel):
            region = Region(Box(one.offsets, one.sizes), one.start, one.start + one.numel)
            region_into(self._source, request.name, region, flat[at : at + one.numel])
            at += one.numel

    def _read_into(self, request: ReadRequest, flat: Tensor) -> None:
        if not holds_all(self._source.tensors[request.name].dtype, request.dtype):
            flat.copy_(self._read(request))
        elif is_part(request.slot):
            self._read_box_into(request, self._source.tensors[request.name], flat)
        elif _same_order(request.slot, self._source.tensors[request.name].order):
            into(self._source, request.name, request.start, flat)
        else:
            flat.copy_(self._read(request))

    def _take(self, request: ReadRequest) -> Tensor:
        staged = self._staged.pop(request, None)
        return staged if staged is not None else self._read(request)

    # ------------------------------------------------------------------------------------------------- applying

    @torch.no_grad()
    def apply(self) -> None:
        """Store the values that were read in the engine. All ranks must call it."""
        for unit in self._units:
            unit.wait()  # an update in flight would change the loaded values
        for group in self._groups:
            group.replace_master(self._fill(list(self._master_requests(group))))
        for name, buffer in self._buffers.items():
            for request in self._buffer_request(name, buffer):
                buffer.copy_(self._take(request).view(request.slot.shape))
        if self._optimizer is not None:
            for unit in self._units:
                if unit.trainable:
                    with self._optimizer.states_of(unit, changes=True):
                        for shard in list(self._optimizer.shards.of(unit)):
                            self._restore(self._optimizer, unit, shard)
            self._optimizer.count_states()

    def _fill(self, requests: list[ReadRequest]) -> Any:
        def fill(destination: Tensor) -> None:
            for request in requests:
                destination[request.at : request.at + request.numel].copy_(self._take(request))

        return fill

    def _restore(self, optimizer: ShardedOptimizer, unit: Unit, shard: ParamSlice) -> None:
        """Set the state of a slice. Parameters whose entries differ are split into slices of their own."""
        stocks = [(self._stock.keys(p.slot.name), self._stock.scalars(p.slot.name)) for p in shard.pieces]
        if any(stock != stocks[0] for stock in stocks):
            for part in optimizer.part(unit, shard):
                self._restore(optimizer, unit, part)
            return
        keys, scalars = stocks[0]
        if not keys and not scalars:
            optimizer.forget_state(shard)
            return
        before = optimizer.state.get(shard.tensor, {})
        state: dict[str, Any] = {}
        for key in keys:
            state[key] = self._state(shard, key, before.get(key))
        for key, value in scalars.items():
            if isinstance(value, dict):
                state[key] = self._odd(shard, key, value)
            else:
                state[key] = optimizer.scalar(shard.tensor, before.get(key), value)
        optimizer.state[shard.tensor] = optimizer.executor.pack_state(shard, state)

    def _check_odd_states(self) -> None:
        for shard in self._optimizer.shards if self._optimizer is not None else ():
            for piece in shard.pieces:
                for key, value in self._stock.scalars(piece.slot.name).items():
                    if isinstance(value, dict):
                        self._odd(shard, key, value)

    def _odd(self, shard: ParamSlice, key: str, value: dict[str, Any]) -> Any:
        return state_from_json(value, shard.tensor.device, f"{self._source.where}: optimizer state {key!r}")

    def _state(self, shard: ParamSlice, key: str, before: Any) -> Tensor:
        """Return a complete entry of a slice's state, in place if it may stay where it was read to."""
        staged = self._states.pop((shard, key), None)
        state = before if isinstance(before, Tensor) else shard.tensor
        dtype = before.dtype if isinstance(before, Tensor) else self._dtype_of(shard, key)
        if staged is not None and staged.device == state.device and staged.dtype == dtype:
            return staged
        if state is shard.tensor:
            state = torch.empty_like(shard.tensor, dtype=self._dtype_of(shard, key))
        self._fill(list(self._state_requests(shard, key)))(state)
        return state


def _same_order(slot: Slot, stride: tuple[int, ...]) -> bool:
    return all(a == b or size == 1 for size, a, b in zip(slot.shape, slot.stride, stride, strict=True))


def _listed(names: list[str]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(f"'{name}'" for name in names[:_MOST_NAMES]) + more
