"""A plan as one HTML page that loads nothing: memory against what there is, the step's timeline, and a what-if panel.

The panel evaluates the trees of `plan/forms.py` in the browser (`page.js`, an evaluator without formulas).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

from shardwell.memory import Tier
from shardwell.memory.machine import NOT_LIMITED
from shardwell.monitor.timeline_page import POLICY, SCRIPT, STYLE, chart
from shardwell.plan.report import RESERVE, PlanReport
from shardwell.plan.simulation import MOMENTS
from shardwell.plan.terms import SEQUENCE
from shardwell.plan.time_report import time_sentence
from shardwell.plan.what_if import Asked, Structure, WhatIf

COLOURS = {
    "parameters": "#4c72b0",
    "gradients": "#dd8452",
    "optimizer": "#55a868",
    "staging": "#8172b3",
    "activations": "#64b5cd",
    "all states": "#8c8c8c",
}
_WORDS = {
    "stage": ("stage", {"0": "0", "1": "1", "2": "2", "3": "3"}),
    "optimizer": ("optimizer state on", {"none": "the device", "cpu": "the host", "nvme": "NVMe"}),
    "parameters": ("parameters on", {"none": "the device", "cpu": "the host", "nvme": "NVMe"}),
    "codec": ("quantised", {"none": "nothing", "weights": "weights (qwZ)", "both": "weights, gradients (qwZ, qgZ)"}),
}
_KINDS = {"gather": "all-gather", "reduce": "reduce-scatter", "step": "optimizer"}  # the words of tables
_MOST_BATCH, _MOST_SEQUENCE = 4096, 1 << 20
_OWN_STYLE = """
#verdict { font-weight: 600; font-size: 1.1rem; } #verdict.over, .over strong { color: var(--bad); }
#verdict.fits { color: var(--good); }
:root { --bad: #b3261e; --good: #1b6e3c; --field: #f4f5f7; }
@media (prefers-color-scheme: dark) { :root { --bad: #ff8a80; --good: #7fd6a0; --field: #22262b; } }
.panel { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.2rem, 1fr)); gap: .7rem 1rem; margin: .6rem 0;
  padding: .9rem; background: var(--field); border-radius: 10px; }
.panel label { display: block; font-size: 13px; color: var(--soft); }
.panel select, .panel input { display: block; width: 100%; min-height: 2.6rem; margin-top: .2rem; padding: 0 .5rem;
  font: inherit; color: var(--ink); background: var(--paper); border: 1px solid var(--line); border-radius: 6px; }
.level { margin: .7rem 0; }
.level .name { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; }
.level strong { font-variant-numeric: tabular-nums; }
.track { position: relative; display: flex; height: 1.7rem; margin-top: .2rem; background: var(--field);
  border-radius: 5px; overflow: hidden; }
.track i { display: block; height: 100%; flex: none; } .track b { position: absolute; top: 0; bottom: 0; width: 2px;
  background: var(--mark); }
pre { overflow-x: auto; background: var(--field); border-radius: 8px; padding: .7rem; font-size: 12.5px;
  margin: .4rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: .8rem 0; } summary { cursor: pointer; min-height: 2.2rem; }
.soft { color: var(--soft); font-size: 13px; }
table { min-width: min(24rem, 100%); }
"""


@dataclass(frozen=True)
class PlanPage:
    """The data of a page; without `what_if` it says why there is no panel."""

    report: PlanReport
    model: str  # as the command takes it
    gpu: str
    sequence: int
    asked: Asked | None = None
    what_if: WhatIf | None = None
    reason: str = ""

    def html(self) -> str:
        """Return the page."""
        report, name = self.report, escape(self.report.name)
        nodes = -(-report.num_ranks // report.machine.local_world_size(report.num_ranks))
        place = f"{report.num_ranks:,} × {escape(self.gpu)}, {nodes:,} node{'s' if nodes > 1 else ''}"
        assumed = "".join(f"<li>{escape(one)}</li>" for one in report.assumptions)
        # Nothing of the data may end the element that it is in, or begin a comment.
        text = (
            json.dumps(self._data()).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
        )
        script = (resources.files("shardwell.plan") / "page.js").read_text()
        key = "".join(
            f'<span><i style="background:{colour}"></i>{state}</span>'
            for state, colour in COLOURS.items()
            if state != "all states" or self.what_if is None
        )
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}: plan</title>'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{STYLE}{_OWN_STYLE}</style></head><body><h1>{name}</h1>"
            f"<p>{report.costs.num_parameters:,} parameters on {place}</p>"
            f'<p id="verdict" aria-live="polite"></p>{self._panel()}<h2>Memory</h2><div id="bars"></div>'
            f'<div class="key">{key}</div><p class="soft">The line is what may be used, {1 - RESERVE:.0%} of a '
            "device.</p>"
            f'<h2>Traffic of a rank</h2><div class="table" id="traffic"></div>{self._timeline()}'
            f"{_folded('What was assumed', assumed)}"
            f'<script type="application/json" id="data">{text}</script><script>(() => {{{script}}})();</script>'
            "</body></html>\n"
        )

    def _data(self) -> dict[str, Any]:
        machine, costs = self.report.machine, self.report.costs
        rooms = {
            Tier.DEVICE: machine.device_bytes * (1 - RESERVE), Tier.HOST: machine.host_bytes,
            Tier.DISK: machine.disk_bytes,
        }  # fmt: skip
        found: dict[str, Any] = {
            "model": self.model,
            "gpu": self.gpu,
            "colours": COLOURS,
            "moments": MOMENTS,
            "kinds": _KINDS,
            "per_node": machine.local_world_size(self.report.num_ranks),
            "room": {tier.value: str(int(size)) if size < NOT_LIMITED / 2 else None for tier, size in rooms.items()},
            "plan": {
                name: {key: str(size) for key, size in sizes.items()}
                for name, sizes in (("rest", costs.rest), ("peaks", costs.peaks), ("at_peak", costs.at_peak),
                                    ("traffic", costs.traffic))
            },
            "forms": None,
        }  # fmt: skip
        if self.what_if is not None and self.what_if.forms and self.asked is not None:
            found["depth"] = self.what_if.layers
            found["places"] = {
                one.key: [f"{nodes}x{local}" for nodes, local in places] for one, places in self.what_if.places.items()
            }
            found["place"] = f"{self.report.num_ranks // found['per_node']}x{found['per_node']}"
            found["forms"] = {one.key: forms.json() for one, forms in self.what_if.forms.items()}
            found["configs"] = {one.key: self.asked.settings(one) for one in self.what_if.forms}
        return found

    def _panel(self) -> str:
        if self.what_if is None:
            return f'<p class="soft">There is no what-if panel: {escape(self.reason)}.</p>' if self.reason else ""
        begin, ranks = self.what_if.begin, self.report.machine.ranks
        fields = []
        for name, (label, words) in _WORDS.items():
            options = "".join(
                f'<option value="{value}"{" selected" if str(getattr(begin, name)) == value else ""}>{word}</option>'
                for value, word in words.items()
            )
            fields.append(f'<label>{label}<select id="{name}">{options}</select></label>')
        here = self.report.machine.local_world_size(ranks.size)
        places = "".join(
            f'<option value="{nodes}x{local}"{_is(nodes * local == ranks.size and local == here, "selected")}'
            f"{_is(not is_in, 'disabled')}>{nodes * local:,} ({nodes:,} × {local})</option>"
            for nodes, local, is_in in self.what_if.ranks
        )
        fields.append(f'<label>ranks (nodes × GPUs)<select id="ranks">{places}</select></label>')
        batch = self.report.config["train_micro_batch_size_per_gpu"]
        for label, name, value, least, most in (
            ("micro-batch", "batch", batch, 1, _MOST_BATCH),
            ("sequence", "sequence", self.sequence, SEQUENCE, _MOST_SEQUENCE),
        ):
            fields.append(
                f'<label>{label}<input id="{name}" type="number" inputmode="numeric" value="{value}" min="{least}" '
                f'max="{most}" step="{least}"></label>'
            )
        refused = "".join(f"<li>{escape(_said(one))}: {escape(why)}</li>" for one, why in self.what_if.refused.items())
        return (
            f'<h2>What if?</h2><div class="panel">{"".join(fields)}</div><p class="soft">Every number below is '
            "recomputed here, to the byte. What cannot be chosen has other buffers than the classes on this page: run "
            "the command with it.</p><details><summary>The command and the configuration of this choice</summary>"
            '<pre id="command"></pre><pre id="config"></pre></details>'
            f"{_folded('Classes that are not on this page', refused)}"
        )

    def _timeline(self) -> str:
        time = self.report.time
        if time is None or not time.events:
            return ""
        few = "" if time.num_blocks is None else f" The picture has {time.num_blocks} blocks, all others are alike."
        return (
            f"<h2>A step of the plan</h2><p>{escape(time_sentence(time))}{few}</p>{chart(time.timeline())}"
            f"<script>{SCRIPT}</script>"
        )


def _folded(title: str, items: str) -> str:
    return f"<details><summary>{title}</summary><ol>{items}</ol></details>" if items else ""


def _is(condition: bool, attribute: str) -> str:
    return f" {attribute}" if condition else ""


def _said(one: Structure) -> str:
    return (
        f"stage {one.stage}, optimizer state on {_WORDS['optimizer'][1][one.optimizer]}, parameters on "
        f"{_WORDS['parameters'][1][one.parameters]}, quantised {_WORDS['codec'][1][one.codec]}"
    )
