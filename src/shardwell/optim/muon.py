"""Muon: matrices move along their orthogonalised momentum, all other parameters are stepped by AdamW.

The momentum is elementwise and stays sharded. Only its orthogonalisation needs full matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT

from shardwell.errors import ConfigError, ShardwellError
from shardwell.optim.full_tensors import FullTensors, LocalFullTensors
from shardwell.optim.lamb import adam_state
from shardwell.optim.lion import check_options, evaluate, with_gradients

_SHARED = ("ns_coefficients", "ns_steps", "eps")  # equal in all groups with use_muon: one function for all matrices
_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_MAX_STEPS = 100


class Muon(Optimizer):
    """An optimizer equal to `torch.optim.Muon`, bit for bit; groups with `use_muon` false are stepped by AdamW.

    Parameters with more than two dimensions are matrices stacked along the leading ones. `betas` and `adam_eps` are
    AdamW's. Both kinds of groups read `lr` and `weight_decay`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
    ) -> None:
        both = {"use_muon": True, "lr": lr, "weight_decay": weight_decay}
        muon = {"momentum": momentum, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
        newton_schulz = {"ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "eps": eps}
        adam = {"betas": betas, "adam_eps": adam_eps}
        super().__init__(params, {**both, **muon, **newton_schulz, **adam})
        check_options(self)
        for group in self._muon_groups():
            _check_muon_options(group)
        self._orthogonalise()
        self.whole: FullTensors = LocalFullTensors()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the tensors that have a gradient. Over shards, every rank must call it."""
        loss = evaluate(closure)
        orthogonalise = self._orthogonalise()
        for group in self._muon_groups():
            for tensor in with_gradients(group)[0]:
                check_matrix(self.whole.place(tensor).shape)
        work: list[tuple[Tensor, dict[str, Any]]] = []
        parts: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            tensors, gradients = with_gradients(group)
            if tensors and group["use_muon"]:
                work += [(tensor, group) for tensor in tensors]
                parts += zip(tensors, self._directions(group, tensors, gradients), strict=True)
            elif tensors:
                self._step_adamw(group, tensors, gradients)
        updates = self.whole.through(parts, orthogonalise)
        for (tensor, group), update in zip(work, updates, strict=True):
            lr = float(group["lr"])
            adjusted = _adjusted(lr, group["adjust_lr_fn"], self.whole.place(tensor).shape)
            tensor.mul_(1 - lr * group["weight_decay"])
            tensor.add_(update.reshape(tensor.shape), alpha=-adjusted)
        return loss

    @staticmethod
    def wants_whole(group: dict[str, Any]) -> bool:
        """Return whether the parameters of a group go through `whole.through`."""
        return bool(group["use_muon"])

    def _muon_groups(self) -> Iterator[dict[str, Any]]:
        return (group for group in self.param_groups if group["use_muon"])

    def _orthogonalise(self) -> Callable[[Tensor], Tensor]:
        """Return the function that orthogonalises all matrices."""
        first = next(self._muon_groups(), self.defaults)
        for key in _SHARED:
            for group in self._muon_groups():
                if group[key] != first[key]:
                    raise ConfigError(
                        f"Muon: groups with use_muon must have the same {key}; it is {first[key]} and {group[key]}"
                    )
        return partial(newton_schulz, **{key: first[key] for key in _SHARED})

    def _directions(self, group: dict[str, Any], tensors: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """Add the gradients to the momentum, and return the matrices to be orthogonalised."""
        momenta: list[Tensor] = []
        for tensor in tensors:
            state = self.state[tensor]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(tensor)
            momenta.append(state["momentum_buffer"])
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        return list(torch._foreach_lerp(gradients, momenta, group["momentum"])) if group["nesterov"] else momenta

    def _step_adamw(self, group: dict[str, Any], tensors: list[Tensor], gradients: list[Tensor]) -> None:
        steps, means, squares = adam_state(self, tensors)
        beta1, beta2 = group["betas"]
        # the fused kernel reads memory in order, and needs `step` on the device of the tensors
        can_fuse = all(t.device.type == "cpu" and t.is_contiguous() for t in (*tensors, *gradients))
        adamw(
            tensors,
            gradients,
            means,
            squares,
            [],
            steps,
            fused=can_fuse or None,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["adam_eps"],
            maximize=False,
        )


def newton_schulz(matrices: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float) -> Tensor:
    """Push the singular values of each matrix of bf16[..., m, n] towards 1. The input is not changed."""
    first, second, third = ns_coefficients
    stacked = matrices.ndim > 2
    # a single matrix needs the same calls as in torch.optim.Muon: others round differently
    multiply_add: Callable[..., Tensor] = torch.baddbmm if stacked else torch.addmm
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.flatten(0, -3) if stacked else matrices
    x = x.mT if tall else x
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) if stacked else torch.linalg.vector_norm(x)
    x = x / norm.clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=second, alpha=third), x, beta=first)
    return (x.mT if tall else x).reshape(matrices.shape).contiguous()


def muon_groups(
    named: Iterable[tuple[str, nn.Parameter]],
    model: nn.Module,
    *,
    muon_lr: float | None = None,
    adam_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Return two parameter groups for `Muon`: matrices inside the model, and all other trainable ones (AdamW).

    Embeddings, convolutions and the output layer are not "inside". A parameter's own attribute `use_muon`, if it has
    one, decides. The output layer is the result of `model.get_output_embeddings()`, or the last Linear directly below
    the root.
    """
    outside = {id(parameter) for layer in _outer_layers(model) for parameter in layer.parameters()}
    chosen: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    seen: set[int] = set()
    for name, parameter in named:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        use_muon = bool(getattr(parameter, "use_muon", parameter.ndim >= 2 and id(parameter) not in outside))
        if use_muon:
            check_matrix(tuple(parameter.shape), f"'{name}'")
        chosen[use_muon].append(parameter)
    rates = {True: muon_lr, False: adam_lr}
    return [
        {"params": parameters, "use_muon": use_muon} | ({} if rates[use_muon] is None else {"lr": rates[use_muon]})
        for use_muon, parameters in chosen.items()
    ]


def _outer_layers(model: nn.Module) -> Iterator[nn.Module]:
    kinds = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)
    yield from (module for module in model.modules() if isinstance(module, kinds))
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if output is None:
        output = next((child for child in reversed(list(model.children())) if isinstance(child, nn.Linear)), None)
    if output is not None:
        yield output


def _adjusted(lr: float, how: str | None, shape: tuple[int, ...]) -> float:
    """Return the learning rate for the orthogonalised update of m x n matrices."""
    rows, columns = shape[-2:]
    if how == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(max(1, rows / columns))


def check_matrix(shape: tuple[int, ...], name: str = "a parameter") -> None:
    """Refuse a parameter with fewer than two dimensions."""
    if len(shape) < 2:
        raise ShardwellError(
            f"Muon orthogonalises matrices, and {name} has shape {list(shape)}. "
            "Put it in a parameter group with use_muon false (muon_groups does that)."
        )


def _check_muon_options(group: dict[str, Any]) -> None:
    if len(group["ns_coefficients"]) != 3:
        raise ConfigError(f"Muon: ns_coefficients is {group['ns_coefficients']}; it must be three numbers")
    if not 0 <= group["ns_steps"] < _MAX_STEPS:
        raise ConfigError(f"Muon: ns_steps is {group['ns_steps']}; it must be at least 0 and below {_MAX_STEPS}")
    if group["adjust_lr_fn"] not in _ADJUSTMENTS:
        raise ConfigError(f"Muon: adjust_lr_fn is {group['adjust_lr_fn']!r}; it must be one of {_ADJUSTMENTS}")
