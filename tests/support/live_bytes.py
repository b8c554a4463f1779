"""Live tensor bytes, counted without asking the engine: every storage that Python can see, or that an op touches."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwell.parallel.transport import await_loans


def live_bytes() -> int:
    """Bytes of the storages of all tensors that are reachable now."""
    await_loans(1.0)
    gc.collect()
    storages: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for item in gc.get_objects():
            if issubclass(type(item), torch.Tensor):
                storage = item.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


class PeakWatch(TorchDispatchMode):
    """The largest sum of live storages after any operation inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, StorageWeakRef] = {}
        self.peak = 0
        gc.collect()  # what earlier code left behind must not go in the meantime
        with torch._C.DisableTorchFunctionSubclass():
            for item in gc.get_objects():
                if issubclass(type(item), torch.Tensor):
                    self._remember(item)
        self.start = self.now()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            for leaf in tree_leaves((args, kwargs, result)):
                if isinstance(leaf, torch.Tensor):
                    self._remember(leaf)
        self.peak = max(self.peak, self.now())
        return result

    def _remember(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._known.setdefault(storage._cdata, StorageWeakRef(storage))

    def now(self) -> int:
        total = 0
        for key, reference in list(self._known.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._known[key]
            else:
                total += storage.nbytes()
        return total
