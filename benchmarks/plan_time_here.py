"""How near plans get on this machine: ``python -m benchmarks.plan_time_here [--ranks 1,2] [--json FILE]``.

For each number of ranks the machine is calibrated, then real CPU ranks train a decoder that calibration did not see, at
stages 0 to 3 and with the optimizer on the host, and the best step of each is compared with its plan. On a busy machine
both are noisy, and threads that wait for each other make steps of one rank several times longer: then the ratio to CPU
seconds, with OMP_NUM_THREADS=1, says more.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.model import Decoder, DecoderConfig
from shardwell.cli.calibrate_rank import CalibrationJob
from shardwell.cli.launch import LaunchTopology, launch
from shardwell.plan import SimulatedMachine, SimulatedRanks, estimate
from shardwell.plan.calibration import Calibration, MeasuredFigure

MODEL = DecoderConfig(vocab=2048, width=256, blocks=6, heads=4, mlp=704, seq=64)
BATCH, STEPS, WARM_UP = 2, 4, 1
HOST = {"offload_optimizer": {"device": "cpu"}}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"stage {stage}": (stage, {}) for stage in range(4)},
    "stage 2, host optimizer": (2, HOST),
}


def config_of(name: str) -> dict[str, Any]:
    """Return the configuration of a case."""
    stage, zero = CASES[name]
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }


def tokens() -> Tensor:
    return torch.randint(0, MODEL.vocab, (BATCH, MODEL.seq), generator=torch.Generator().manual_seed(0))


def train(out: Path) -> None:
    """Train all cases on this rank; rank 0 writes the best seconds of a step, and its CPU seconds."""
    import shardwell

    found: dict[str, Any] = {}
    data = tokens()
    for name in CASES:
        torch.manual_seed(0)
        engine = shardwell.initialize(model=Decoder(MODEL), config=config_of(name), device="cpu").engine
        seconds, cpu = [], []
        for step in range(WARM_UP + STEPS):
            begin, used = time.perf_counter(), time.process_time()
            engine.backward(engine(data, data))
            engine.step()
            if step >= WARM_UP:
                seconds.append(time.perf_counter() - begin)
                cpu.append(time.process_time() - used)
        found[name] = {"seconds": min(seconds), "cpu_seconds": min(cpu)}
        del engine
    if not dist.is_initialized() or dist.get_rank() == 0:
        out.write_text(json.dumps(found))


def launched(ranks: int, *command: str) -> Any:
    """Run ranks, and return what rank 0 wrote to the file that the last argument names."""
    launch(["-m", *command], LaunchTopology(ranks), quiet_ranks=True)
    return json.loads(Path(command[-1]).read_text())


def compare(ranks: int, folder: Path) -> dict[str, Any]:
    """Calibrate, train and plan with so many ranks."""
    place = folder / f"figures{ranks}.json"
    launch(["-m", "shardwell.cli.calibrate_rank", CalibrationJob(str(place)).to_json()], LaunchTopology(ranks))
    figures = {name: MeasuredFigure(value, how, "") for name, value, how in json.loads(place.read_text())["figures"]}
    speeds = Calibration("cpu", False, ranks, "", _pairs(figures)).speeds()
    measured = launched(ranks, "benchmarks.plan_time_here", "--train", str(folder / f"steps{ranks}.json"))
    machine = SimulatedMachine(has_gpus=False, ranks=SimulatedRanks(0, ranks, ranks, "gloo"), speeds=speeds)
    found: dict[str, Any] = {}
    for name in CASES:
        report = estimate(_model(), config_of(name), machine, (tokens(), tokens()))
        assert report.time is not None
        real = measured[name]
        found[name] = {**real, "planned": report.time.seconds, "ratio": report.time.seconds / real["seconds"]}
        found[name]["ratio to CPU seconds"] = report.time.seconds / real["cpu_seconds"]
        print(
            f"{ranks} rank(s), {name:26}{real['seconds']:8.3f} s measured ({real['cpu_seconds']:.3f} s of CPU)"
            f"{report.time.seconds:8.3f} s planned, ratio {found[name]['ratio']:.2f}, "
            f"to CPU seconds {found[name]['ratio to CPU seconds']:.2f}",
            flush=True,
        )
    return found


def _pairs(figures: dict[str, MeasuredFigure]) -> dict[str, MeasuredFigure]:
    return {
        name: replace(one, value=[(size, rate) for size, rate in one.value]) if isinstance(one.value, list) else one
        for name, one in figures.items()
    }


def _model() -> nn.Module:
    with torch.device("meta"):
        return Decoder(MODEL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = {number: compare(int(number), Path(folder)) for number in options.ranks.split(",")}
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
