"""The attributes that DeepSpeed gives to parameters that are partitioned: `ds_id`, `ds_numel`, `ds_status` and others.

They are set at stage 3, when `zero.Init` sees a parameter and again at `initialize`, until the engine is destroyed.
`ds_tensor` is what this rank stores of the parameter. Shards are of units, whose sizes are rounded up, so ranks may
have parts of different sizes, and some none.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from shardwell.compat.deepspeed_api.enums import ZeroParamStatus, ZeroParamType
from shardwell.utils import safe_set_local_fp32_param
from shardwell.zero import GatheredParameters, is_released, local_shard

__all__ = ["ZeroParamStatus", "ZeroParamType", "is_zero_param", "label", "unlabel"]

_ids = itertools.count()
_NAMES = (
    *("ds_id", "ds_numel", "ds_shape", "ds_status", "ds_persist", "ds_param_type", "ds_active_sub_modules"),
    *("all_gather", "all_gather_coalesced", "partition", "partition_numel", "padding_size"),
    *("ds_summary", "is_external_param", "ds_tensor"),
)


class LiveStatus:
    """The status of a parameter at the moment of the comparison; it equals a member of `ZeroParamStatus`."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = weakref.ref(parameter)

    def __hash__(self) -> int:
        """Return the hash of the status now, so that `status in {...}` works; it is no key to keep."""
        return hash(self.now)

    @property
    def now(self) -> ZeroParamStatus:
        """The status now."""
        parameter = self._parameter()
        away = parameter is not None and is_released(parameter)
        return ZeroParamStatus.NOT_AVAILABLE if away else ZeroParamStatus.AVAILABLE

    @property
    def name(self) -> str:
        """The name of the status now."""
        return self.now.name

    @property
    def value(self) -> int:
        """The number of the status now."""
        return self.now.value

    def __eq__(self, other: object) -> bool:
        return self.now is (other.now if isinstance(other, LiveStatus) else other)

    def __repr__(self) -> str:
        return repr(self.now)

    def __deepcopy__(self, memo: dict[int, Any]) -> ZeroParamStatus:
        return self.now


def status_of_others() -> property:
    """Return `ds_status` for tensors that are no parameters: what they hold is here.

    A custom autograd function that saved a parameter gets it back in its backward as another tensor, without the
    attributes of the parameter, wherever saved-tensor hooks are on; TRL asks that tensor for its status. It is the one
    attribute that the layer adds to `torch.Tensor`, and what a parameter was given has precedence. It is a property
    because torch (`torch.compile`, `torch.overrides`) walks through all names of the class and knows those.
    """

    def get(tensor: Tensor) -> Any:
        own = tensor.__dict__.get("ds_status")
        if own is None and isinstance(tensor, nn.Parameter):
            raise AttributeError("ds_status: this parameter is not partitioned")
        return ZeroParamStatus.AVAILABLE if own is None else own

    def put(tensor: Tensor, status: Any) -> None:
        tensor.__dict__["ds_status"] = status

    def remove(tensor: Tensor) -> None:
        if tensor.__dict__.pop("ds_status", None) is None:
            raise AttributeError("ds_status: this tensor was given none")

    return property(get, put, remove)


class LocalPart:
    """This rank's part of a parameter, as `ds_tensor`: each use reads the shard, and `data = ...` writes to it.

    It stands for a tensor (1D) in torch's functions; what they return, and its methods return, are plain tensors.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        object.__setattr__(self, "_parameter", weakref.ref(parameter))

    @property
    def data(self) -> Tensor:
        """A copy of the values."""
        parameter = self._parameter()
        if parameter is None:
            raise ReferenceError("the parameter that this belongs to is gone")
        return local_shard(parameter)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "data":
            raise AttributeError(f"ds_tensor.{name} cannot be set: write ds_tensor.data = values")
        safe_set_local_fp32_param(self._parameter(), value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.data, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        return repr(self.data)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.data

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply a function of torch's to the values."""
        values = [one.data if isinstance(one, cls) else one for one in args]
        named = {key: one.data if isinstance(one, cls) else one for key, one in (kwargs or {}).items()}
        return function(*values, **named)


class Gathered:
    """The handle of a gather that is complete."""

    def wait(self, **_: Any) -> None:
        """Return: the parameters are whole."""


