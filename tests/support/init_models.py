"""Models for `zero.Init` that are built in odd ways: each does what people do to parameters while they build."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

WIDTH = 12


class Net(nn.Module):
    """Three layers; `meddle` does something to them, and a later module is built behind that."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 17)
        self.second = nn.Linear(17, 17)
        self.third = nn.Linear(17, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.meddle()
        self.last = nn.Linear(WIDTH, WIDTH)

    def meddle(self) -> None:
        pass

    def after(self) -> None:
        """Between construction and training."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.last(self.norm(self.third(x)))


class OldWeightNorm(Net):
    def meddle(self) -> None:
        self.second = nn.utils.weight_norm(self.second)
        self.first = nn.utils.weight_norm(self.first, dim=1)


class NewWeightNorm(Net):
    def meddle(self) -> None:
        parametrizations.weight_norm(self.second)
        parametrizations.weight_norm(self.first, dim=1)


class OldSpectralNorm(Net):
    def meddle(self) -> None:
        nn.utils.spectral_norm(self.second)


class NewSpectralNorm(Net):
    def meddle(self) -> None:
        parametrizations.spectral_norm(self.second)


class Orthogonal(Net):
    def meddle(self) -> None:
        parametrizations.orthogonal(self.second)


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu()


class Symmetric(Net):
    def meddle(self) -> None:
        parametrize.register_parametrization(self.second, "weight", _Symmetric())


class RemovedWeightNorm(Net):
    def meddle(self) -> None:
        nn.utils.weight_norm(self.second)
        nn.utils.remove_weight_norm(self.second)
        parametrizations.weight_norm(self.first)
        parametrize.remove_parametrizations(self.first, "weight")


class SwappedData(Net):
    def meddle(self) -> None:
        a, b = self.second.weight, nn.Linear(17, 17).weight
        a.data, b.data = b.data, a.data
        self.first.bias.data, self.second.bias.data = self.second.bias.data, self.first.bias.data


class SwappedByThird(Net):
    def meddle(self) -> None:
        third = self.first.bias.data
        self.first.bias.data = self.second.bias.data
        self.second.bias.data = third


class DataOfAnother(Net):
    def meddle(self) -> None:
        self.second.weight.data = nn.Linear(17, 17).weight.data
        self.first.weight.data = torch.full((17, WIDTH), 0.25)


class DataOfAnotherShape(Net):
    def meddle(self) -> None:
        self.second.weight.data = torch.randn(17, 17).t()
        self.first.weight.data = torch.randn(17, WIDTH) * 0.1
        self.third.weight.data = torch.randn(5, 17)
        self.third.bias.data = torch.randn(5)
        self.third = nn.Sequential(self.third, nn.Linear(5, WIDTH))


class Set(Net):
    def meddle(self) -> None:
        with torch.no_grad():
            self.second.weight.set_(torch.randn(17, 17))


class SwappedTensors(Net):
    def meddle(self) -> None:
        torch.utils.swap_tensors(self.second.weight, nn.Parameter(torch.randn(17, 17)))
        torch.utils.swap_tensors(self.first.bias, self.second.bias)


class Copied(Net):
    def meddle(self) -> None:
        self.second = nn.Sequential(self.second, copy.deepcopy(self.second))
        self.second[1].weight.data.mul_(0.5)


class CopiedWhole(Net):
    def meddle(self) -> None:
        whole = copy.deepcopy(nn.ModuleList([self.first, self.second]))
        self.first, self.second = whole


class Loaded(Net):
    def meddle(self) -> None:
        other = nn.Linear(17, 17)
        self.second.load_state_dict(other.state_dict())
        self.first.load_state_dict({"weight": torch.randn(17, WIDTH), "bias": torch.randn(17)}, assign=True)


class StateDict(Net):
    def meddle(self) -> None:
        state = self.state_dict()
        state["second.weight"] = state["second.weight"] * 2
        self.load_state_dict(state)


class Moved(Net):
    def meddle(self) -> None:
        self.to("cpu")
        self.second.float()
        self.second.double()
        self.first.to(torch.float64)


class Halved(Net):
    """Values rounded by a trip through 16 bits."""

    def meddle(self) -> None:
        self.second.half()
        self.second.double()


class Applied(Net):
    def meddle(self) -> None:
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            nn.init.orthogonal_(module.weight, gain=0.5)
            nn.init.trunc_normal_(module.bias, std=0.02)


class Edited(Net):
    def meddle(self) -> None:
        with torch.no_grad():
            self.first.weight[0] = 1.0
            self.first.weight[:, 1] *= 2
            self.second.weight.copy_(self.second.weight.t().clone())
            self.second.bias += 1
        self.third.weight.data.clamp_(-0.1, 0.1)
        view = self.norm.weight.data
        self.second.bias.data.zero_()
        view.fill_(3.0)


class LateView(Net):
    """A view that is written when its parameter has been split."""

    def meddle(self) -> None:
        view = self.first.weight.data
        rows = self.second.weight.detach()[2:4]
        nn.Linear(3, 3)
        nn.init.ones_(self.third.weight)
        view.fill_(0.125)
        rows.zero_()


class RegisteredTwice(Net):
    def meddle(self) -> None:
        weight = self.second.weight
        self.second.register_parameter("weight", nn.Parameter(torch.randn(17, 17)))
        self.second.register_parameter("weight", weight)
        self.first.register_parameter("weight", nn.Parameter(torch.randn(17, WIDTH)))


class Tied(Net):
    def meddle(self) -> None:
        self.third = nn.Linear(17, 17)
        self.third.weight = self.second.weight
        self.third = nn.Sequential(self.third, nn.Linear(17, WIDTH))


class Vectors(Net):
    def meddle(self) -> None:
        vector = nn.utils.parameters_to_vector(self.second.parameters())
        nn.utils.vector_to_parameters(vector * 0.5, self.second.parameters())


class Replaced(Net):
    def meddle(self) -> None:
        self.second.weight = nn.Parameter(self.second.weight.detach() * 2)
        self.first.weight = nn.Parameter(self.first.weight.data)
        self.third.bias = nn.Parameter(torch.zeros(WIDTH))


class Deleted(Net):
    def meddle(self) -> None:
        del self.second.weight
        self.second.weight = nn.Parameter(torch.randn(17, 17))
        self.third.bias = None
        del self.first
        self.first = nn.Linear(WIDTH, 17)


class Buffers(Net):
    def meddle(self) -> None:
        self.register_buffer("scale", self.second.weight.abs().mean())
        self.register_buffer("copy", self.first.weight.data.clone())
        self.second = nn.Sequential(self.second, nn.BatchNorm1d(17).eval())


class Frozen(Net):
    def meddle(self) -> None:
        self.first.requires_grad_(False)
        self.second.weight.requires_grad = False


class ForwardFirst(Net):
    """Infers a size by running what is there, with and without gradients."""

    def meddle(self) -> None:
        with torch.no_grad():
            self.third(self.second(self.first(torch.ones(2, WIDTH))))
        loss = self.norm(self.third(torch.tanh(self.second(self.first(torch.ones(2, WIDTH)))))).square().sum()
        nn.Linear(3, 3)  # another module is touched between forward and backward
        nn.init.normal_(self.first.bias)
        loss.backward()
        with torch.no_grad():
            for layer in (self.first, self.second, self.third, self.norm):
                for parameter in layer.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.01 * parameter.grad
        self.zero_grad()


class SavedItself(Net):
    """Operations that save the parameter itself for backward, and not a view of it."""

    def meddle(self) -> None:
        loss = (self.first.weight * self.first.weight).sum() + (self.second.bias.exp() * 2).sum()
        nn.init.ones_(self.third.weight)
        nn.init.ones_(self.norm.weight)
        loss.backward()
        grads = self.first.weight.grad, self.second.bias.grad
        with torch.no_grad():
            self.first.weight.add_(grads[0], alpha=-0.1)
            self.second.bias.sub_(grads[1])
        self.zero_grad()


class _Scaled(nn.Parameter):
    """A harmless class of a user's own."""


class OwnClass(Net):
    def meddle(self) -> None:
        self.second.weight = _Scaled(self.second.weight.data * 2)
        self.second.weight.note = "kept"


class Lists(Net):
    def meddle(self) -> None:
        self.extra = nn.ParameterList([torch.randn(3), nn.Parameter(torch.randn(WIDTH))])
        self.extra_dict = nn.ParameterDict({"a": torch.randn(WIDTH)})
        self.extra.append(nn.Parameter(torch.randn(2)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.extra[1] + self.extra_dict["a"] + self.extra[0].sum() * self.extra[2].sum()


class Odd(Net):
    def meddle(self) -> None:
        self.conv = nn.Conv1d(4, 6, 3).to(memory_format=torch.contiguous_format)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.rnn = nn.LSTM(4, 5)
        self.attention = nn.MultiheadAttention(8, 2)
        self.strided = nn.Parameter(torch.randn(6, 8)[:, ::2])
        self.turned = nn.Parameter(torch.randn(6, 8).t())

    def forward(self, x: Tensor) -> Tensor:
        own = self.conv.weight.sum() + self.scalar + self.rnn.weight_hh_l0.mean() + self.attention.in_proj_weight.mean()
        return super().forward(x) * own + self.strided.sum() * self.turned.mean()


class AfterForward(ForwardFirst):
    def meddle(self) -> None:
        pass

    def after(self) -> None:
        super().meddle()
        SavedItself.meddle(self)


class AfterMoves(Net):
    def after(self) -> None:
        self.half()
        self.double()
        self.second.to("cpu")
        self.second.weight.data = self.second.weight.data.clone()
        self.first.bias.data, self.second.bias.data = self.second.bias.data, self.first.bias.data


class AfterStates(Net):
    def after(self) -> None:
        twin = copy.deepcopy(self)
        state = {key: values * 0.5 for key, values in twin.state_dict().items()}
        self.load_state_dict(state)
        parametrizations.weight_norm(self.second)
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(self.parameters()) + 0.1, self.parameters())
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        assert sum(float(parameter.norm()) for parameter in self.parameters()) > 0
        assert "away" in repr(self.first.weight) or "Parameter" in repr(self.first.weight)


BUILDERS: dict[str, type[Net]] = {
    kind.__name__: kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Net) and kind is not Net
}


def train(forward: Any, step: Any, rank: int, num_ranks: int, steps: int = 2) -> list[float]:
    """The losses of a short run; `step` takes a loss."""
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(steps):
        batch = torch.randn(4, WIDTH, generator=generator).chunk(num_ranks)[rank]
        loss = forward(batch).square().mean()
        step(loss)
        losses.append(float(loss.detach()))
    return losses
