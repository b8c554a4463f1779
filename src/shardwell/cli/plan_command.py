"""`shardwell plan MODEL`: what a step takes on GPUs that need not exist, whether it fits, and what would."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwell.errors import ConfigError

if TYPE_CHECKING:
    from shardwell.plan import PlanReport, SimulatedMachine
    from shardwell.plan.changes import PlanChoice
    from shardwell.plan.models import PlanModel
    from shardwell.plan.search import Search

_ADAMW = {"type": "AdamW", "params": {"lr": 1e-4}}
_ONE_PROBLEM = "dict: 1 problem in the configuration\n"
_MOST_GPUS, _PER_NODE = 1 << 24, 8
_MICRO = "train_micro_batch_size_per_gpu"
_BATCH = (_MICRO, "train_batch_size", "gradient_accumulation_steps")
_NUMBERS = (  # that plans read themselves
    *(*_BATCH, "stage", "sequence_parallel_size", "autotp_size", "stages", "chunks", "expert_parallel_size"),
    *("zero_hpz_partition_size", "buffer_count"),
)


class _Once(logging.Filter):
    """Lets each message through once."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text, before = record.getMessage(), len(self._said)
        self._said.add(text)
        return len(self._said) > before


@contextlib.contextmanager
def _naming_the_file() -> Iterator[None]:
    """Say of one problem in a configuration, which a plan hands over as a dictionary, where it is from."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        if not text.startswith(_ONE_PROBLEM):
            raise
        raise ConfigError(f"the configuration: {text.removeprefix(_ONE_PROBLEM).strip()}") from None


@contextlib.contextmanager
def _saying_once() -> Iterator[None]:
    """Print what engines log inside once, however many of them are simulated."""
    handler, logger = logging.StreamHandler(), logging.getLogger("shardwell")
    handler.addFilter(_Once())
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@_saying_once()
@_naming_the_file()
def plan(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A preset, a config.json of Hugging Face or its directory, or MODULE:FUNCTION.")
    ],
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs in all.")] = 8,
    gpu: Annotated[str, typer.Option("--gpu", help="The kind of GPU.")] = "h100-80gb",
    nodes: Annotated[int | None, typer.Option("--nodes", help="Nodes; by default 8 GPUs each.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="The JSON configuration.")] = None,
    stage: Annotated[
        int | None, typer.Option("--stage", min=0, max=3, help="The stage, without --config; by default 3.")
    ] = None,
    micro_batch: Annotated[int | None, typer.Option("--micro-batch", help="Sequences of a rank at a time.")] = None,
    seq: Annotated[int, typer.Option("--seq", help="Tokens of a sequence.")] = 2048,
    recompute: Annotated[
        bool | None, typer.Option("--recompute/--keep", help="Whether blocks are recomputed; by default they are.")
    ] = None,
    host_memory: Annotated[str | None, typer.Option("--host-memory", help="Of a node, as 2TB.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Ranks that share each tensor.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", min=1, help="Pipeline stages.")] = None,
    sp: Annotated[int | None, typer.Option("--sp", min=1, help="Ranks that share each sequence (Ulysses).")] = None,
    ep: Annotated[int | None, typer.Option("--ep", min=1, help="Ranks that share the experts of a layer.")] = None,
    as_published: Annotated[
        bool, typer.Option("--as-published", help="GPUs and axes that the model's authors trained it on.")
    ] = False,
    disk: Annotated[str | None, typer.Option("--disk", help="Of a node's drives, as 30TB.")] = None,
    link: Annotated[str | None, typer.Option("--link", help="Between nodes, of each GPU, as infiniband-hdr.")] = None,
    drive: Annotated[str, typer.Option("--drive", help="Of a node, as nvme-gen4 or 4xnvme-gen4.")] = "nvme-gen4",
    measured: Annotated[
        Path | None, typer.Option("--machine", help="The speeds that `shardwell calibrate` measured.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", help="To train on, as 4M or 1.5T: how long, how much.")
    ] = None,
    price: Annotated[float | None, typer.Option("--price", min=0.0, help="Of a GPU and hour.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    auto: Annotated[bool, typer.Option("--auto", help="Find the fastest plan that fits, and its JSON.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Answer questions about the plan in words.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one page to this file: bars, timeline, what if.")
    ] = None,
) -> None:
    """Show memory by state, tier and moment, traffic, and whether it fits; exit with 1 if it does not."""
    _import_plans()
    from shardwell.cli.plan_speeds import cost_of, parse_count, with_speeds
    from shardwell.plan.axes import with_axes
    from shardwell.plan.changes import PlanChoice
    from shardwell.plan.models import model_named
    from shardwell.plan.published import layout_of
    from shardwell.plan.search import Search
    from shardwell.plan.time_report import cost_sentence

    layout = layout_of(model) if as_published else None
    if layout is not None:
        _check_published(context)
        seq, gpu, gpus, nodes = layout.sequence, layout.gpu, layout.gpus, layout.nodes
    _check_options(auto=auto, explain=explain, stage=stage, config=config)
    if price is not None and tokens is None:
        raise ConfigError("--price: how much is to be trained? Add --tokens, as --tokens 1T")  # before it is planned
    if price is not None and not math.isfinite(price):
        raise ConfigError(f"--price {price}: expected a number")
    if html is not None:
        _check_page(html)
    machine = with_speeds(_machine(gpu, gpus, nodes, host_memory, disk), gpu, link, drive, measured)
    num_tokens = None if tokens is None else parse_count(tokens, "--tokens")
    if ":" in model and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it: a module in this folder is found
    subject = model_named(model)
    if recompute is not None and not subject.has_choices:
        raise ConfigError(f"--recompute and --keep are for presets and configurations: {model} decides it itself")
    if micro_batch is not None and not subject.has_batches:
        raise ConfigError(f"--micro-batch is for models without inputs of their own, and {model} returns its inputs")
    settings = (
        _settings(config, 3 if stage is None else stage, micro_batch, gpus, gpu) if layout is None else layout.config()
    )
    settings = with_axes(settings, tensor=tp, pipe=pp, sequence=sp, expert=ep)
    if auto:
        shown = _auto(Search(subject, settings, machine, seq, recompute, micro_batch, disk is not None))
    else:
        shown = _planned(subject, PlanChoice("", settings, machine, recompute is not False), seq, explain)
    costs = None if shown.report is None else cost_of(shown.report, num_tokens, price)
    if as_json:
        typer.echo(json.dumps(shown.values | ({} if costs is None else {"cost": costs}), indent=2))
    else:
        typer.echo(shown.text)
        if costs is not None:
            typer.echo(cost_sentence(costs))
        if config is not None and settings["optimizer"] is _ADAMW:
            typer.echo(f"Assumed: AdamW, because {config} names no optimizer.")
        if host_memory is None or disk is None:
            typer.echo("Assumed: host memory or drives that were not named (--host-memory, --disk) are large enough.")
    if html is not None:
        _write_page(html, shown, subject, (model, gpu, seq))
    raise typer.Exit(0 if shown.report is not None and shown.report.fits else 1)


def _import_plans() -> None:
    """Import what plans need, without a search for garbage, which takes a sixth of the time and finds none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import shardwell.plan.search  # noqa: F401
    finally:
        gc.freeze()  # what modules hold is not looked at again
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class _Shown:
    """The output of the command: a plan, if there is one, and its text and its values of JSON."""

    report: PlanReport | None
    text: str
    values: dict[str, Any]
    recomputes: bool = True


