"""`OnDevice`: a context in which modules are built on a device, in a dtype."""

from __future__ import annotations

import contextlib
from types import TracebackType

import torch


class OnDevice(contextlib.AbstractContextManager["OnDevice"]):
    """New floating-point tensors are made in `dtype` on `device`, by default on the meta device."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> OnDevice:
        if self.enabled:
            before = torch.get_default_dtype()
            with contextlib.ExitStack() as undo:
                undo.enter_context(self.device)
                torch.set_default_dtype(self.dtype)
                undo.callback(torch.set_default_dtype, before)
                self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()
