"""`shardwell train` beside Transformers' Trainer on FSDP2: full fine-tuning and LoRA of a Llama on one GPU.

    python -m benchmarks.train_cli [--size 1b] [--only NAME,...] [--limit 45] [--json PATH]

A Llama with random weights is saved once, in bf16, and every contender loads that folder and trains on the same
synthetic text, with the same length, batch, clipping and optimizer, in bf16. `shardwell train` runs as a user starts
it, and is ended when it has printed its last line: the figures are those of that line, over the steps since the line
before. The Trainer's time is that of as many steps, with the device idle at both ends. Peaks are torch's, of the whole
run. One line of JSON is printed for each run. With ``--device cpu --size tiny`` the same code runs anywhere, for its
own sake and not for its numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.launch import RunFailedError, free_port, without_folders
from benchmarks.measure import circumstances, command_line, keep

WORKER = "benchmarks.train_cli_worker"
CASES = ("shardwell:full", "trainer-fsdp2:full", "shardwell:lora", "trainer-fsdp2:lora", "shardwell-sharded:full")
WARM_UP, MEASURED = 6, 12  # steps; the first line of `shardwell train` comes after WARM_UP
SHARDED = {"zero_optimization": {"stage": 3}, "shardwell": {"shard_at_world_one": True}}
LINE = re.compile(
    r"step (?P<step>\d+)(?:/\d+)?  loss (?P<loss>\S+).*?  (?P<seconds>\S+) s/step  \S+ tokens/s.*?  "
    r"device \S+ \wi?B(?: \(peak (?P<peak>[\d.]+) (?P<unit>[KMGT]?i?B)\))?"
)
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def prepare(folder: Path, size: str, device: str) -> None:
    """Write the model and the text that all contenders read."""
    words = [f"word{number}" for number in range(400)]
    chosen = random.Random(0).choices(words, k=300_000 if size == "1b" else 4000)
    (folder / "text.txt").write_text(" ".join(chosen))
    command = [sys.executable, "-m", WORKER, json.dumps({"task": "make", "size": size, "device": device})]
    subprocess.run([*command, str(folder)], check=True, timeout=90)


def measure(case: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one run."""
    engine, method = case.split(":")
    begin = time.perf_counter()
    run = _shardwell if engine.startswith("shardwell") else _trainer
    found = run(engine, method, folder, args)
    tokens = args.batch * args.length / found["seconds_per_step"]
    return {"case": case, **found, "tokens_per_second": tokens, "run_seconds": time.perf_counter() - begin}


def _shardwell(engine: str, method: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run `shardwell train` until it has printed the line that is read."""
    options = {"log_every": WARM_UP, "schedule": "constant", "warmup_steps": 0}
    command = [sys.executable, "-m", "shardwell", "train", "--model", folder / "model", "--data", folder / "text.txt"]
    command += ["--method", method, "--sequence-length", args.length, "--micro-batch", args.batch, "-n", 1]
    command += ["--steps", 10_000, "--output", folder / f"{engine}-{method}", "--learning-rate", 1e-5]
    command += [f"--set={name}={value}" for name, value in options.items()]
    if engine == "shardwell-sharded":
        command.append(f"--set=config={json.dumps(SHARDED)}")
    environment = {**os.environ, "SHARDWELL_DEVICE": args.device, "NO_COLOR": "1"}
    log = folder / f"{engine}-{method}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [str(word) for word in command], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            found = _lines(process, time.monotonic() + args.limit)
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if len(found) < 1 + MEASURED // WARM_UP:
        raise RunFailedError("failed: " + without_folders(log.read_text()[-1500:], 1200))
    last = [line for line in found if int(line["step"]) > WARM_UP]
    peak = float(last[-1]["peak"]) * UNITS[last[-1]["unit"]] if last[-1]["peak"] else None
    seconds = sum(float(line["seconds"]) for line in last) / len(last)
    return {"seconds_per_step": seconds, "peak_bytes": peak, "loss": float(last[-1]["loss"])}


def _lines(process: subprocess.Popen[str], deadline: float) -> list[re.Match[str]]:
    """Return the lines of progress up to the last one that is wanted. A process that is silent is left to its limit."""
    assert process.stdout is not None
    found: list[re.Match[str]] = []
    for text in process.stdout:
        if (line := LINE.match(text)) is not None:
            found.append(line)
        if len(found) > MEASURED // WARM_UP or time.monotonic() > deadline:
            break
    return found


def _trainer(engine: str, method: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run the Trainer in a process of its own."""
    spec = {"task": "train", "method": method, "batch": args.batch, "length": args.length, "device": args.device}
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment = {**os.environ, **rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    log = folder / f"{engine}-{method}.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", WORKER, json.dumps(spec), str(folder)]
        try:
            done = subprocess.run(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=args.limit, check=False
            )
        except subprocess.TimeoutExpired:
            raise RunFailedError(f"failed: no result within {args.limit:.0f} s") from None
    if done.returncode:
        raise RunFailedError("failed: " + without_folders(log.read_text(errors="replace")[-1500:], 1200))
    found: dict[str, Any] = json.loads((folder / f"trainer-{method}.json").read_text())
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one line of JSON for each run, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1b", choices=("tiny", "1b"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--only", default="", help="parts of names of runs, with commas")
    parser.add_argument("--limit", type=float, default=45.0, help="seconds after which a run has failed")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds after which no further run begins")
    parser.add_argument("--folder", help="where the model and logs go; by default a temporary folder")
    parser.add_argument("--json", help="where the raw figures go")
    args = parser.parse_args(argv)
    begin, results = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="shardwell-bench-", dir=args.folder) as name:
        prepare(Path(name), args.size, args.device)
        for case in CASES:
            if not any(part in case for part in args.only.split(",")):
                continue
            if time.monotonic() - begin > args.budget - args.limit / 2:
                results.append({"case": case, "error": "not begun: the budget is used up"})
            else:
                try:
                    results.append(measure(case, Path(name), args))
                except RunFailedError as error:
                    results.append({"case": case, "error": str(error)})
            print(json.dumps(results[-1]), flush=True)
    report = {**circumstances(command_line("train_cli", argv), args.device), "runs": results}
    if path := keep(report, "train-cli", args.json):
        print(f"raw results: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
