"""An engine's whole state into checkpoints and back: which values there are besides tensors, and who says what to whom.

The formats, the cutting and the files are `shardwell.checkpoint`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwell.checkpoint.contents import Contents, aliases_of, extra_state_of
from shardwell.checkpoint.folder import Folder
from shardwell.checkpoint.load import Loading
from shardwell.checkpoint.manifest import Manifest
from shardwell.checkpoint.save import LITTLE_PATIENCE, PATIENCE, Saver
from shardwell.checkpoint.sources import OwnSource, Source, is_foreign, locate_own, open_source
from shardwell.checkpoint.values import decode, encode
from shardwell.comm import Collectives, Kind
from shardwell.errors import CheckpointError, DivergenceError
from shardwell.optim import ShardedOptimizer
from shardwell.version import __version__

if TYPE_CHECKING:
    from shardwell.engine.engine import Engine

_ERROR, _TEXT, _NONE = "error ", "text ", "none"
_ENCODED = ("optimizer", "scheduler", "extra", "client")  # values that may name tensors
_EXTRA = "_extra_state"  # what torch appends to a module's name


class Checkpoints:
    """Saves and loads one engine."""

    def __init__(self, engine: Engine) -> None:
        self._context = context = engine._context
        self._world = context.world
        self._saver = Saver(
            self._world.mesh.rank, self._world.mesh.size, engine._agreement.store, context.device, context.account
        )

    # --------------------------------------------------------------------------------------------------- saving

    def save(
        self,
        engine: Engine,
        root: str,
        tag: str,
        client_state: Any,
        *,
        exclude_frozen: bool,
        asynchronous: bool,
        is_latest: bool,
    ) -> None:
        with self._together(f"save_checkpoint({tag!r})"):
            self._end_background()
            _check_whole_steps(engine)
            _settle(engine)
            contents = Contents(
                engine.module,
                engine._flow.units,
                engine.optimizer,
                rank=engine.global_rank,
                exclude_frozen=exclude_frozen,
            )
            values: dict[str, Any] = {}
            problem: Exception | None = None
            try:
                values = self._values(engine, contents, client_state, exclude_frozen)
            except Exception as error:
                problem = error
            self._agree(problem)
            folder = Folder(root)

            def begin() -> str:
                folder.clean()
                return str(folder.begin(tag))

            temporary = Path(self._from_rank_0(begin))
            keep_last = engine.config.shardwell.keep_last
            look = self._patience_in_background if asynchronous else self._patience_of_all()
            job = self._saver.next_job(folder, tag, temporary, is_latest=is_latest, keep_last=keep_last, look=look)
            (self._saver.write_later if asynchronous else self._saver.write_now)(job, contents, values)

    def _patience_in_background(self) -> float:
        """A rank that has failed may still be writing, and end well."""
        has_failed = self._world.agreement is not None and self._world.agreement.has_failed
        return LITTLE_PATIENCE if has_failed else PATIENCE

    def _patience_of_all(self) -> Callable[[], float]:
        """Where all ranks wait, none has to for one that has failed."""
        look_at_peers = self._world.looking()

        def look() -> float:
            look_at_peers()
            return PATIENCE

        return look

    def _end_background(self) -> None:
        """Until nothing is being written; raises on all ranks what went wrong, though some may know already."""
        problem: CheckpointError | None = None
        try:
            self._saver.wait()
        except CheckpointError as error:
            problem = error
        self._agree(problem)

    def wait(self) -> None:
        """Until a save in the background has ended; raises what went wrong with it."""
        self._saver.wait()

    def check(self) -> None:
        """Raise what went wrong in the background."""
        self._saver.check()

    def _values(self, engine: Engine, contents: Contents, client_state: Any, exclude_frozen: bool) -> dict[str, Any]:
        """What this rank saves besides tensors; all but its random state is rank 0's."""
        rank = engine.global_rank
        values = {f"rng/{rank}": encode(_random_state(engine), "random state", _put(contents, f"rng/{rank}"))}
        if rank:
            return values
        schedule: dict[str, Any] = getattr(engine.lr_scheduler, "state_dict", dict)()
        return {
            **values,
            "counters": {
                "global_steps": engine.global_steps,
                "micro_steps": engine.micro_steps,
                "skipped_steps": engine.skipped_steps,
                "global_samples": engine.global_samples,
                "accumulation_steps": engine.gradient_accumulation_steps(),
            },
            "world_size": engine.world_size,
            "stage": engine.zero_optimization_stage(),
            "versions": {"shardwell": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "config": engine.config.model_dump(mode="json"),
            "aliases": aliases_of(engine.module, engine._flow.units),
            "frozen_excluded": exclude_frozen,
            "optimizer": _of_optimizer(engine.optimizer, _put(contents, "optimizer")),
            "scheduler": _what_can_be_saved(schedule, "lr_scheduler", _put(contents, "scheduler")),
            "loss_scale": engine._scale.state_dict() if engine._scale.is_on else None,
            "loader": engine.training_dataloader.state_dict() if engine.training_dataloader is not None else None,
            "extra": encode(extra_state_of(engine.module), "the model's extra state", _put(contents, "extra")),
            "client": encode(client_state or {}, "client_state", _put(contents, "client")),
            "model_config": _model_config(engine),
        }

    # -------------------------------------------------------------------------------------------------- loading

    def load(
        self,
        engine: Engine,
        root: str,
        tag: str | None,
        *,
        strict: bool,
        with_optimizer: bool,
        with_scheduler: bool,
        module_only: bool,
    ) -> tuple[str | None, Any]:
        with self._together(f"load_checkpoint({tag!r})"):
            self._end_background()
            source = self._open(root, tag)
            if source is None:
                return None, None
            try:
                if not module_only:
                    self._check_loader(engine, source)
                values = self._take(engine, source, strict=strict, with_optimizer=with_optimizer and not module_only)
            finally:
                source.close()
            if not module_only:
                _restore_values(engine, values, with_optimizer, with_scheduler)
            return source.where, values.get("client", {})

    def load_model(self, engine: Engine, path: str, *, strict: bool) -> None:
        """Only the model's own tensors, from any source."""
        with self._together(f"load_model({path!r})"):
            self._end_background()
            source = self._open_foreign(path, None)
            try:
                self._take(engine, source, strict=strict, with_optimizer=False)
            finally:
                source.close()

    def _open(self, root: str, tag: str | None) -> Source | None:
        """Rank 0 looks and reads the manifest; the others are told. None if there is no checkpoint yet."""

        mine: list[OwnSource] = []

        def look() -> str | None:
            Folder(root).clean()
            own = locate_own(root, tag) if os.path.exists(root) else None
            if own is not None:
                folder, chosen = own
                path, manifest = folder.path(chosen), folder.open(chosen)
                mine.append(OwnSource(path, manifest))
                return json.dumps({"path": str(path), "manifest": manifest.text()})
            if is_foreign(root):
                return json.dumps({})
            return None if tag is None else str(Folder(root).path(tag))  # which says what is there

        found = self._from_rank_0_or_none(look)
        if found is None:
            return None
        told = json.loads(found)
        if not told:
            return self._open_foreign(root, tag)
        return mine[0] if mine else OwnSource(Path(told["path"]), Manifest.from_json(told["manifest"], told["path"]))

    def _open_foreign(self, path: str, tag: str | None) -> Source:
        source: Source | None = None
        problem: Exception | None = None
        try:
            source = open_source(path, tag)
        except Exception as error:
            problem = error
        self._agree(problem)
        assert source is not None
        return source

    def _check_loader(self, engine: Engine, source: Source) -> None:
        problem: Exception | None = None
        if engine.training_dataloader is not None and source.values.get("loader"):
            try:
                engine.training_dataloader.check_state_dict(source.values["loader"])
            except Exception as error:
                problem = error
        self._agree(problem)

    def _take(self, engine: Engine, source: Source, *, strict: bool, with_optimizer: bool) -> dict[str, Any]:
        """Make what is stored the model's and the optimizer's; returns what else this rank needs. All or nothing."""
        _settle(engine, is_overwritten=with_optimizer)
        problem: Exception | None = None
        try:
            optimizer = engine.optimizer if with_optimizer else None
            _check_kind(optimizer, source)
            loading = Loading(source, engine.module, engine._flow.units, optimizer, strict=strict)
            loading.fetch()
            wanted = {**dict.fromkeys(_ENCODED), f"rng/{engine.global_rank}": None}
            decoded = {key: decode(source.values[key], key, _get(source)) for key in wanted if key in source.values}
        except Exception as error:
            problem = error
        self._agree(problem)
        engine._flow.end_loans()
        if with_optimizer and engine.optimizer is not None:
            engine.optimizer.habit.excuse()  # whatever updates have changed is overwritten
        engine.zero_grad()
        for group in (group for unit in engine._flow.units for group in unit.trainable):
            group.gradients.free()
        loading.apply()
        return {**source.values, **decoded}

    # ------------------------------------------------------------------------------------------------ the ranks

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """All ranks must come here. A rank that comes alone learns so instead of waiting for ever.

        What is wrong with a checkpoint they tell each other, and the engine can go on.
        """
        name = what.partition("(")[0]
        with self._context.failing_together(name, common=(CheckpointError,)):
            try:
                self._world.barrier(what)
            except DivergenceError as error:
                raise DivergenceError(f"{error} All ranks must call {name}, with the same tag.") from None
            yield

    def _from_rank_0(self, ask: Callable[[], str]) -> str:
        text = self._from_rank_0_or_none(ask)
        assert text is not None
        return text

    def _from_rank_0_or_none(self, ask: Callable[[], str | None]) -> str | None:
        """What `ask` returns on rank 0; if it raises there, all ranks raise that."""
        words = _NONE
        if self._world.mesh.rank == 0:
            try:
                text = ask()
                words = _NONE if text is None else _TEXT + text
            except Exception as error:
                words = _ERROR + _words(error)
        words = _share(self._world, words)
        if words.startswith(_ERROR):
            raise CheckpointError(words.removeprefix(_ERROR))
        return None if words == _NONE else words.removeprefix(_TEXT)

    def _agree(self, problem: Exception | None) -> None:
        """Raise on every rank if one of them has a problem."""
        world = self._world
        first = int(world.least(world.mesh.size if problem is None else world.mesh.rank, "CHECK"))
        if first < world.mesh.size:
            words = _share(world, _words(problem) if problem is not None else "", first)
            if isinstance(problem, CheckpointError):
                raise problem
            raise CheckpointError(_words(problem) if problem is not None else f"rank {first}: {words}") from problem


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _share(world: Collectives, text: str, source: int = 0) -> str:
    """`source`'s text, on every rank."""
    device = world.device.torch_device
    mine = text.encode()
    size = torch.tensor([len(mine)], dtype=torch.int64, device=device)
    world.broadcast(size, source, Kind.SETUP, "TEXT")
    letters = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if world.mesh.rank == source and mine:
        letters.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    world.broadcast(letters, source, Kind.SETUP, "TEXT")
    return bytes(letters.cpu().numpy()).decode()


def _settle(engine: Engine, *, is_overwritten: bool = False) -> None:
    """The engine fits its model, and the last step has ended well."""
    engine.fit_to_model()
    if engine.optimizer is not None:
        engine.optimizer.settle(but_begun=is_overwritten)
    opened = [unit.name for unit in engine._flow.units if unit.opened]
    if opened:
        raise CheckpointError(f"unit '{opened[0]}' is open: leave GatheredParameters before saving or loading")


def _check_whole_steps(engine: Engine) -> None:
    """No part of a step that has not come is in what is saved. All ranks find the same."""
    ahead = [unit.name for unit in engine._flow.units if unit.is_ahead]
    if ahead:
        raise CheckpointError(
            f"the update of unit '{ahead[0] or '(root)'}' has begun ahead of its step, and a checkpoint would hold a "
            'part of that step: save after the step, or set "shardwell": {"commit": "after_norm"}'
        )


def _put(contents: Contents, prefix: str) -> Callable[[Tensor], str]:
    """Saves tensors among the contents, under numbered names."""
    count = 0

    def put(tensor: Tensor) -> str:
        nonlocal count
        name = f"other/{prefix}/{count}"
        count += 1
        contents.add(name, "other", tensor.detach().cpu().clone())
        return name

    return put


def _get(source: Source) -> Callable[[str], Tensor]:
    def get(name: str) -> Tensor:
        if name not in source.tensors:
            raise CheckpointError(f"{source.where}: tensor {name!r}: named by a value, but not there")
        stored = source.tensors[name]
        return source.read(name, 0, stored.numel).as_strided(stored.shape, stored.order)

    return get


# ------------------------------------------------------------------------------------------- what is not a tensor


def _restore_values(engine: Engine, values: dict[str, Any], with_optimizer: bool, with_scheduler: bool) -> None:
    counters = values.get("counters", {})
    engine.global_steps = int(counters.get("global_steps", 0))
    engine.global_samples = int(counters.get("global_samples", 0))
    steps = int(counters.get("micro_steps", 0)) // int(counters.get("accumulation_steps", 1) or 1)
    engine.micro_steps = steps * engine.gradient_accumulation_steps()
    if engine.optimizer is not None:
        engine.optimizer.skipped_steps = int(counters.get("skipped_steps", 0))
        if with_optimizer and values.get("optimizer"):
            _restore_groups(engine.optimizer, values["optimizer"])
    if with_scheduler and engine.lr_scheduler is not None and values.get("scheduler"):
        _restore_schedule(engine.lr_scheduler, values["scheduler"])
    if engine._scale.is_on and values.get("loss_scale"):
        engine._scale.load_state_dict(values["loss_scale"])
    if engine.training_dataloader is not None and values.get("loader"):
        engine.training_dataloader.load_state_dict(values["loader"])
    for key, state in values.get("extra", {}).items():
        engine.module.get_submodule(key.removesuffix(_EXTRA).rstrip(".")).set_extra_state(state)
    state = values.get(f"rng/{engine.global_rank}")
    if state is not None:
        _set_random_state(engine, state)


def _of_optimizer(optimizer: ShardedOptimizer | None, put: Callable[[Tensor], str]) -> Any:
    if optimizer is None:
        return None
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    kept = [_what_can_be_saved(group, f"optimizer.param_groups[{i}]", put) for i, group in enumerate(groups)]
    return {"kind": type(optimizer.inner).__name__, "param_groups": kept}


def _what_can_be_saved(state: dict[str, Any], where: str, put: Callable[[Tensor], str]) -> dict[str, Any]:
    """Entries that cannot be saved (functions) are left out: the object that takes the state back has its own."""
    kept = {}
    for key, value in state.items():
        try:
            kept[key] = encode(value, f"{where}.{key}", put)
        except CheckpointError as error:
            warnings.warn(f"left out of the checkpoint: {error}", stacklevel=2)
    return kept


def _check_kind(optimizer: ShardedOptimizer | None, source: Source) -> None:
    saved = source.values.get("optimizer")
    kind = saved.get("kind") if isinstance(saved, dict) else None
    if optimizer is None or kind is None:
        return
    mine = type(optimizer.inner).__name__
    if kind != mine and {kind, mine} != {"Adam", "AdamW"}:
        raise CheckpointError(
            f"{source.where}: holds the state of {kind}, and this engine's optimizer is {mine}. "
            "To load the model alone, pass load_optimizer_states=False."
        )


def _restore_groups(optimizer: ShardedOptimizer, saved: dict[str, Any]) -> None:
    groups = saved.get("param_groups", [])
    if len(groups) != len(optimizer.param_groups):
        warnings.warn(
            f"the checkpoint has {len(groups)} parameter group(s), the optimizer {len(optimizer.param_groups)}: "
            "learning rates and other settings stay as they are",
            stacklevel=2,
        )
        return
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})


def _restore_schedule(schedule: Any, saved: dict[str, Any]) -> None:
    if not set(saved) & set(schedule.state_dict()):
        warnings.warn(
            f"the checkpoint holds the state of another schedule than {type(schedule).__name__}", stacklevel=2
        )
        return
    schedule.load_state_dict(saved)


def _random_state(engine: Engine) -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    on_device = engine._context.device.random_state()
    if on_device is not None:
        state["cuda"] = on_device
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def _set_random_state(engine: Engine, state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        engine._context.device.set_random_state(state["cuda"])
    if "numpy" in sys.modules and "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])


def _model_config(engine: Engine) -> Any:
    """A Hugging Face model's own description, for exports."""
    text = getattr(getattr(engine.module, "config", None), "to_json_string", None)
    return json.loads(text()) if callable(text) else None
