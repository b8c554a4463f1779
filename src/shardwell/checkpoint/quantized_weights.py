"""Weights quantised for inference, in the format of compressed-tensors, which Transformers loads.

The weights of linear layers become 8-bit codes with one scale for each row (output channel); activations are not
quantised. Codes and scales come from the quantiser of collectives (`kernels/quantize_reference.py`), with rows as
blocks: a scale is the greatest magnitude over the largest code, rounded up to bf16, so it is exact in bf16 and fp32.

    int8    <name>_packed (four codes, plus 128, in an int32), <name>_scale, <name>_shape     "pack-quantized"
    fp8     <name> (e4m3), <name>_scale                                                       "float-quantized"

Embeddings, the output layer and everything that is not the weight of an `nn.Linear` stay as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from shardwell.checkpoint.sources.base import MODEL, Source, StoredTensor
from shardwell.checkpoint.sources.reading import read_full, weights
from shardwell.checkpoint.transformers_models import build_model
from shardwell.errors import CheckpointError
from shardwell.kernels.quantize_reference import encode_rows

Quantizer = Literal["int8", "fp8"]
_FORMATS = {"int8": ("pack-quantized", "int"), "fp8": ("float-quantized", "float")}
_SCALES = (torch.float32, torch.bfloat16)


class QuantizedSource:
    """A source that quantises the linear layers of another when they are read."""

    def __init__(self, source: Source, kind: Quantizer, dtype: torch.dtype | None) -> None:
        if dtype is not None and dtype not in _SCALES:
            raise CheckpointError(f"--dtype {dtype}: scales are bf16 numbers; quantise with bf16 or fp32")
        config = source.values.get("model_config")
        if not isinstance(config, Mapping):
            raise CheckpointError(
                f"{source.where}: quantising needs a model of Transformers; this has no configuration"
            )
        self.where, self._source, self._kind, self._dtype = source.where, source, kind, dtype
        chosen, left = _linear_layers(source, config)
        self.tensors: dict[str, StoredTensor] = {}
        self._base: dict[str, str] = {}  # tensors of a quantised weight, and the weight
        for name in weights(source):
            stored = source.tensors[name]
            if name.removeprefix(MODEL) in chosen:
                self._add(name, stored)
            else:
                self.tensors[name] = StoredTensor(self._cast_to(stored.dtype), stored.shape, stored.stride)
        self._warn_about_the_rest()
        self.values: dict[str, Any] = {
            **{key: source.values.get(key) for key in ("generation_config", "name_or_path", "frozen_excluded")},
            "model_config": {**config, **self._dtype_entry(config), "quantization_config": _settings(kind, left)},
        }
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements; of a quantised weight, all are computed when the first is read."""
        if name not in self._base:
            part = self._source.read(name, start, stop)
            return part.to(self.tensors[name].dtype)
        base = self._base[name]
        if self._last[0] != base:
            self._last = base, self._quantize(base)
        return self._last[1][name].reshape(-1)[start:stop]

    def close(self) -> None:
        self._last = "", {}

    def _cast_to(self, stored: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and stored.is_floating_point else stored

    def _dtype_entry(self, config: Mapping[str, Any]) -> dict[str, Any]:
        if self._dtype is None:
            return {}
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
        return dict.fromkeys(keys, str(self._dtype).removeprefix("torch."))

    def _add(self, name: str, stored: StoredTensor) -> None:
        rows, columns = stored.shape
        kind = self._cast_to(stored.dtype)
        scale = StoredTensor(kind if kind in _SCALES else torch.bfloat16, (rows, 1))
        if self._kind == "int8":
            found = {f"{name}_packed": StoredTensor(torch.int32, (rows, -(-columns // 4)))}
            found |= {f"{name}_scale": scale, f"{name}_shape": StoredTensor(torch.int64, (2,))}
        else:
            found = {name: StoredTensor(torch.float8_e4m3fn, stored.shape), f"{name}_scale": scale}
        self.tensors |= found
        self._base |= dict.fromkeys(found, name)

    def _quantize(self, base: str) -> dict[str, Tensor]:
        rows = read_full(self._source, base)
        codes, scales = encode_rows(self._kind, rows)
        if not bool(scales.isfinite().all()):
            raise CheckpointError(f"{self.where}: '{base.removeprefix(MODEL)}': has NaNs or infinities, or overflows")
        if self._kind == "fp8":
            return {base: codes, f"{base}_scale": scales.to(self.tensors[f"{base}_scale"].dtype)}
        unsigned = (codes.short() + 128).byte()
        packed = pad(unsigned, (0, -unsigned.shape[1] % 4), value=128).contiguous().view(torch.int32)
        return {
            f"{base}_packed": packed,
            f"{base}_scale": scales.to(self.tensors[f"{base}_scale"].dtype),
            f"{base}_shape": torch.tensor(rows.shape, dtype=torch.int64),
        }

    def _warn_about_the_rest(self) -> None:
        """Tell the user if much of the model keeps its dtype, as stacked experts do."""
        total = sum(one.numel for name, one in self._source.tensors.items() if name.startswith(MODEL))
        done = sum(self._source.tensors[name].numel for name in set(self._base.values()))
        if done < 0.5 * total:
            words = f"{done / max(total, 1):.0%} of its elements are weights of linear layers; only these are quantised"
            warnings.warn(f"{self.where}: {words}", stacklevel=4)


def _linear_layers(source: Source, config: Mapping[str, Any]) -> tuple[set[str], list[str]]:
    """Return the names of the weights to quantise, and the linear layers that stay as they are."""
    model = _skeleton(source, config)
    output = getattr(model, "get_output_embeddings", lambda: None)()
    inputs = getattr(model, "get_input_embeddings", lambda: None)()
    wide = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    tied = {id(one.weight) for one in (output, inputs) if one is not None and hasattr(one, "weight")}
    chosen, left = set(), []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        stored = source.tensors.get(f"{MODEL}{name}.weight")
        keeps = module is output or id(module.weight) in tied or any(part in name.split(".") for part in wide)
        if keeps or stored is None or stored.shape != tuple(module.weight.shape) or not stored.numel:
            left.append(name)
        else:
            chosen.add(f"{name}.weight")
    if not chosen:
        raise CheckpointError(
            f"{source.where}: no weight of a linear layer (nn.Linear) to quantise in {type(model).__name__}"
        )
    return chosen, left


def _skeleton(source: Source, config: Mapping[str, Any]) -> nn.Module:
    """Return the model without memory, for the classes of its modules."""
    with torch.device("meta"):
        try:
            model: nn.Module = build_model(config, f"{source.where}: quantising")
        except CheckpointError:
            raise
        except Exception as error:  # whatever Transformers raises about a configuration
            raise CheckpointError(f"{source.where}: no model of it ({type(error).__name__}: {error})") from error
    return model


def _settings(kind: Quantizer, left: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` of config.json."""
    form, number = _FORMATS[kind]
    scheme = {"num_bits": 8, "type": number, "symmetric": True, "strategy": "channel", "dynamic": False}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": left,
    }
