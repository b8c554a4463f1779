"""Objects of DeepSpeed's classes in files that are written for it: references by name, for which nothing is imported.

DeepSpeed's reader takes its loss scaler from the file as it is, and at stage 3 it fails without one.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

_SCALERS = "deepspeed.runtime.fp16.loss_scaler"


@dataclass(frozen=True)
class DeepSpeedObject:
    """A stand-in that unpickles to an object of a class of DeepSpeed's with these attributes."""

    module: str
    name: str
    attributes: Mapping[str, Any]


_Base: Any = pickle._Pickler  # the one in Python, whose `save` can be extended


class _Pickler(_Base):  # type: ignore[misc]
    """Writes a `DeepSpeedObject` as the object that it stands for."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if not isinstance(obj, DeepSpeedObject):
            super().save(obj, save_persistent_id)
            return
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        super().save(dict(obj.attributes))
        self.write(pickle.BUILD)


PICKLING = SimpleNamespace(Pickler=_Pickler, __name__="pickle")  # what `torch.save` takes as `pickle_module`


def loss_scaler(scale: Any, fp16: Any) -> DeepSpeedObject:
    """Return DeepSpeed's loss scaler for a saved loss scale and the block `fp16`; a scale of 1 where there is none."""
    value = float(scale["value"]) if isinstance(scale, Mapping) else 1.0
    rules = fp16 if isinstance(fp16, Mapping) else {}
    if not isinstance(scale, Mapping) or rules.get("loss_scale"):
        return DeepSpeedObject(_SCALERS, "LossScaler", {"cur_scale": value, "dynamic": False})
    hysteresis, clean = int(rules.get("hysteresis", 2)), int(scale.get("clean", 0))
    return DeepSpeedObject(
        _SCALERS,
        "DynamicLossScaler",
        {
            "cur_scale": value,
            "dynamic": True,
            "cur_iter": clean,
            "last_overflow_iter": -1,
            "scale_factor": 2.0,
            "scale_window": int(rules.get("loss_scale_window", 1000)),
            "min_scale": float(rules.get("min_loss_scale", 1)),
            "delayed_shift": hysteresis,
            "cur_hysteresis": int(scale.get("left", hysteresis)),
            "consecutive_hysteresis": bool(rules.get("consecutive_hysteresis", False)),
            "raise_error_at_min_scale": True,
            "dtype": torch.float16,
        },
    )
