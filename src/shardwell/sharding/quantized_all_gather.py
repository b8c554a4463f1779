"""All-gathers of parameters that are quantised, only for the all-gather (qwZ) or as they are stored."""

from __future__ import annotations

import contextlib

from shardwell.kernels.quantize import Codec
from shardwell.memory import FlatBuffer
from shardwell.parallel import Collectives, Work, quantized
from shardwell.parallel.joined import Joined
from shardwell.sharding.context import EngineContext
from shardwell.sharding.secondary import SecondaryShard
from shardwell.sharding.storage import DefaultAllGather, MasterStorage


class QuantizedAllGather(DefaultAllGather):
    """The all-gather of values that a codec quantises for the all-gather only (qwZ)."""

    def __init__(
        self, name: str, flat: FlatBuffer, storage: MasterStorage, comm: Collectives, local: slice, codec: Codec
    ) -> None:
        super().__init__(name, flat, storage, comm, local)
        # the byte counts differ, so exact values have another token
        self._kinds = {False: (self._token, codec), True: (f"{self._token} exactly", None)}

    def __call__(self, *, exact: bool = False, joined: Joined | None = None) -> Work:
        """Start to fill the flat buffer with values that went through the codec, or with `exact` ones."""
        self.is_exact = exact
        self._token, self._codec = self._kinds[exact]
        return super().__call__(exact=exact, joined=joined)


class StoredQuantizedAllGather:
    """The all-gather of shards that are stored quantised: the stored bytes are sent, and dequantised on arrival.

    A secondary shard is quantised, too.
    """

    is_exact = True

    def __init__(
        self,
        name: str,
        flat: FlatBuffer,
        storage: MasterStorage,
        codec: Codec,
        context: EngineContext,
        secondary: SecondaryShard | None,
    ) -> None:
        self._token = f"GATHER {name}"
        self._flat, self._storage, self._codec, self._context = flat, storage, codec, context
        self.secondary = secondary

    def __call__(self, *, exact: bool = False, joined: Joined | None = None) -> Work:
        """Start to fill the flat buffer."""
        shard, flat, codec = self._context.roles.shard, self._flat, self._codec
        if self.secondary is not None and self.secondary.is_valid:
            flat.allocate()
            gather = self.secondary.gather
            return quantized.decode(
                shard, flat.tensor, codec, lambda codes: gather(codes, joined), self._context.temporary
            )
        stream = self._context.device.all_gather_stream
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(self._storage.reading(stream))
            flat.allocate()
            if shard.rank_group.size > 1 and source.numel():
                keep = self.secondary.fill if self.secondary is not None else None
                comm = shard if joined is None else joined.over(shard)
                return comm.all_gather_codes(source, flat.tensor, codec, self._token, stack.close, keep)
            with stream.after_current():
                codec.decode(source.to(flat.tensor.device, non_blocking=True), flat.tensor)
        return Work(stream.record().wait)
