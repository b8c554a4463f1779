"""An operation in a small training loop, on an engine and on plain PyTorch, and what came of it.

All ranks are fed the same rows, so that one plain process is the reference; that ranks with rows of their own follow
DDP is what `tests/programs` shows.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import pickle
import re
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

import shardwell
from shardwell.errors import PeerError
from shardwell.utils import safe_get_full_grad, safe_set_full_fp32_param, safe_set_full_grad
from tests.programs.model import WIDTH, Net
from tests.programs.trial import Lines, is_refusal
from tests.support.patience import HANG
from tests.what_may_i_do.operations import LOOP, OPERATIONS, Operation

TOLERANCE = 1e-5  # fp32
COLUMNS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "2, host": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "3, host": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


@dataclass(frozen=True)
class Result:
    """`works`, `warns` and `raises` (with the sentence), or `fails` (with what is wrong)."""

    kind: str
    sentence: str = ""


class PlainEngine(nn.Module):
    """What an engine is for, without one."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        super().__init__()
        self.module, self.optimizer = model, optimizer
        self._saved: dict[str, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: value.clone() for name, value in self.module.state_dict().items()}

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        return self.module.load_state_dict(state)

    def save_checkpoint(self, folder: str) -> None:
        if not folder:
            raise FileNotFoundError(folder)
        self._saved[folder] = copy.deepcopy((self.module.state_dict(), self.optimizer.state_dict()))

    def load_checkpoint(self, folder: str) -> None:
        if folder not in self._saved:
            raise FileNotFoundError(folder)
        values, state = copy.deepcopy(self._saved[folder])
        self.module.load_state_dict(values)
        self.optimizer.load_state_dict(state)
        self.zero_grad()

    def compile(self, **_: Any) -> None:  # type: ignore[override]
        pass

    def destroy(self) -> None:
        pass

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@dataclass
class Plain:
    """How code is run without shardwell."""

    def initialize(self, model: nn.Module, optimizer: Any) -> Any:
        return PlainEngine(model, optimizer)

    def whole(self, model: nn.Module) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in model.parameters()]

    names: Any = None

    def __post_init__(self) -> None:
        self.names = {
            "safe_get_full_grad": lambda p: p.grad,
            "safe_set_full_grad": lambda p, value: setattr(p, "grad", value),
            "safe_set_full_fp32_param": lambda p, value: p.data.copy_(value),
            "distributed": lambda model: model,
        }


@dataclass
class Sharded:
    """How code is run with it."""

    zero: dict[str, Any]
    names: Any = None

    def __post_init__(self) -> None:
        self.engines: list[shardwell.Engine] = []
        self.names = {
            "safe_get_full_grad": safe_get_full_grad,
            "safe_set_full_grad": safe_set_full_grad,
            "safe_set_full_fp32_param": safe_set_full_fp32_param,
            "distributed": partial(nn.parallel.DistributedDataParallel, find_unused_parameters=True),
        }

    def initialize(self, model: nn.Module, optimizer: Any) -> Any:
        config = {
            "zero_optimization": {"stage3_param_persistence_threshold": 0, **self.zero},
            "shardwell": {"divergence_timeout": 40.0},
        }
        self.engines.append(shardwell.initialize(model=model, optimizer=optimizer, config=config).engine)
        return self.engines[-1]

    def whole(self, model: nn.Module) -> list[Tensor]:
        with shardwell.zero.GatheredParameters(model.parameters()):
            return [parameter.detach().clone() for parameter in model.parameters()]


def train(operation: Operation, world: Plain | Sharded, folder: str) -> Iterator[Any]:
    """What is seen: the losses, what the code found, and in the end all values."""
    model = Net()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator) + 0.1)
    torch.manual_seed(0)
    names: dict[str, Any] = {
        "torch": torch, "contextlib": contextlib, "copy": copy, "pickle": pickle, "os": os, "shardwell": shardwell,
        "Net": Net, "folder": folder, "initialize": world.initialize, "model": model,
        "x": torch.randn(4, WIDTH, generator=generator), **world.names,
    }  # fmt: skip

    def write(code: str) -> None:
        exec(compile(code, operation.name, "exec"), names)

    code = "\n".join(operation.lines)
    write(operation.born or (code if operation.when == "born" else ""))
    optimizer = names["optimizer"] = eval(operation.optimizer, names)
    names["engine"] = world.initialize(names["model"], optimizer if operation.given else None)
    if operation.when == "start":
        write(code)
    for step in range(operation.num_steps):
        names["step"] = step
        yield from _one_step(operation, write, code, names)
    yield from world.whole(names["model"])


def _one_step(operation: Operation, write: Any, code: str, names: dict[str, Any]) -> Iterator[Any]:
    if operation.when == "loop":
        write(code)
    else:
        forward, backward, step = LOOP.strip().splitlines()
        write(code if operation.when == "forward" else forward)
        write(backward)
        if operation.when == "backward":
            write(code)
        write(step)
    yield names["loss"].detach()
    if operation.when == "between" and names["step"] < operation.num_steps - 1:
        write(code)
    if "found" in names:
        found = names["found"]
        yield from list(found) if isinstance(found, (list, tuple)) else [found]


