"""Writes the table of campaigns in `docs/faults.md` from what their last long runs found.

    python -m tests.campaigns.page kills.json checkpoints.json ...

The files are those of `--json`; several of one campaign count together. They are kept together under
`benchmarks/results/`, and a test holds the page against them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.campaigns.result import Result
from tests.support.command import ROOT

KEPT = ROOT / "benchmarks" / "results" / "campaigns.json"
PAGE = ROOT / "docs" / "faults.md"
BEGIN, END = "<!-- campaigns: begin -->\n", "<!-- campaigns: end -->\n"
WORDS = {
    "kills": "ranks killed at random moments, in all tiers and under all launchers",
    "checkpoints": "checkpoints changed by chance, own and foreign, and loaded",
    "configurations": "configurations changed by chance, through `initialize` and two steps",
    "forms": "points of pages of plans: the engine's bytes, Python's and the browser's",
    "io_faults": "calls on files that fail, in saves, loads and steps with states on disk",
    "memory_limits": "jobs whose memory is limited by a control group",
    "ranks_that_differ": "jobs of which one rank differs in one thing",
    "stage_faults": "pipelines of which one rank fails or diverges at an operation, with restarts in other layouts",
    "strangers": "jobs on two hosts under attack by a third",
}


def table(results: list[dict[str, Any]]) -> str:
    """As Markdown, with the machine and versions below."""
    lines = ["| what was tried | how often | what came of it | what must not be |", "|---|---|---|---|"]
    for result in sorted(results, key=lambda one: list(WORDS).index(one["campaign"])):
        counts = {**result["outcomes"], **result["figures"]}
        came = [f"{count:,} {what}" for what, count in counts.items()]
        came += [f"{what}: {seconds:g} s at most" for what, seconds in result["slowest"].items()]
        what = f"{WORDS[result['campaign']]} (`{result['command']}`)"
        lines.append(f"| {what} | {result['tried']:,} | {'; '.join(came)} | {len(result['bad'])} |")
    return "\n".join(lines) + "\n"


def section(kept: dict[str, Any]) -> str:
    machines = {result["machine"] for result in kept["results"]}
    versions = {tuple(sorted(result["versions"].items())) for result in kept["results"]}
    on = "; ".join(sorted(machines))
    of = "; ".join(", ".join(f"{name} {version}" for name, version in one) for one in sorted(versions))
    return f"{table(kept['results'])}\nOn {on}; {of}.\n"


def written(page: str, kept: dict[str, Any]) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{section(kept)}{END}{after}"


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return several runs of one campaign as one."""
    found = Result(runs[0]["campaign"])
    for run in runs:
        found.add(run)
    commands = "; ".join(run["command"] for run in runs)
    return {**runs[-1], **found.to_dict(commands), "versions": runs[-1]["versions"], "machine": runs[-1]["machine"]}


def main(names: list[str]) -> None:
    """The files of a campaign replace what is kept of it."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {"results": []}
    by_name = {result["campaign"]: result for result in kept["results"]}
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        run = json.loads(Path(name).read_text())
        found.setdefault(run["campaign"], []).append(run)
    by_name |= {campaign: together(runs) for campaign, runs in found.items()}
    kept = {"results": list(by_name.values())}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(written(PAGE.read_text(), kept))


if __name__ == "__main__":
    main(sys.argv[1:])
