"""The models that plans know: presets by name, configurations of Hugging Face, and functions of the user's own."""

from __future__ import annotations

import difflib
import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwell.errors import ConfigError, ShardwellError
from shardwell.memory.machine import SimulatedMachine
from shardwell.plan.axes import part_of_sequence
from shardwell.plan.decoder import Decoder, DecoderSizes
from shardwell.plan.estimate import estimate, least, tokens
from shardwell.plan.hugging_face import sizes_of_file
from shardwell.plan.pipes import num_stages
from shardwell.plan.report import PlanReport
from shardwell.plan.simulation import BlockModel

_GPT2, _LLAMA2, _LLAMA3, _QWEN = 50257, 32000, 128256, 152064
_MIXTRAL = DecoderSizes(1, 8, 8, _LLAMA2, kv_heads=8, gated=True, experts=8, experts_of_token=2)
_QWEN3_MOE = DecoderSizes(
    1, 4, 4, 151936, kv_heads=4, head_dim=128, gated=True, head_norm=True, experts=128, experts_of_token=8
)
# Sizes as the papers and the published configurations have them.
PRESETS: dict[str, DecoderSizes] = {
    "zero-7.5b": DecoderSizes(36, 4096, 32, _GPT2, positions=1024, tied=True),
    "turing-nlg-17b": DecoderSizes(78, 4256, 28, _GPT2, positions=1024),
    "bloom-176b": DecoderSizes(70, 14336, 112, 250880, tied=True, positions=2048),
    "mt-nlg-530b": DecoderSizes(105, 20480, 128, 51200, positions=2048),
    "1t": DecoderSizes(128, 25600, 256, _GPT2, positions=1024),
    "10t": DecoderSizes(195, 65536, 512, _GPT2, positions=1024),
    "llama-2-7b": DecoderSizes(32, 4096, 32, _LLAMA2, mlp=11008, gated=True),
    "llama-2-13b": DecoderSizes(40, 5120, 40, _LLAMA2, mlp=13824, gated=True),
    "llama-2-70b": DecoderSizes(80, 8192, 64, _LLAMA2, mlp=28672, kv_heads=8, gated=True),
    "llama-3-8b": DecoderSizes(32, 4096, 32, _LLAMA3, mlp=14336, kv_heads=8, gated=True),
    "llama-3-70b": DecoderSizes(80, 8192, 64, _LLAMA3, mlp=28672, kv_heads=8, gated=True),
    "llama-3-405b": DecoderSizes(126, 16384, 128, _LLAMA3, mlp=53248, kv_heads=8, gated=True),
    "qwen2.5-7b": DecoderSizes(28, 3584, 28, _QWEN, mlp=18944, kv_heads=4, gated=True, qkv_bias=True),
    "qwen2.5-32b": DecoderSizes(64, 5120, 40, _QWEN, mlp=27648, kv_heads=8, gated=True, qkv_bias=True),
    "qwen2.5-72b": DecoderSizes(80, 8192, 64, _QWEN, mlp=29568, kv_heads=8, gated=True, qkv_bias=True),
    "mixtral-8x7b": replace(_MIXTRAL, layers=32, hidden=4096, heads=32, mlp=14336),
    "mixtral-8x22b": replace(_MIXTRAL, layers=56, hidden=6144, heads=48, mlp=16384, vocabulary=32768),
    "qwen3-30b-a3b": replace(_QWEN3_MOE, layers=48, hidden=2048, heads=32, mlp=768),
    "qwen3-235b-a22b": replace(_QWEN3_MOE, layers=94, hidden=4096, heads=64, mlp=1536),
}


def decoder(
    name: str,
    sizes: DecoderSizes,
    micro_batch: int,
    sequence: int,
    *,
    recomputes: bool,
    assumed: tuple[str, ...] = (),
) -> BlockModel:
    """Return a decoder of these sizes as a model to plan; `assumed` is what reports say of it."""
    learned = replace(sizes, positions=max(sizes.positions, sequence)) if sizes.positions else sizes
    if learned != sizes:
        words = f"there is a position embedding for each of {sequence:,} tokens; the model has {sizes.positions:,}"
        assumed = (*assumed, words)

    def build(layers: int) -> nn.Module:
        with torch.device("meta"):
            return Decoder(replace(learned, layers=layers), recomputes=recomputes)

    inputs = (tokens(micro_batch, sequence),)
    return BlockModel(name, sizes.layers, build, inputs, sizes.hidden, sizes.expert_numels, assumed)