def _run(operation: Operation, world: Plain | Sharded, folder: str) -> tuple[list[Any], Exception | None]:
    seen: list[Any] = []
    before = Path.cwd()
    try:
        os.chdir(folder)
        for value in train(operation, world, folder):
            is_tensor = isinstance(value, Tensor)
            seen.append(torch.tensor(value.detach().tolist() if is_tensor else float(value), dtype=torch.float64))
    except Exception as error:
        return seen, error
    finally:
        os.chdir(before)
    return seen, None


def perform(operation: Operation, column: str, folder: str) -> Result:
    """On this rank. What is said of the plain loop as well says nothing of an operation."""
    expected, its_error = _plainly(operation.name)
    world, log = Sharded(COLUMNS[column]), Lines()
    logging.getLogger("shardwell").addHandler(log)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen, error = _run(operation, world, folder)
    finally:
        logging.getLogger("shardwell").removeHandler(log)
        for engine in world.engines:
            with contextlib.suppress(Exception):
                engine.destroy(whole=False)
        del world
    by_name = [
        one for one in caught if "shardwell" in f"{one.filename} {one.message}" or one.filename == operation.name
    ]
    said = [str(one.message) for one in by_name] + log.said
    if operation is OPERATIONS[0]:
        _ordinary.update(said)
    said = [text for text in said if text not in _ordinary]
    if error is not None:
        return _of_error(error.with_traceback(None), its_error)
    same = len(seen) >= len(expected) and all(map(_close, expected, seen))
    if said:
        return Result("warns", said[0])
    if its_error is not None:
        return Result("fails", f"it goes on without a word where plain PyTorch raises {type(its_error).__name__}")
    return Result("works") if same else Result("fails", "other numbers than plain PyTorch, without a word")


@cache
def _plainly(name: str) -> tuple[list[Any], Exception | None]:
    """What plain PyTorch gives, which is the same for all columns."""
    (operation,) = [one for one in OPERATIONS if one.name == name]
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as elsewhere:
        warnings.simplefilter("ignore")
        seen, error = _run(operation, Plain(), elsewhere)
    return seen, None if error is None else error.with_traceback(None)


_ordinary: set[str] = set()  # what is said of the plain loop


def _close(value: Tensor, other: Tensor) -> bool:
    return value.shape == other.shape and bool(((value - other).abs() <= TOLERANCE * (1 + value.abs())).all())


def _of_error(error: Exception, of_plain: Exception | None) -> Result:
    sentence = f"{type(error).__name__}: {error}"
    if is_refusal(error) or type(error) is type(of_plain):
        return Result("raises", sentence)
    return Result("fails", sentence)


def perform_all(names: list[str], column: str, folder: str, progress: str) -> list[dict[str, str]]:
    """The job of a rank: operations in turn, until one fails; the next job starts clean.

    What came of each is written down at once: nobody can be asked after a crash.
    """
    store = dist.distributed_c10d._get_default_store()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    (Path(folder) / "plain").mkdir(exist_ok=True)
    perform(OPERATIONS[0], column, str(Path(folder) / "plain"))
    by_name = {operation.name: operation for operation in OPERATIONS}
    done = []
    for number, name in enumerate(names):
        own = Path(folder) / str(number)
        own.mkdir(exist_ok=True)
        result = perform(by_name[name], column, str(own))
        store.set(f"operation/{number}/{rank}", json.dumps(vars(result)))
        keys = [f"operation/{number}/{other}" for other in range(num_ranks)]
        store.wait(keys, timedelta(seconds=HANG))
        result = _merged([Result(**json.loads(store.get(key))) for key in keys])
        done.append({"kind": result.kind, "sentence": plain_words(result.sentence, folder)})
        with Path(f"{progress}.{rank}").open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
        if result.kind == "fails":
            break
    return done


def _merged(results: list[Result]) -> Result:
    """The worst of all ranks; what a rank heard of a peer's error is not its own."""
    own = [one for one in results if PeerError.__name__ not in one.sentence] or results
    return min(own, key=lambda one: ["fails", "raises", "warns", "works"].index(one.kind))


def plain_words(sentence: str, folder: str) -> str:
    """Without what differs from run to run, and on one line."""
    sentence = re.sub(re.escape(folder) + r"[\w/.-]*", "FOLDER", sentence)
    sentence = re.sub(r"0x[0-9a-f]+", "0x...", sentence)
    sentence = re.sub(r"\(on this rank, \d+\)", "(on this rank)", sentence)  # the first one that fails
    sentence = " ".join(sentence.split())
    return sentence if len(sentence) <= 400 else sentence[:397] + "..."
