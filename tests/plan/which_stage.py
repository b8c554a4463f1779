"""`python -m tests.plan.which_stage` writes docs/which-stage.md from plans; with `--same`, from those of the last time.

The figures are kept in `which_stage.json` beside this file, so that the page can be written without planning again. A
test compares the page with them, and some of them with plans.
"""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from shardwell.memory import Tier
from shardwell.plan import SimulatedMachine, SimulatedRanks, estimate
from shardwell.plan.devices import gpu
from shardwell.plan.models import PRESETS, decoder
from shardwell.plan.report import RESERVE
from shardwell.plan.what_if import Structure

FOLDER = Path(__file__).parent
FIGURES = FOLDER / "which_stage.json"
DOCS = FOLDER.parents[1] / "docs"
PAGE, PICTURE = DOCS / "which-stage.md", DOCS / "images" / "which-stage.svg"

RANKS = (8, 64, 1024)
STEPS = (1, 2)  # micro-steps of a step
GPUS = ("rtx-4090", "rtx-5090", "h100-80gb", "h200")
CLUSTERS = (8, 64)
STRUCTURES = {
    "stage 0": Structure(0),
    "stage 1": Structure(1),
    "stage 2": Structure(2),
    "stage 3": Structure(3),
    "stage 3, optimizer state on the host": Structure(3, "cpu"),
    "stage 3, optimizer state and parameters on NVMe": Structure(3, "nvme", "nvme"),
}
MODEL = PRESETS["zero-7.5b"]
SEQUENCE = 1024