class _Partition:
    """The methods of one partitioned parameter."""

    def __init__(self, parameter: nn.Parameter, num_ranks: int) -> None:
        self._parameter, self._num_ranks = weakref.ref(parameter), num_ranks
        self._opened: GatheredParameters | None = None

    def all_gather(self, param_list: Iterable[nn.Parameter] | None = None, async_op: bool = False, **_: Any) -> None:
        """Make the parameter (or those of the list) whole until `partition`. All ranks must call it."""
        for one in self._handles(param_list):
            if one._opened is None:
                one._opened = GatheredParameters([one._own])
                one._opened.__enter__()

    def all_gather_coalesced(self, params: Iterable[nn.Parameter] | None = None, **_: Any) -> Gathered:
        """Do what `all_gather` does, and return a handle whose `wait` has nothing left to wait for."""
        self.all_gather(params)
        return Gathered()

    def partition(
        self, param_list: Iterable[nn.Parameter] | None = None, has_been_updated: bool = False, **_: Any
    ) -> None:
        """End `all_gather`; with `has_been_updated` rank 0's values become those of all. All ranks must call it."""
        for one in self._handles(param_list):
            opened, one._opened = one._opened, None
            if opened is None:
                continue
            if has_been_updated:
                with GatheredParameters([one._own], modifier_rank=0):
                    opened.__exit__(None, None, None)
            else:
                opened.__exit__(None, None, None)

    def partition_numel(self) -> int:
        """Return the elements of this parameter that a rank stores, rounded up."""
        return -(-self._own.numel() // self._num_ranks)

    def padding_size(self) -> int:
        """Return the elements that a parameter lacks to be divided evenly."""
        return self.partition_numel() * self._num_ranks - self._own.numel()

    def summary(self, **_: Any) -> dict[str, Any]:
        """Return what DeepSpeed prints of a parameter."""
        own = self._own
        return {
            "id": own.ds_id,  # type: ignore[attr-defined]
            "status": own.ds_status.name,  # type: ignore[attr-defined]
            "numel": own.numel(),
            "shape": tuple(own.shape),
            "requires_grad": own.requires_grad,
            "persist": own.ds_persist,  # type: ignore[attr-defined]
        }

    @property
    def _own(self) -> nn.Parameter:
        parameter = self._parameter()
        if parameter is None:
            raise ReferenceError("the parameter that this belongs to is gone")
        return parameter

    def _handles(self, param_list: Iterable[nn.Parameter] | None) -> list[_Partition]:
        if param_list is None:
            return [self]
        return [one.all_gather.__self__ for one in param_list if is_zero_param(one)]  # type: ignore[attr-defined]


def is_zero_param(parameter: Any) -> bool:
    """Return whether a value is a parameter that is partitioned."""
    return isinstance(parameter, nn.Parameter) and hasattr(parameter, "ds_id")


def label(parameters: Iterable[nn.Parameter], num_ranks: int, persistent: Iterable[nn.Parameter] = ()) -> None:
    """Give parameters DeepSpeed's attributes; those that have an id keep it, and those without elements get none."""
    if "ds_status" not in Tensor.__dict__:
        Tensor.ds_status = status_of_others()  # type: ignore[attr-defined]
    kept = {id(parameter) for parameter in persistent}
    for parameter in (one for one in parameters if one.numel()):
        handle = _Partition(parameter, num_ranks)
        values: dict[str, Any] = {
            "ds_id": parameter.__dict__.get("ds_id", None),
            "ds_numel": parameter.numel(),
            "ds_shape": parameter.shape,
            "ds_status": LiveStatus(parameter),
            "ds_persist": id(parameter) in kept,
            "ds_param_type": ZeroParamType.PARTITIONED,
            "ds_active_sub_modules": set(),
            "all_gather": handle.all_gather,
            "all_gather_coalesced": handle.all_gather_coalesced,
            "partition": handle.partition,
            "partition_numel": handle.partition_numel,
            "padding_size": handle.padding_size,
            "ds_summary": handle.summary,
            "is_external_param": False,
            "ds_tensor": LocalPart(parameter),
        }
        if values["ds_id"] is None:
            values["ds_id"] = next(_ids)
        for name, value in values.items():
            setattr(parameter, name, value)


def unlabel(parameters: Iterable[nn.Parameter]) -> None:
    """Take DeepSpeed's attributes off again."""
    for parameter in parameters:
        for name in _NAMES:
            parameter.__dict__.pop(name, None)
