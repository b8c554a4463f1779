"""Building an optimizer over shards from an optimizer object, a class, a factory or a block of the configuration.

An `OptimizerFactory` is the common form of all of these: it knows which parameter belongs to which parameter group, and
how to make the optimizer once the shards exist.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwell.config import OptimizerConfig
from shardwell.errors import ConfigError, ShardwellError
from shardwell.memory import Device
from shardwell.optim.elementwise import check_factory, check_kind, check_object, kind_by_step
from shardwell.optim.full_tensors import needs_full_tensors
from shardwell.optim.given_parameters import check_made, check_options
from shardwell.optim.lamb import Lamb
from shardwell.optim.lion import Lion
from shardwell.optim.muon import Muon, muon_groups

NO_LABEL = -1  # trainable, but in no parameter group: reduce-scattered and never stepped
# take precedence over torch's of the same name
_OWN: dict[str, type[Optimizer]] = {"Lion": Lion, "Lamb": Lamb, "Muon": Muon}
_WITH_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}

Factory = Callable[..., Optimizer]
Named = Callable[[OptimizerConfig, Device], tuple[Factory, dict[str, Any]]]


@dataclass(frozen=True)
class OptimizerFactory:
    """Labels for parameters, and a function that makes the optimizer for the shards of each label."""

    labels: dict[int, int]  # id(parameter) -> index of its parameter group
    make: Callable[[list[list[Tensor]]], Optimizer]  # from the shards of each parameter group
    num_states: int = 2  # state tensors of a shard's size; as many as Adam's where that is not known
    is_collective: Callable[[], bool] = lambda: False  # its steps need collectives
    given: Optimizer | None = None  # the user's own, which schedulers may refer to

    def label(self, parameter: nn.Parameter) -> int:
        """Return the parameter group of a parameter, or `NO_LABEL`."""
        return self.labels.get(id(parameter), NO_LABEL)


def factory_for(
    optimizer: Optimizer | Factory | None,
    model: nn.Module,
    model_parameters: Iterable[Any] | None,
    block: OptimizerConfig | None,
    device: Device,
    named: Named | None = None,
) -> OptimizerFactory | None:
    """Return how to make the optimizer, or None for a model that is only evaluated.

    `named` says what the name in a configuration block means, by default `by_name`.
    """
    if isinstance(optimizer, torch.optim.Muon):
        return _from_torch_muon(optimizer)
    if isinstance(optimizer, Optimizer):
        check_object(optimizer, device)
        return _from_object(optimizer)
    if optimizer is not None and not callable(optimizer):
        raise ShardwellError(
            f"the optimizer is a {type(optimizer).__name__}, which is neither a torch.optim.Optimizer nor a class or a "
            "function that makes one. A wrapper around an optimizer cannot be cut into shards: pass the optimizer that "
            "it wraps, and do what the wrapper adds after engine.step()."
        )
    groups = _parameter_groups(model, model_parameters)
    if optimizer is not None:
        kind = Muon if optimizer is torch.optim.Muon else optimizer
        found = replace(_from_factory(kind, groups, device), num_states=_num_states(kind, groups))
        check_factory(found.make, groups, device)
        return found
    if block is not None:
        factory, options = (named or by_name)(block, device)
        if "fused" not in block.params and any(p.is_complex() for group in groups for p in group["params"]):
            options.pop("fused", None)  # torch's fused steps are for real numbers
        if factory is Muon:
            groups = _groups_for_muon(model, groups, options)
        found = _from_factory(_made(factory, options, block.type), groups, device)
        return replace(found, num_states=_num_states(factory, [options]))
    return None


def _groups_for_muon(model: nn.Module, groups: list[dict[str, Any]], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Split groups into matrices inside the model for Muon and the rest for AdamW, unless they set `use_muon`."""
    rates = {key: options.pop(key) for key in ("muon_lr", "adam_lr") if key in options}
    if any("use_muon" in group for group in groups):
        return groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    split = []
    for group in groups:
        rest = {key: value for key, value in group.items() if key != "params"}
        named = [(names.get(id(p), "a parameter"), p) for p in group["params"]]
        split += [{**rest, **part} for part in muon_groups(named, model, **rates)]
    return split


def by_name(block: OptimizerConfig, device: Device) -> tuple[Factory, dict[str, Any]]:
    """Return the optimizer that a configuration block names and its options, with a fused kernel where there is one.

    As in DeepSpeed's configuration files, "Adam" means decoupled weight decay unless `adam_w_mode` is false, and a
    missing weight decay is 0 (torch's own AdamW defaults to 0.01).
    """
    options = _in_torchs_words(block)
    name = _spelled(block.type)
    if name in ("Adam", "AdamW"):
        options.setdefault("weight_decay", 0.0)
        if options.pop("adam_w_mode", True):
            name = "AdamW"
    factory = _OWN.get(name) or getattr(torch.optim, name)
    check_kind(factory)
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    known = set(inspect.signature(factory).parameters) - {"params"}
    known |= {"muon_lr", "adam_lr"} if factory is Muon else set()
    if unknown := sorted(set(options) - known):
        raise ConfigError(
            f"optimizer.params: {block.type} does not take {', '.join(unknown)}; it takes {', '.join(sorted(known))}"
        )
    if options.get("capturable") and not device.has_device_memory and not device.is_meta:
        raise ConfigError(
            "optimizer.params.capturable: true is for graphs of CUDA, and this run is on the CPU; remove it"
        )
    if name in _WITH_FUSED and not device.is_meta and not {"fused", "foreach"} & set(options):
        options["fused"] = not (name == "Adagrad" and device.has_device_memory)
    return factory, options