def _check_page(path: Path) -> None:
    """Refuse a file that cannot be written, before a plan takes its time."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--html {path}: {'is a folder' if path.is_dir() else 'its folder does not exist'}")
    existed = path.exists()
    try:
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--html {path}: cannot be written ({error.strerror})") from None


def _write_page(path: Path, shown: _Shown, subject: PlanModel, asked: tuple[str, str, int]) -> None:
    """Write the page of a plan; its forms take some minutes."""
    import shlex

    from shardwell.plan.page import PlanPage
    from shardwell.plan.terms import NoFormError
    from shardwell.plan.what_if import Asked

    if shown.report is None:
        raise ConfigError("--html: there is no plan to show, since nothing that was tried fits")
    (model, gpu, sequence), report = asked, shown.report
    plan = Asked(subject, report.config, report.machine, sequence, shown.recomputes)
    try:
        typer.echo(f"{path}: what other plans take is simulated, one class after the other.", err=True)
        found, reason = plan.what_if(said=lambda text: typer.echo(f"  {text}", err=True)), ""
    except NoFormError as error:
        found, reason = None, str(error)
    page = PlanPage(report, shlex.quote(model), gpu, sequence, plan, found, reason)
    try:
        path.write_text(page.html(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None


def _check_options(*, auto: bool, explain: bool, stage: int | None, config: Path | None) -> None:
    if auto and stage is not None:
        raise ConfigError(f"--auto chooses the stage, which contradicts --stage {stage}: remove one of them")
    if config is not None and stage is not None:
        raise ConfigError(f"--stage {stage} is for plans without a configuration: write it into {config}, or remove it")
    if auto and explain:
        raise ConfigError("--explain is about one plan: run it with --config and what --auto printed")


_OF_LAYOUT = ("gpus", "gpu", "nodes", "config", "stage", "micro_batch", "seq", "tp", "pp", "sp", "ep", "auto")


def _check_published(context: typer.Context) -> None:
    """Refuse options that contradict a published layout, which has a configuration, GPUs and a sequence of its own."""
    given = [name for name in _OF_LAYOUT if getattr(context.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise ConfigError(f"--as-published has GPUs, axes and a batch of its own: remove it, or {option}")


def _planned(model: PlanModel, first: PlanChoice, sequence: int, explain: bool) -> _Shown:
    """Return the plan of a configuration, with answers or with the smallest change that fits."""
    from shardwell.plan.changes import FittingChange
    from shardwell.plan.explain import Explanation

    report = model.report(first.config, first.machine, sequence, first.recomputes)
    found, texts = report.as_dict(), [str(report)]
    if explain:
        answers = list(Explanation(first, report, sequence, model).answers())
        texts += ["", *(str(one) for one in answers)]
        found["answers"] = [{"question": one.question, "words": one.words, **one.figures} for one in answers]
    elif not report.fits:
        change = FittingChange(model, sequence).smallest(first, report)
        texts.append(_advice(change))
        found["smallest_change"] = _words(change)
    return _Shown(report, "\n".join(texts), found, first.recomputes)


def _auto(search: Search) -> _Shown:
    """Return the fastest plan that fits and its configuration; or why nothing does, and what would."""
    from shardwell.plan.changes import FittingChange, PlanChoice

    found = search.run()
    if found.best is not None:
        return _Shown(found.best.report, str(found), found.as_dict(), found.best.kind.way.recomputes)
    if found.refusal is not None:
        raise ConfigError(found.refusal)
    config = {**search.base, "zero_optimization": {"stage": 3}, _MICRO: search.micro_batch or 1}
    first = PlanChoice("", config, search.machine, search.recomputes is not False)
    change = FittingChange(search.model, search.sequence).smallest(first)
    return _Shown(None, f"{found}\n{_advice(change)}", {**found.as_dict(), "smallest_change": _words(change)})


def _words(change: tuple[PlanChoice, PlanReport] | None) -> dict[str, Any] | None:
    return None if change is None else {"words": change[0].words, "config": change[0].config}


def _advice(change: tuple[PlanChoice, PlanReport] | None) -> str:
    if change is None:
        return "Nothing that was tried fits: use smaller sequences or a smaller micro-batch."
    choice, report = change
    return f"The smallest change that was found: {choice.words}. {report.sentence()}"


def _settings(path: Path | None, stage: int, micro_batch: int | None, gpus: int, gpu: str) -> dict[str, Any]:
    """Return the configuration: of the file, or 16 bits at a stage; with AdamW if it names none, and a micro-batch."""
    from shardwell.config import load
    from shardwell.config.source import read
    from shardwell.plan import devices as known

    found = dict(read(path)[2]) if path is not None else {
        "bf16" if known.gpu(gpu).has_bf16 else "fp16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }  # fmt: skip
    found = _checked(found) if path is not None else found
    found = {**found, "optimizer": found.get("optimizer") or _ADAMW}
    if micro_batch is not None:
        if micro_batch < 1:
            raise ConfigError(f"--micro-batch {micro_batch}: expected 1 or more")
        dropped = "gradient_accumulation_steps" if isinstance(found.get("train_batch_size"), int) else ""
        found = {**{key: value for key, value in found.items() if key != dropped}, _MICRO: micro_batch}
    if not isinstance(found.get(_MICRO), int):
        found = {**found, _MICRO: load(found, world_size=gpus).train_micro_batch_size_per_gpu}
    return found


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without what is null, once its blocks are known to be what they should be.

    How its batch fits the ranks is known once all axes are.
    """
    from shardwell.config import load
    from shardwell.plan.estimate import without_nulls

    found = without_nulls(given)
    load({key: value for key, value in found.items() if key not in _BATCH})
    return {key: _as_number(key, value) for key, value in found.items() if key not in _BATCH or value != "auto"}


