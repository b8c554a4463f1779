"""`GatheredParameters`: unsharded parameters for reading or changing, outside the modules that own them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from torch import nn

from shardwell.errors import ShardwellError
from shardwell.sharding import released
from shardwell.sharding.init_parameters import InitParameter


class GatheredParameters(contextlib.AbstractContextManager["GatheredParameters"]):
    """A context that makes parameters unsharded on every rank. All ranks must enter it.

    With `modifier_rank`, the changes of that rank are broadcast to all ranks at the end. Without it the context is for
    reading: where the unit is resharded a change is lost, with a warning, and where it is not a change counts if all
    ranks make it. Frozen parameters that are stored quantised are shown dequantised, and changes of them are quantised
    again. Views of the parameters must not be used after the context: their memory is freed.

    `modifier_rank` is counted among the ranks that share the parameter. With tensor, expert and pipeline axes these are
    the ranks with the same part or stage: 0 is the first of each, and each of them changes its own part. So code for
    rank 0 alone (`if rank == 0:`) would change one part of several; `engine.load_state_dict` takes whole tensors.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter] | None,
        modifier_rank: int | None = None,
        fwd_module: Any = None,
        enabled: bool = True,
    ) -> None:
        several = [params] if isinstance(params, nn.Parameter) else list(params or [])
        kept = [p for p in several if enabled and isinstance(p, nn.Parameter) and released.is_owned(p)]
        for parameter in kept:
            owner = released.owner_of(parameter)
            if isinstance(owner, InitParameter):
                owner.belong_to(parameter)
        self._owners = list({id(released.owner_of(p)): released.owner_of(p) for p in kept}.values())
        self._modifier_rank = modifier_rank
        for owner in self._owners if modifier_rank is not None else ():
            if modifier_rank not in range(owner.num_sharing):
                raise ShardwellError(
                    f"GatheredParameters(modifier_rank={modifier_rank}): {owner.num_sharing} rank(s) share a parameter "
                    "(with tensor, expert and pipeline axes those with the same part or stage): pass a number from 0 "
                    f"to {owner.num_sharing - 1}, which counts these"
                )

    def __enter__(self) -> GatheredParameters:
        with contextlib.ExitStack() as undo:
            for owner in self._owners:
                owner.open()
                undo.callback(owner.close, None)
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        first: BaseException | None = None
        for owner in self._owners:  # close all of them, also if one fails
            try:
                owner.close(self._modifier_rank)
            except BaseException as problem:
                first = first or problem  # the others fail because of it
        if first is not None:
            raise first
