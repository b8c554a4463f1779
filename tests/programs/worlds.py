"""The two interpreters. `Plain` is the reference: one process that computes the rows of all ranks, one after the other,
with averages over ranks and accumulation steps as DDP has them. `Sharded` is one rank of real ones, with engines.

Where an engine differs from a plain loop by design, the reference says so: `engine.step()` counts micro-steps, clears
the gradients after it applied them, and clips as configured; `load_checkpoint` goes on from a boundary, without
gradients.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.utils import safe_get_full_grad, safe_set_full_grad
from tests.programs.model import WIDTH, Losses, Net
from tests.programs.program import Setting

ROWS = 2
DTYPES = {"float64": torch.float64, "float32": torch.float32}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.8, weight_decay=0.05),
    # An epsilon that keeps gradients of rounding noise from becoming steps.
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.03, weight_decay=0.2, eps=1e-2),
}


def make_model(seed: int, dtype: torch.dtype) -> Net:
    model = Net().to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.5 * values + 0.1)
    return model


def make_optimizer(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    parameters: list[Any] = list(model.parameters())
    if setting.groups == 2:
        parameters = [{"params": parameters[::2], "lr": 0.05}, {"params": parameters[1::2], "weight_decay": 0.0}]
    return OPTIMIZERS[setting.optimizer](parameters)


class World(ABC):
    """What instructions act on."""

    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]  # the user's own objects
    is_reference: bool
    own: int  # which of the rows that are computed here belong to this rank

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.slots: dict[str, tuple[str, list[Losses]]] = {}  # of which model, and for each rank
        self.remembered: dict[tuple[str, str], Any] = {}
        self.seen: list[tuple[str, Any]] = []

    def see(self, what: str, value: Any) -> None:
        """Copies of tensors: what was seen must not change with the model."""
        if isinstance(value, Tensor):
            value = torch.tensor(value.detach().tolist(), dtype=torch.float64)
        self.seen.append((what, value))

    def rows(self, data: int) -> list[Tensor]:
        """What the ranks that are computed here are fed."""
        shape = (self.setting.ranks, ROWS, WIDTH)
        generator = torch.Generator().manual_seed(1000 + data)
        return list(torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)[self.ranks])

    def call(self, who: str) -> Callable[..., Any]:
        if len(who) == 1:
            return self.callable(who)
        first, second = (self.callable(one) for one in who)
        return lambda x, *args, **kwargs: second(first(x), *args, **kwargs)

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @property
    @abstractmethod
    def ranks(self) -> slice: ...

    @abstractmethod
    def callable(self, who: str) -> Callable[..., Any]: ...

    @abstractmethod
    def backward(self, who: str, of_ranks: list[Tensor], how: str, *, retain: bool) -> None: ...

    @abstractmethod
    def step(self, who: str) -> None: ...

    @abstractmethod
    def zero_grad(self, who: str, *, set_to_none: bool) -> None:
        """The engine's."""

    @abstractmethod
    def optimizer(self, who: str) -> Any:
        """The engine's."""

    @abstractmethod
    def with_states(self, who: str, how: str) -> Any:
        """What has `state_dict` and `load_state_dict`."""

    @abstractmethod
    def full_grad(self, parameter: nn.Parameter) -> Tensor | None: ...

    @abstractmethod
    def set_full_grad(self, parameter: nn.Parameter, value: Tensor) -> None: ...

    @abstractmethod
    def save(self, who: str) -> None: ...

    @abstractmethod
    def load(self, who: str) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class Plain(World):
    """The reference."""

    is_reference = True

    def __init__(self, setting: Setting, own: int) -> None:
        super().__init__(setting)
        self.own = own
        self.models = {who: make_model(seed, self.dtype) for seed, who in enumerate(setting.models)}
        self.optimizers = {who: make_optimizer(model, setting) for who, model in self.models.items()}
        self._micro_steps = dict.fromkeys(setting.models, 0)
        self._saved: dict[str, Any] = {}

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES.get(self.setting.dtype, torch.float64)

    @property
    def ranks(self) -> slice:
        return slice(None)

    def callable(self, who: str) -> Callable[..., Any]:
        return self.models[who]

    def backward(self, who: str, of_ranks: list[Tensor], how: str, *, retain: bool) -> None:
        total = sum(of_ranks[1:], of_ranks[0])
        (total / (self.setting.ranks * self.setting.accumulation)).backward(retain_graph=retain)

    def step(self, who: str) -> None:
        if self.setting.loop != "engine":
            self.optimizers[who].step()
            return
        self._micro_steps[who] += 1
        if self._micro_steps[who] % self.setting.accumulation == 0:
            if self.setting.clip:
                nn.utils.clip_grad_norm_(self.models[who].parameters(), self.setting.clip)
            self.optimizers[who].step()
            self.models[who].zero_grad()

    def zero_grad(self, who: str, *, set_to_none: bool) -> None:
        self.models[who].zero_grad(set_to_none)

    def optimizer(self, who: str) -> Any:
        return self.optimizers[who]

    def with_states(self, who: str, how: str) -> Any:
        return self.optimizers[who] if "optimizer" in how else self.models[who]

    def full_grad(self, parameter: nn.Parameter) -> Tensor | None:
        return parameter.grad

    def set_full_grad(self, parameter: nn.Parameter, value: Tensor) -> None:
        parameter.grad = value

    def save(self, who: str) -> None:
        states = self.models[who].state_dict(), self.optimizers[who].state_dict(), self._micro_steps[who]
        self._saved[who] = copy.deepcopy(states)

    def load(self, who: str) -> None:
        if who in self._saved:
            values, state, micro_steps = copy.deepcopy(self._saved[who])
            self.models[who].load_state_dict(values)
            self.optimizers[who].load_state_dict(state)
            self._micro_steps[who] = micro_steps // self.setting.accumulation * self.setting.accumulation
            self.models[who].zero_grad()

    def close(self) -> None:
        pass


