"""Checkpoints of an engine's state: the values besides tensors, and what all ranks must do together.

The formats, the slicing and the files are in `shardwell.checkpoint`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwell.checkpoint.folder import Folder
from shardwell.checkpoint.load import CheckpointLoader
from shardwell.checkpoint.manifest_index import index_of, manifest_of
from shardwell.checkpoint.rank_contents import RankContents, extra_state_of
from shardwell.checkpoint.save import LIMIT_AFTER_FAILURE, SILENCE_LIMIT, Saver
from shardwell.checkpoint.sources import SCALAR, ShardwellSource, Source, is_foreign, locate_own, open_source
from shardwell.checkpoint.user_folder import nothing_in
from shardwell.engine import hf_files
from shardwell.engine.checkpoint_checks import check_names, check_parts, check_scalars, check_values
from shardwell.engine.checkpoint_ranks import CheckpointRanks
from shardwell.engine.checkpoint_values import (
    check_kind,
    of_optimizer,
    random_state,
    restore_values,
    what_can_be_saved,
)
from shardwell.engine.consistency import asked_of_a_load, units_at_a_load
from shardwell.engine.model_parts import WholeModel
from shardwell.errors import CheckpointError
from shardwell.json_values import decode, encode
from shardwell.parallel.consistency import check_alike
from shardwell.version import __version__

if TYPE_CHECKING:
    from shardwell.engine.engine import Engine

_ENCODED = ("optimizer", "scheduler", "extra", "client")  # values that may name tensors


class EngineCheckpoints:
    """Saves and loads one engine."""

    def __init__(self, engine: Engine) -> None:
        self._context = context = engine._context
        self._all = context.roles.all
        self._ranks = CheckpointRanks(context.roles)
        self.parts = WholeModel(context.roles)  # what this rank has of the model
        self.saves_in_background = False  # or has done so: `check` may raise an error
        self._without_optimizer = False  # a checkpoint was saved or loaded before there was an optimizer
        self._saver = Saver(
            self._all.rank_group.rank,
            self._all.rank_group.size,
            engine._context.roles.agreement.store,
            context.device,
            context.memory_stats,
        )

    def meet(self, optimizer: Optimizer) -> None:
        """Warn if the engine takes over an optimizer that a checkpoint has left out."""
        if self._without_optimizer:
            name = type(optimizer).__name__
            warnings.warn(
                f"a checkpoint was saved or loaded before this {name} took its first step. It holds nothing of the "
                f"{name}, its learning rate included: the engine did not know it. Give it to "
                "shardwell.initialize(optimizer=...) to have it saved and loaded from the start.",
                stacklevel=2,
            )

    # --------------------------------------------------------------------------------------------------- saving

    def save(
        self,
        engine: Engine,
        given: Any,
        tag: str,
        client_state: Any,
        *,
        exclude_frozen: bool,
        asynchronous: bool,
        is_latest: bool,
    ) -> None:
        """Save a checkpoint. All ranks must call it."""
        with self._ranks.together("save_checkpoint", tag):
            check_parts(engine)
            self._end_background()
            self._without_optimizer |= engine.optimizer is None
            self._ranks.check_same(tag, "save_checkpoint: tag")
            root = self._ranks.folder_named_by(given, "save_dir")
            _check_whole_steps(engine)
            _settle(engine)
            contents = RankContents(
                engine.module,
                engine._scheduler.units,
                engine.optimizer,
                rank=engine.global_rank,
                exclude_frozen=exclude_frozen,
                buffers=self.parts.buffers(engine.module),
            )
            values: dict[str, Any] = {}
            problem: Exception | None = None
            try:
                values = self._values(engine, contents, client_state, exclude_frozen)
            except Exception as error:
                problem = error
            self._ranks.agree(problem)
            folder = Folder(root)

            def begin() -> str:
                temporary = folder.begin(tag)
                with contextlib.suppress(CheckpointError):  # remains of other saves are no reason not to save
                    folder.clean()
                return str(temporary)

            temporary = Path(self._ranks.from_rank_0(begin))
            keep_last = engine.settings.shardwell.keep_last
            look = self._limit_in_background if asynchronous else self._limit_of_all()
            job = self._saver.next_job(folder, tag, temporary, is_latest=is_latest, keep_last=keep_last, look=look)
            self.saves_in_background |= bool(asynchronous)
            (self._saver.write_later if asynchronous else self._saver.write_now)(job, contents, values)

    def _limit_in_background(self) -> float:
        """Return the seconds to wait for other ranks: one that has failed may still be writing, and succeed."""
        return LIMIT_AFTER_FAILURE if self._context.roles.agreement.failures.has_failed else SILENCE_LIMIT

    def _limit_of_all(self) -> Callable[[], float]:
        """Return a function that raises if a rank has failed: when all ranks wait, none must wait for a failed one."""
        look_at_peers = self._all.links.poll_failures()

        def look() -> float:
            look_at_peers()
            return SILENCE_LIMIT

        return look

    def _end_background(self) -> None:
        """Wait until nothing is being written; raise errors on all ranks, even if some raised them before."""
        problem: CheckpointError | None = None
        try:
            self.wait()
        except CheckpointError as error:
            problem = error
        self._ranks.agree(problem)

    def wait(self) -> None:
        """Wait until a save in the background has ended; raise its error, or that a rank has exited."""
        gone = self._saver.wait(self._all.links.find_gone)
        if gone is not None:
            raise self._all.links.lost(gone) from gone

    def check(self) -> None:
        """Raise the error of a save in the background."""
        self._saver.check()

    def _values(
        self, engine: Engine, contents: RankContents, client_state: Any, exclude_frozen: bool
    ) -> dict[str, Any]:
        """Return the values that this rank saves besides tensors; all but its random state come from rank 0."""
        rank = engine.global_rank
        values = {f"rng/{rank}": encode(random_state(engine), "random state", _put(contents, f"rng/{rank}"))}
        if rank and not self.parts.is_divided:
            return values
        names = self.parts.names(engine.module, engine._scheduler.units)
        put = _put(contents, "optimizer") if rank == 0 else _nothing_put
        optimizer = self.parts.optimizer(of_optimizer(engine.optimizer, engine.module, put))
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
            "config": engine.settings.model_dump(mode="json"),
            **names,
            "frozen_excluded": exclude_frozen,
            "optimizer": optimizer,
            "scheduler": what_can_be_saved(schedule, "lr_scheduler", _put(contents, "scheduler")),
            "loss_scale": engine._precision.loss_scale.state_dict() if engine._precision.loss_scale.is_on else None,
            "loader": engine.training_dataloader.state_dict() if engine.training_dataloader is not None else None,
            "extra": encode(extra_state_of(engine.module), "the model's extra state", _put(contents, "extra")),
            "client": encode(client_state or {}, "client_state", _put(contents, "client")),
            "model_config": hf_files.model_config(engine.module),
            "generation_config": hf_files.generation_config(engine.module),
            "name_or_path": hf_files.name_or_path(engine.module),
            "adapters": hf_files.adapters(engine.module),
        }

    # -------------------------------------------------------------------------------------------------- loading

    def load(
        self,
        engine: Engine,
        given: Any,
        tag: str | None,
        *,
        must_exist: bool,
        strict: bool,
        with_optimizer: bool,
        with_scheduler: bool,
        module_only: bool,
    ) -> tuple[str | None, Any]:
        """Load a checkpoint, and return its path and the client state. All ranks must call it."""
        with self._ranks.together("load_checkpoint", tag):
            check_parts(engine)
            self._end_background()
            self._without_optimizer |= engine.optimizer is None
            asked = {"strict": strict, "with_optimizer": with_optimizer, "with_scheduler": with_scheduler}
            self._check_alike(engine, {**asked, "module_only": module_only})
            self._ranks.check_same(tag, "load_checkpoint: tag")
            root = self._ranks.folder_named_by(given, "load_dir")
            source = self._open(root, tag)
            if source is None:
                self._say_nothing_there(root, must_exist)
                return None, None
            try:
                if not module_only:
                    self._check_loader(engine, source)

                def check(values: dict[str, Any]) -> None:
                    if not module_only:
                        check_values(engine, source.where, values, with_optimizer, with_scheduler)

                with_optimizer = with_optimizer and not module_only
                values = self._take(engine, source, check, strict=strict, with_optimizer=with_optimizer)
            finally:
                source.close()
            if not module_only:
                restore_values(engine, values, with_optimizer, with_scheduler)
            return source.where, values.get("client", {})

    def _check_alike(self, engine: Engine, asked: dict[str, Any]) -> None:
        """Raise on all ranks if one of them asks for something else, or has other units than those of its stage."""
        options, units = asked_of_a_load(engine, asked), units_at_a_load(engine)
        if self.parts.alike is self._all:
            check_alike(self._all, "load_checkpoint", {**options, **units})
        else:
            check_alike(self._all, "load_checkpoint", options)
            check_alike(self.parts.alike, "load_checkpoint", units)

    def _say_nothing_there(self, root: str, must_exist: bool) -> None:
        if must_exist:
            raise CheckpointError(f"{nothing_in(root)}, and strict=True asked for one")
        words = f"{nothing_in(root)}: training begins from scratch. Pass strict=True to have an error instead."
        if self._all.rank_group.rank == 0:
            logging.getLogger("shardwell").warning("%s", words)
        warnings.warn(words, stacklevel=4)  # on all ranks: filters may make it an error

    def load_model(self, engine: Engine, given: Any, *, strict: bool) -> None:
        """Load only the model's own tensors, from any source."""
        path = os.fsdecode(given) if isinstance(given, str | bytes | os.PathLike) else ""
        with self._ranks.together("load_model", path):
            if not path:
                raise CheckpointError(f"load_model({given!r}): expected the path of a folder or file of weights")
            check_parts(engine)
            self._end_background()
            self._ranks.check_same(path, "load_model: path")
            source = self._open_foreign(path, None)
            try:
                self._take(engine, source, lambda values: None, strict=strict, with_optimizer=False)
            finally:
                source.close()

    def _open(self, root: str, tag: str | None) -> Source | None:
        """Open a checkpoint: rank 0 reads the manifest and broadcasts it. Return None if there is no checkpoint yet."""

        mine: list[ShardwellSource] = []

        def look() -> str | None:
            own = locate_own(root, tag) if os.path.exists(root) else None
            if own is not None:
                folder, chosen = own
                path, manifest = folder.path(chosen), folder.open(chosen)
                mine.append(ShardwellSource(path, manifest, shares=True))
                return f"{json.dumps(str(path))}\n{index_of(manifest)}"
            if is_foreign(root, tag):
                return ""
            folder = Folder(root)
            if tag is not None:
                folder.path(tag)  # raises an error that lists what is there
            if folder.latest() is None:
                return None
            return look()  # it was committed just now

        found = self._ranks.from_rank_0_or_none(look)
        if found is None:
            return None
        if not found:
            return self._open_foreign(root, tag)
        if mine:
            return mine[0]
        where, _, index = found.partition("\n")
        return ShardwellSource(Path(json.loads(where)), manifest_of(index), shares=True)

    def _open_foreign(self, path: str, tag: str | None) -> Source:
        source: Source | None = None
        problem: Exception | None = None
        try:
            source = open_source(path, tag)
        except Exception as error:
            problem = error
        self._ranks.agree(problem)
        assert source is not None
        return source

    def _check_loader(self, engine: Engine, source: Source) -> None:
        problem: Exception | None = None
        if engine.training_dataloader is not None and source.values.get("loader"):
            try:
                engine.training_dataloader.check_state_dict(source.values["loader"])
            except Exception as error:
                problem = error
        self._ranks.agree(problem)

    def _take(
        self,
        engine: Engine,
        source: Source,
        check: Callable[[dict[str, Any]], None],
        *,
        strict: bool,
        with_optimizer: bool,
    ) -> dict[str, Any]:
        """Load the stored state into model and optimizer, all or nothing; return the other values of this rank.

        `check` raises if the values cannot be loaded.
        """
        _settle(engine, is_overwritten=with_optimizer)
        elsewhere = self.parts.elsewhere(engine.module)
        problem: Exception | None = None
        try:
            optimizer = engine.optimizer if with_optimizer else None
            check_kind(optimizer, source)
            check_names(source.values, source.where)
            check_scalars(source.values, SCALAR, source.where)
            loading = CheckpointLoader(
                source, engine.module, engine._scheduler.units, optimizer, strict=strict, elsewhere=elsewhere
            )
            loading.fetch()
            wanted = {**dict.fromkeys(_ENCODED), f"rng/{engine.global_rank}": None}
            decoded = {
                key: decode(source.values[key], f"{source.where}: values.{key}", _get(source))
                for key in wanted
                if key in source.values
            }
            values = {**source.values, **decoded}
            check(values)
        except Exception as error:
            problem = error
        self._ranks.agree(problem)
        engine._scheduler.end_retention()
        if with_optimizer and engine.optimizer is not None:
            engine.optimizer.executor.stop_watching()  # changes of earlier updates are overwritten
        engine.zero_grad()
        for group in (group for unit in engine._scheduler.units for group in unit.trainable):
            group.gradients.free()
        try:
            loading.apply()
        except Exception as error:  # a disk that states are stored on, say
            for unit in engine._scheduler.units:
                unit.fail(f"loading {source.where}", error)
            raise
        return values