def _as_number(key: str, value: Any) -> Any:
    """Return a value of a configuration, with whole numbers that are written as text, or as 1.0, as numbers."""
    if isinstance(value, dict):
        return {inner: _as_number(inner, one) for inner, one in value.items()}
    if key not in _NUMBERS:
        return value
    if isinstance(value, bool):
        raise ConfigError(f"the configuration: {key}: expected a whole number, found {json.dumps(value)}")
    if isinstance(value, str) and value.isdigit():
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _machine(gpu: str, gpus: int, nodes: int | None, host_memory: str | None, disk: str | None) -> SimulatedMachine:
    from shardwell.checkpoint.parsing import parse_byte_size
    from shardwell.plan import SimulatedMachine, SimulatedRanks
    from shardwell.plan import devices as known

    if gpus < 1 or (nodes is not None and nodes < 1):
        asked = f"--gpus {gpus}" if nodes is None else f"--gpus {gpus} --nodes {nodes}"
        raise ConfigError(f"{asked}: expected 1 or more")
    if gpus > _MOST_GPUS:
        raise ConfigError(f"--gpus {gpus}: expected at most {_MOST_GPUS:,}")
    if nodes is None and gpus > _PER_NODE and gpus % _PER_NODE:
        raise ConfigError(
            f"--gpus {gpus}: nodes of {_PER_NODE} cannot have so many evenly; name their number (--nodes)"
        )
    if nodes is not None and gpus % nodes:
        raise ConfigError(f"--gpus {gpus} --nodes {nodes}: {gpus} GPUs cannot be divided over {nodes} nodes evenly")
    per_node = gpus // nodes if nodes is not None else min(gpus, _PER_NODE)
    machine = SimulatedMachine(known.gpu(gpu).memory_bytes, ranks=SimulatedRanks(0, gpus, per_node))
    if host_memory is not None:
        machine = replace(machine, host_bytes=float(parse_byte_size(host_memory, "--host-memory")))
    if disk is not None:
        machine = replace(machine, disk_bytes=float(parse_byte_size(disk, "--disk")))
    return machine