def _in_torchs_words(block: OptimizerConfig) -> dict[str, Any]:
    """Return the options without those of DeepSpeed's kernels that ask for what is the case here anyway."""
    options = dict(block.params)
    for name in ("torch_adam", "set_grad_none", "ns_method"):  # the kernel, when to free, the orthogonalisation
        options.pop(name, None)
    if "adamw_mode" in options:
        options.setdefault("adam_w_mode", options.pop("adamw_mode"))
    usual: dict[str, Any] = {"max_grad_norm": 0, "fp32_optimizer_states": True, "per_head_muon": False}
    usual |= {"bias_correction": True} if block.type.lower() in ("adam", "adamw") else {}
    usual |= {"adam_w_mode": True} if block.type.lower() not in ("adam", "adamw") else {}
    usual |= {"amsgrad": False} if block.type.lower() in ("lamb", "lion") else {}
    remedy = {"max_grad_norm": "write gradient_clipping at the top of the file"}
    for name, value in usual.items():
        if options.get(name, value) not in (value, None):
            raise ConfigError(
                f"optimizer.params.{name}: {options[name]}: {block.type} has only {value} here; "
                f"{remedy.get(name, f'use {value} or remove it')}"
            )
        options.pop(name, None)
    return options


def _made(factory: Factory, options: dict[str, Any], kind: str) -> Factory:
    """Return a factory with these options; an error of the optimizer about them is one of the configuration."""

    def make(params: Any) -> Optimizer:
        try:
            return factory(params, **options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"optimizer.params: {kind} does not take these: {error}") from error

    return make


def _spelled(name: str) -> str:
    """Return the optimizer that `name` means, in any case of letters."""
    kinds = {
        key.lower(): key
        for key, kind in {**vars(torch.optim), **_OWN}.items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    if name.lower() not in kinds:
        raise ConfigError(f"optimizer.type '{name}' is not known; known are {', '.join(sorted(kinds.values()))}")
    return kinds[name.lower()]


def _from_object(optimizer: Optimizer) -> OptimizerFactory:
    if any(_steps_taken(state) for state in optimizer.state.values()):
        raise ShardwellError(
            f"the {type(optimizer).__name__} that was passed has taken steps already; its state cannot be split. "
            "Pass a new one."
        )
    check_options(optimizer)
    labels = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}

    def make(shards: list[list[Tensor]]) -> Optimizer:
        shards = shards + [[]] * (len(optimizer.param_groups) - len(shards))  # the last ones may be empty
        for group, tensors in zip(optimizer.param_groups, shards, strict=True):
            group["params"] = tensors
        if optimizer.state:  # allocated by the constructor (as Adagrad's is): make it again, for the shards
            optimizer.state = type(optimizer)(
                [dict(group) for group in optimizer.param_groups], **optimizer.defaults
            ).state
        return optimizer

    num_states = _num_states(type(optimizer), optimizer.param_groups)
    return OptimizerFactory(labels, make, num_states, lambda: needs_full_tensors(optimizer), optimizer)


def _from_torch_muon(given: torch.optim.Muon) -> OptimizerFactory:
    """Return a factory of `shardwell.optim.muon.Muon` with the parameter groups of torch's Muon.

    Torch's Muon accepts full matrices only. Schedulers may refer to its parameter groups, so these are kept.
    """
    found = _from_object(given)

    def make(shards: list[list[Tensor]]) -> Optimizer:
        found.make(shards)
        made = Muon([dict(group) for group in given.param_groups])
        for theirs, ours in zip(given.param_groups, made.param_groups, strict=True):
            theirs.update(ours)
        made.param_groups = given.param_groups
        return made

    return OptimizerFactory(found.labels, make, is_collective=lambda: True, given=given)


def _from_factory(factory: Factory, groups: list[dict[str, Any]], device: Device) -> OptimizerFactory:
    check_kind(factory)
    labels = {id(p): index for index, group in enumerate(groups) for p in group["params"]}

    def make(shards: list[list[Tensor]]) -> Optimizer:
        shards = shards + [[]] * (len(groups) - len(shards))
        made = factory([{**group, "params": tensors} for group, tensors in zip(groups, shards, strict=True)])
        if not isinstance(made, Optimizer):
            raise ShardwellError(f"the optimizer factory returned {type(made).__name__}, not a torch.optim.Optimizer")
        check_made(made, shards)
        return made

    def is_collective() -> bool:
        return needs_full_tensors(make([[torch.zeros(1, device=device.torch_device)] for _ in groups]))

    return OptimizerFactory(labels, make, is_collective=is_collective)


def _parameter_groups(model: nn.Module, given: Iterable[Any] | None) -> list[dict[str, Any]]:
    """Return `model_parameters` as groups; it is what `listed_parameters` returned."""
    items: list[Any] = list(given if given is not None else model.parameters())
    if items and isinstance(items[0], dict):
        return items
    return [{"params": [p for p in items if p.requires_grad]}]


def _steps_taken(state: dict[str, Any]) -> bool:
    return bool(state.get("step", 1))


def _num_states(kind: Any, groups: Iterable[dict[str, Any]]) -> int:
    """Return the state tensors that an optimizer keeps for each parameter; as many as Adam's if not known."""
    kind = kind_by_step(kind) if isinstance(kind, type) else kind
    if kind is torch.optim.SGD:
        return int(any(group.get("momentum") for group in groups))
    if kind in (torch.optim.Adagrad, Lion):
        return 1
    return 2 + any(group.get("amsgrad") for group in groups)
