"""`shardwell demo`: trains one small model at every stage and compares the measurements with the formulas."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from shardwell.cli.demo_report import (
    StageComparison,
    StageResult,
    compare,
    loss_line,
    results_table,
    save_json,
    save_picture,
)
from shardwell.cli.failures import exit_like_ranks
from shardwell.cli.launch import LaunchTopology, launch
from shardwell.cli.temporary_folder import kept_folder
from shardwell.errors import ShardwellError

_ROWS = 4  # per rank and step, of 128 bytes each
_LEARNING_RATE = 2e-3
_WIDTH_IN_A_PIPE = 130


def demo(
    ranks: Annotated[int | None, typer.Option(min=1, help="CPU ranks: 2, or 8 with --3d.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps at each stage: 60, or 10 in each layout with --3d.")
    ] = None,
    stages: Annotated[
        str, typer.Option(help="Which stages, such as 0,3. All are compared with the first.")
    ] = "0,1,2,3",
    out: Annotated[Path, typer.Option(help="Folder for the picture and the raw numbers.")] = Path("shardwell-demo"),
    trace: Annotated[bool, typer.Option("--trace", help="Print the trace of the last step of each stage.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Train in bfloat16 over fp32 masters.")] = False,
    axes: Annotated[
        bool, typer.Option("--3d", help="Compare layouts of data, tensor and pipeline parallelism instead.")
    ] = False,
) -> None:
    """Train a small GPT on this machine's CPU at each ZeRO stage: same losses, less memory."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_IN_A_PIPE)
    if axes:
        raise typer.Exit(0 if _compare_layouts(ranks, steps, out, console, is_plain=not (trace or bf16)) else 1)
    _compare_stages(_parse_stages(stages), ranks or 2, steps or 60, out, console, trace=trace, bf16=bf16)


def _compare_layouts(ranks: int | None, steps: int | None, out: Path, console: Console, *, is_plain: bool) -> bool:
    """Train in several layouts of the same ranks; return whether they agree."""
    from shardwell.cli import demo_axes

    number = ranks or demo_axes.NUM_RANKS
    if number not in (4, 8) or not is_plain:
        raise ShardwellError("--3d takes 4 or 8 ranks (--ranks), and goes without --trace and --bf16")
    return demo_axes.run(number, steps or 10, out, console)


def _compare_stages(
    chosen: list[int], ranks: int, steps: int, out: Path, console: Console, *, trace: bool, bf16: bool
) -> None:
    """Train at each stage, and end the command with 1 if they do not agree."""
    from shardwell.cli.demo_rank import DemoJob

    with kept_folder("shardwell-demo-") as folder:
        events = Path(folder, "events.jsonl")
        events.touch()
        job = DemoJob(chosen, steps, _ROWS, _LEARNING_RATE, bf16, trace, str(events))
        results = _train(job.to_json(), chosen, steps, ranks, events, console)
    comparison = compare(results, bf16)
    _show(console, results, comparison, ranks, bf16, trace)
    out.mkdir(parents=True, exist_ok=True)
    save_json(out / "demo.json", results, comparison, ranks=ranks, steps=steps, bf16=bf16)
    console.print(f"{_draw(out / 'demo.png', results, ranks, bf16)}   numbers: {out / 'demo.json'}")
    if not comparison.agrees:
        raise typer.Exit(1)


def _parse_stages(text: str) -> list[int]:
    wanted = [part.strip() for part in text.split(",")]
    if not wanted or any(part not in ("0", "1", "2", "3") for part in wanted) or len(set(wanted)) < len(wanted):
        raise ShardwellError(f"--stages {text}: expected some of 0,1,2,3, separated by commas, each once")
    return [int(part) for part in wanted]


def _draw(path: Path, results: list[StageResult], ranks: int, bf16: bool) -> str:
    """Draw the picture; return its path, or the package that is missing."""
    try:
        save_picture(path, results, ranks, bf16)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return "no picture, which needs matplotlib: pip install 'shardwell[demo]'"
    return f"picture: {path}"


def _train(job: str, stages: list[int], steps: int, ranks: int, events: Path, console: Console) -> list[StageResult]:
    """Train all stages in one set of processes; if a rank fails, end the command with its error."""
    progress = Progress(
        TextColumn("stage {task.fields[stage]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]} tokens/s"),
        TimeElapsedColumn(),
        console=console,
    )
    tasks: dict[int, TaskID] = {}
    results: list[StageResult] = []

    def take(event: dict[str, Any]) -> None:
        stage = event.pop("stage")
        if event.pop("event") == "stage":
            results.append(StageResult(stage=stage, **event))
            return
        if stage not in tasks:
            tasks[stage] = progress.add_task("", total=steps, stage=stage, loss="", speed="")
        speed = f"{event['tokens_per_second']:,.0f}"
        progress.update(tasks[stage], completed=event["step"], loss=f"{event['loss']:.3f}", speed=speed)

    console.print(f"training a byte-level GPT on {ranks} CPU rank(s) at stage {', '.join(map(str, stages))}")
    with exit_like_ranks(), progress, _listening(events, take):
        launch(["-m", "shardwell.cli.demo_rank", job], LaunchTopology(ranks), quiet_ranks=True)
    return results


@contextmanager
def _listening(path: Path, take: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Call `take` on a thread with every line that appears in `path`, until the block ends."""
    ended = threading.Event()

    def listen() -> None:
        rest = ""
        with path.open(encoding="utf-8") as file:
            while True:
                last_look = ended.wait(0.05)
                *lines, rest = (rest + file.read()).split("\n")
                for line in lines:
                    take(json.loads(line))
                if last_look:
                    return

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show(
    console: Console, results: list[StageResult], comparison: StageComparison, ranks: int, bf16: bool, trace: bool
) -> None:
    if trace:
        for result in results:
            console.print(f"\n[bold]stage {result.stage}, one step[/bold]")
            console.print(Text(result.trace or ""))
    if results:
        console.print(f"at the start, rank 0 says of stage {results[-1].stage}:")
        console.print(Text("".join(f"  - {line}\n" for line in results[-1].startup.splitlines())))
    console.print(results_table(results, ranks, bf16))
    console.print(loss_line(results, comparison))