class Sharded(World):
    """One rank, with an engine for each model."""

    is_reference = False
    own = 0

    def __init__(self, setting: Setting, folder: Path) -> None:
        super().__init__(setting)
        self._folder = folder
        self.models, self.optimizers, self._engines = {}, {}, {}
        self._saved: set[str] = set()
        for seed, who in enumerate(setting.models):
            model = make_model(seed, self.dtype)
            if setting.loop != "after":
                self.optimizers[who] = make_optimizer(model, setting)
            given = self.optimizers.get(who) if setting.loop in ("engine", "given") else None
            self._engines[who] = shardwell.initialize(model=model, optimizer=given, config=self._config()).engine
            if setting.loop == "after":
                self.optimizers[who] = make_optimizer(model, setting)
            self.models[who] = model

    def _config(self) -> dict[str, Any]:
        setting = self.setting
        zero: dict[str, Any] = {"stage": setting.stage, "stage3_param_persistence_threshold": 0}
        if setting.offload != "none":
            zero["offload_optimizer"] = {"device": "nvme" if setting.offload == "nvme" else "cpu"}
        if setting.offload == "nvme":
            drive = self._folder / "drive"
            drive.mkdir(parents=True, exist_ok=True)
            zero["offload_optimizer"]["nvme_path"] = str(drive)
        if setting.offload == "params":
            zero["offload_param"] = {"device": "cpu"}
        config: dict[str, Any] = {
            "zero_optimization": zero,
            "gradient_accumulation_steps": setting.accumulation,
            "gradient_clipping": setting.clip,
            "shardwell": {"divergence_timeout": 15.0, "shard_at_world_one": True},
        }
        if setting.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        return config

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES.get(self.setting.dtype, torch.float32)

    @property
    def ranks(self) -> slice:
        return slice(dist.get_rank(), dist.get_rank() + 1)

    def callable(self, who: str) -> Callable[..., Any]:
        engine: Callable[..., Any] = self._engines[who]
        return engine

    def backward(self, who: str, of_ranks: list[Tensor], how: str, *, retain: bool) -> None:
        (loss,) = of_ranks
        if how == "engine":
            self._engines[who].backward(loss, retain_graph=retain)
        else:
            loss.backward(retain_graph=retain)

    def step(self, who: str) -> None:
        if self.setting.loop == "engine":
            self._engines[who].step()
        else:
            self.optimizers[who].step()

    def zero_grad(self, who: str, *, set_to_none: bool) -> None:
        self._engines[who].zero_grad(set_to_none)

    def optimizer(self, who: str) -> Any:
        return self._engines[who].optimizer or self.optimizers[who]

    def with_states(self, who: str, how: str) -> Any:
        sources = {"engine": self._engines, "module": self.models, "optimizer": self.optimizers}
        return self.optimizer(who) if how == "engine.optimizer" else sources[how][who]

    def full_grad(self, parameter: nn.Parameter) -> Tensor | None:
        return safe_get_full_grad(parameter)

    def set_full_grad(self, parameter: nn.Parameter, value: Tensor) -> None:
        safe_set_full_grad(parameter, value)

    def save(self, who: str) -> None:
        self._engines[who].save_checkpoint(self._folder / who, tag="saved")
        self._saved.add(who)

    def load(self, who: str) -> None:
        if who in self._saved:
            self._engines[who].load_checkpoint(self._folder / who)

    def close(self) -> None:
        for engine in self._engines.values():
            with contextlib.suppress(Exception):
                engine.destroy(whole=False)
        if not self.setting.ranks > 1 or dist.get_rank() == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