@dataclass(frozen=True)
class PlanModel:
    """A model that plans may ask for with several micro-batches, sequences, and with blocks recomputed or not."""

    name: str
    make: Callable[[int, int, bool], BlockModel | tuple[nn.Module, Any]]  # of micro-batch, sequence, recomputes
    has_choices: bool = True  # whether blocks can be recomputed; a function of the user's own decides that itself
    has_batches: bool = True  # whether the micro-batch can be chosen; inputs of the user's own have theirs

    def report(
        self,
        config: dict[str, Any],
        machine: SimulatedMachine,
        sequence: int,
        recomputes: bool,
        *,
        verified: bool = True,
    ) -> PlanReport:
        """Return the plan of a configuration, whose micro-batch it is."""
        mine = part_of_sequence(config, sequence)
        made = self.make(config["train_micro_batch_size_per_gpu"], mine, recomputes)
        if isinstance(made, BlockModel):
            return estimate(made, config, machine, verified=verified)
        return estimate(made[0], config, machine, made[1])

    def may_fit(self, config: dict[str, Any], machine: SimulatedMachine, sequence: int, recomputes: bool) -> bool:
        """Return false if a few blocks have no room already, by one simulation; whether all fit, `report` says."""
        made = self.make(config["train_micro_batch_size_per_gpu"], part_of_sequence(config, sequence), recomputes)
        if not isinstance(made, BlockModel) or num_stages(config) > 1:
            return True
        return least(made, config, replace(machine, speeds=None)).fits

    def whole(self) -> nn.Module:
        """Return the module with all its blocks, on the meta device."""
        made = self.make(1, 1, False)
        return made.build(made.layers) if isinstance(made, BlockModel) else made[0]


def model_named(model: str) -> PlanModel:
    """Return the model of a preset, of a configuration of Hugging Face, or of MODULE:FUNCTION."""
    if ":" in model:
        has_inputs = from_function(model)[1] is not None

        def made(micro_batch: int, sequence: int, recomputes: bool) -> tuple[nn.Module, Any]:
            module, inputs = from_function(model)
            return module, (tokens(micro_batch, sequence),) if inputs is None else inputs

        return PlanModel(model, made, has_choices=False, has_batches=not has_inputs)
    name, sizes, assumed = sizes_of(model)
    return PlanModel(
        name,
        lambda micro_batch, sequence, recomputes: decoder(
            name, sizes, micro_batch, sequence, recomputes=recomputes, assumed=assumed
        ),
    )


def sizes_of(model: str) -> tuple[str, DecoderSizes, tuple[str, ...]]:
    """Return the name and the sizes of a preset, or of a configuration of Hugging Face: a file or its directory.

    Last come the things that a plan of the configuration assumes.
    """
    key = model.lower()
    if key in PRESETS:
        return key, PRESETS[key], ()
    path = Path(model)
    if model and os.path.isdir(model):  # false for a name that no file can have
        path = path / "config.json"
    if path.suffix == ".json" or (model and os.path.exists(model)):
        return Path(model).name.removesuffix(".json"), *sizes_of_file(path)
    near = difflib.get_close_matches(key, PRESETS, 1, 0.5)
    meant = f"Did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"no model is known as {model!r}. {meant}Name a preset ({', '.join(PRESETS)}), a config.json of Hugging Face "
        "or its directory, or MODULE:FUNCTION."
    )


def from_function(place: str) -> tuple[nn.Module, Any]:
    """Return the model, and its inputs or None, that a function of the user's own returns on the meta device."""
    module, _, name = place.partition(":")
    if not re.fullmatch(r"[\w.]+", module) or not name.isidentifier():
        raise ConfigError(f"{place!r}: expected MODULE:FUNCTION, as in my_models:build")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{place}: cannot be imported ({error})") from None
    except Exception as error:
        words = " ".join(str(error).split())
        raise ConfigError(f"{place}: {module} raised {type(error).__name__} when it was imported: {words}") from error
    if not callable(function):
        raise ConfigError(f"{place}: is a {type(function).__name__}, expected a function that returns a module")
    try:
        with torch.device("meta"):
            made = function()
    except ShardwellError:
        raise
    except (Exception, SystemExit) as error:
        words = " ".join(str(error).split()).rstrip("!")
        meta = " (functions are called on the meta device, where tensors have no values)" if "meta" in words else ""
        raise ConfigError(f"{place}: raised {type(error).__name__}: {words}{meta}") from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{place}: returned a {type(model).__name__}, expected a module, or a module and its inputs")
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    if not isinstance(inputs, tuple | list | dict | None):
        raise ConfigError(
            f"{place}: returned a {type(inputs).__name__} as the inputs of its module, expected a tuple or a "
            "dictionary of tensors"
        )
    if isinstance(inputs, dict) and not all(isinstance(key, str) for key in inputs):
        raise ConfigError(f"{place}: returned inputs by {list(inputs)}, expected the names of arguments of its module")
    if next(model.parameters(), None) is None:
        raise ConfigError(f"{place}: returned a {type(model).__name__} without parameters, of which there is no plan")
    return model, inputs