def config(zero: dict[str, Any], steps: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": steps,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }


def states(stage: int, ranks: int, steps: int) -> int:
    """Return the bytes of parameters, gradients and optimizer state on a rank at its peak in a step."""
    model = decoder("7.5B", MODEL, 1, 256, recomputes=True)
    machine = SimulatedMachine(ranks=SimulatedRanks(0, ranks, 8))
    costs = estimate(model, config({"stage": stage}, steps), machine, verified=False).costs
    return sum(costs.at_peak[name] for name in ("parameters", "gradients", "optimizer"))


@cache
def planned(structure: Structure, ranks: int, layers: int) -> tuple[int, int, int, int]:
    """Return the peak of the device, the parameters, and the peaks of host and disk of a rank with so many layers."""
    model = decoder("m", replace(MODEL, layers=layers), 1, SEQUENCE, recomputes=True)
    machine = SimulatedMachine(ranks=SimulatedRanks(0, ranks, 8))
    found = estimate(model, config(structure.zero(), 1), machine, verified=False)
    peaks = (found.peak(tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK))
    device, host, disk = peaks
    return device, found.costs.num_parameters, host, disk


def most_layers(structure: Structure, ranks: int, name: str) -> int:
    """Return the most layers with which the device's peak fits a GPU; a peak is a convex function of their number."""
    room = gpu(name).memory_bytes * (1 - RESERVE)

    def peak(layers: int) -> int:
        return planned(structure, ranks, layers)[0]

    low, high = 4, 0  # layers that fit, and once some are known layers that do not
    while high != low + 1:
        begin, end = (low, high) if high else (low - 1, low)
        found = begin + int((room - peak(begin)) * (end - begin) // (peak(end) - peak(begin)))
        found = max(low + 1, min(found, high - 1) if high else found)
        if peak(found) <= room:
            low = found
        else:
            high = found
    return low


def largest(structure: Structure, ranks: int) -> dict[str, list[int]]:
    """Return for each GPU the layers of the largest model, its parameters, and host and disk bytes of a rank."""
    found = {name: most_layers(structure, ranks, name) for name in GPUS}
    return {name: [layers, *planned(structure, ranks, layers)[1:]] for name, layers in found.items()}


def fits(structure: Structure, ranks: int, name: str, layers: int) -> bool:
    """Plan a model of so many layers on a GPU, and return whether it fits."""
    model = decoder("m", replace(MODEL, layers=layers), 1, SEQUENCE, recomputes=True)
    machine = SimulatedMachine(gpu(name).memory_bytes, ranks=SimulatedRanks(0, ranks, 8))
    return estimate(model, config(structure.zero(), 1), machine).fits


def figures(wanted: str = "") -> dict[str, int | dict[str, list[int]]]:
    """Plan everything that the page says, or what begins with some words."""
    found: dict[str, Any] = {}
    for steps in STEPS:
        for stage in range(4):
            for ranks in RANKS:
                if f"states {steps}".startswith(wanted):
                    found[f"states {steps} stage {stage} {ranks}"] = states(stage, ranks, steps)
    for name, structure in STRUCTURES.items():
        for ranks in CLUSTERS:
            if f"size {ranks}".startswith(wanted):
                found[f"size {ranks} {name}"] = largest(structure, ranks)
    return found


def wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False)


def written(found: dict[str, Any]) -> str:
    """Return the page."""
    whole_model = decoder("7.5B", MODEL, 1, 1, recomputes=True).build(MODEL.layers)
    size = sum(one.numel() for one in whole_model.parameters())
    lines = [
        "# Which stage, which offload",
        "",
        "*Every number on this page is planned by the engine's own code ([planning](planning.md)):*",
        "*`python -m tests.plan.which_stage` writes it.*",
        "",
        "![The decision in one picture](images/which-stage.svg)",
        "",
        "## What a stage saves",
        "",
        wrapped(
            f"Parameters, gradients and optimizer state of one rank at the peak of a step, in GiB: {size / 1e9:.2f} "
            "billion parameters (the 7.5B model of the ZeRO paper), bf16 with AdamW. Activations and staging "
            "buffers are left out. Units that are unsharded at the peak are not: "
            "that is why stage 3 saves less than N times."
        ),
        "",
    ]
    for steps in STEPS:
        title = "Without accumulation" if steps == 1 else f"With accumulation ({steps} micro-steps, in fp32)"
        lines += [f"### {title}", ""]
        lines += ["| | " + " | ".join(f"{ranks:,} ranks" for ranks in RANKS) + " |", "|---|" + "---:|" * len(RANKS)]
        for stage in range(4):
            cells = []
            for ranks in RANKS:
                here, whole = (found[f"states {steps} stage {one} {ranks}"] for one in (stage, 0))
                cells.append(f"{here / 2**30:.1f}" + (f" ({whole / here:.1f}x)" if stage else ""))
            lines.append(f"| stage {stage} | " + " | ".join(cells) + " |")
        lines.append("")
    plain, summed = (
        found[f"states {steps} stage 0 64"] / found[f"states {steps} stage 1 64"] for steps in (1, STEPS[1])
    )
    lines += [
        wrapped(
            "The ZeRO paper's 4x for stage 1 and 8x for stage 2 are for many ranks and 16 bytes a parameter at "
            "stage 0, of which stage 1 keeps 2 of parameters and 2 of gradients. Here stage 0 has 14, since bf16 "
            "parameters are the upper half of their masters, and stage 1 shards gradients as soon as a unit's "
            f"are there: it saves {plain:.1f}x at 64 ranks without accumulation. **With accumulation in fp32 "
            f"stage 1 saves {summed:.1f}x, not 4x**: every rank then keeps all gradients, 4 bytes a parameter, until "
            "the boundary. Stages 2 and 3 reduce-scatter gradients in every micro-step, and keep a shard of them."
        ),
        "",
        "## The largest models",
        "",
        wrapped(
            f"Billions of parameters whose device peak fits, with {RESERVE:.0%} of the device left free: blocks "
            f"of hidden size {MODEL.hidden}, sequences of {SEQUENCE}, micro-batch 1, blocks recomputed, "
            "no accumulation. Layers are added until the device is full."
            " In brackets is what each node then needs on the host or on NVMe, in TB."
        ),
        "",
    ]
    for ranks in CLUSTERS:
        nodes = ranks // 8
        lines += [f"### {ranks} GPUs, {nodes} node{'s' if nodes > 1 else ''}", ""]
        lines += ["| | " + " | ".join(gpu(name).name.removeprefix("NVIDIA ") for name in GPUS) + " |"]
        lines += ["|---|" + "---:|" * len(GPUS)]
        for name in STRUCTURES:
            cells = []
            for device in GPUS:
                _, parameters, host, disk = found[f"size {ranks} {name}"][device]
                below = [f"{8 * bytes_ / 1e12:.1f} {tier}" for bytes_, tier in ((host, "host"), (disk, "NVMe"))
                         if 8 * bytes_ > 5e10]  # fmt: skip
                cells.append(f"{parameters / 1e9:.1f}" + (f" ({', '.join(below)})" if below else ""))
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += [
        wrapped(
            "The GPUs have 24, 32, 80 and 141 GB by name; plans use what their drivers list. Your model has "
            "other sizes: ask `shardwell plan`, and `shardwell plan --auto` for the fastest plan that fits."
        ),
        "",
    ]
    return "\n".join(lines)


_STEPS_OF_PICTURE = (
    ("Do parameters, gradients and", "optimizer state fit on each GPU?", "stage 0 or 1", "least traffic"),
    ("Do the bf16 parameters fit on", "each GPU, 2 bytes each?", "stage 2", "traffic of stage 1, sharded gradients"),
    ("Do all states fit on all GPUs", "together, 12 bytes each?", "stage 3", "half as much traffic again"),
    ("Do 12 bytes a parameter fit in", "the memory of all hosts?", "stage 3, optimizer on host", "updates by the CPU"),
)


def picture() -> str:
    """Return the decision as SVG, in light and dark."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 470" role="img" '
        'aria-label="Choose the first of stage 1, 2, 3, optimizer on host, NVMe that fits">',
        "<style>text { font: 15px system-ui, sans-serif; fill: #1b1b1b; } .s { font-size: 13px; fill: #5c5c5c; } "
        ".q { fill: #eef1f6; stroke: #4c72b0; } .a { fill: #e8f3ec; stroke: #55a868; } "
        "path { stroke: #777; fill: none; stroke-width: 1.5; } "
        "@media (prefers-color-scheme: dark) { text { fill: #e8e8e8; } .s { fill: #b0b0b0; } .q { fill: #20262f; } "
        ".a { fill: #1c2a21; } }</style>",
    ]
    for number, (first, second, answer, cost) in enumerate(_STEPS_OF_PICTURE):
        top = 12 + 92 * number
        parts.append(f'<rect class="q" x="12" y="{top}" width="270" height="58" rx="10"/>')
        parts.append(f'<text x="26" y="{top + 25}">{first}</text><text x="26" y="{top + 45}">{second}</text>')
        parts.append(f'<path d="M282 {top + 29} H342"/><text class="s" x="300" y="{top + 23}">yes</text>')
        parts.append(f'<rect class="a" x="342" y="{top}" width="286" height="58" rx="10"/>')
        parts.append(
            f'<text x="356" y="{top + 25}">{answer}</text><text class="s" x="356" y="{top + 45}">{cost}</text>'
        )
        parts.append(f'<path d="M147 {top + 58} V{top + 92}"/><text class="s" x="155" y="{top + 80}">no</text>')
    top = 12 + 92 * len(_STEPS_OF_PICTURE)
    parts.append(f'<rect class="a" x="12" y="{top}" width="616" height="58" rx="10"/>')
    parts.append(f'<text x="26" y="{top + 25}">stage 3, optimizer state and parameters on NVMe</text>')
    parts.append(f'<text class="s" x="26" y="{top + 45}">drives bound the step; more GPUs are faster</text></svg>')
    return "\n".join(parts) + "\n"


def main(words: list[str]) -> None:
    known = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    found = known if words == ["--same"] else {**known, **figures(" ".join(words))}
    FIGURES.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
    PAGE.write_text(written(found))
    PICTURE.write_text(picture())


if __name__ == "__main__":
    main(sys.argv[1:])