def _settle(engine: Engine, *, is_overwritten: bool = False) -> None:
    """Refit the engine if its model has changed, and wait until the last step has succeeded."""
    engine.fit_to_model()
    if engine.optimizer is not None:
        engine.optimizer.settle(but_begun=is_overwritten)
    opened = [unit.name for unit in engine._scheduler.units if unit.use.num_contexts]
    if opened:
        raise CheckpointError(f"unit '{opened[0]}' is open: leave GatheredParameters before saving or loading")


def _check_whole_steps(engine: Engine) -> None:
    """Raise if an update has begun before its step, a part of which would be saved. All ranks find the same."""
    ahead = [unit.name for unit in engine._scheduler.units if unit.updates.is_early]
    if ahead:
        raise CheckpointError(
            f"the update of unit '{ahead[0] or '(root)'}' has begun before its step, and a checkpoint would hold a "
            'part of that step: save after the step, or set "shardwell": {"commit": "after_norm"}'
        )


def _put(contents: RankContents, prefix: str) -> Callable[[Tensor], str]:
    """Return a function that adds tensors to the contents under numbered names."""
    count = 0

    def put(tensor: Tensor) -> str:
        nonlocal count
        name = f"other/{prefix}/{count}"
        count += 1
        contents.add(name, "other", tensor.detach().cpu().clone())
        return name

    return put


def _nothing_put(tensor: Tensor) -> str:
    """Stand for a tensor that another rank saves."""
    return ""


def _get(source: Source) -> Callable[[str], Tensor]:
    def get(name: str) -> Tensor:
        if name not in source.tensors:
            raise CheckpointError(f"{source.where}: tensor {name!r}: named by a value, but not there")
        stored = source.tensors[name]
        return source.read(name, 0, stored.numel).as_strided(stored.shape, stored.order)

    return get
