"""`engine.record(timing=True)` and `shardwell run --profile`: spans that add up, in words, as a page and as a trace."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell import spans
from shardwell.monitor.timeline import ROWS, Span, Timeline
from shardwell.monitor.timeline_page import page
from shardwell.parallel import TrafficKind
from tests.support.command import ROOT
from tests.support.command import shardwell as command
from tests.support.models import Gpt, batches, share, zero
from tests.support.ranks import Ranks

ADAMW = {"type": "AdamW", "params": {"lr": 0.01}}


def recorded(stage: int, deeper: dict[str, Any] | None = None) -> dict[str, Any]:
    """A timed step after a plain one: its timeline, its tokens, the tokens without times, and the traffic."""
    config = zero(stage, optimizer=ADAMW, zero_optimization=deeper or {})
    torch.manual_seed(0)
    engine = shardwell.initialize(model=Gpt(), config=config).engine
    tokens = []
    for timing in (False, False, True):
        with engine.record(timing=timing) as trace:
            engine.backward(engine(share(batches(1, 4)[0], dist.get_rank(), 2)))
            engine.step()
        tokens.append(str(trace))
    line: Timeline = trace.timeline  # type: ignore[attr-defined]
    received = engine.traffic().total(TrafficKind.ALL_GATHER)
    engine.destroy()
    return {
        "spans": [(one.row, one.name, one.begin, one.end, one.num_bytes) for one in line.spans],
        "seconds": line.seconds,
        "tokens": tokens[1:],
        "received": received,
        "text": str(line),
        "listens": spans.listener is not None,
    }


def of_row(found: dict[str, Any], row: str) -> list[tuple[float, float, str, int]]:
    return [(begin, end, name, size) for one, name, begin, end, size in found["spans"] if one == row]


def test_a_timed_step_has_every_unit_its_collectives_and_its_waits(ranks: Ranks) -> None:
    found, _ = ranks.run(2, recorded, 3)
    assert found["tokens"][0] == found["tokens"][1]  # times change nothing of the schedule
    names = {name for _, _, name, _ in of_row(found, "compute")}
    for unit in ("(root)", "embed", "blocks.0", "blocks.1", "blocks.2"):
        assert {f"backward {unit}", f"step {unit}"} <= names
        assert any(name == f"all-gather {unit}" for _, _, name, _ in of_row(found, "all-gather"))
    assert sum(size for *_, size in of_row(found, "all-gather")) == found["received"]
    assert found["text"].count("\n  1. ") == found["text"].count("\n  3. ") == 1
    assert not found["listens"]


def test_what_is_computed_and_what_is_waited_for_fill_the_time(ranks: Ranks) -> None:
    for stage in (0, 2, 3):
        found = ranks.run(2, recorded, stage)[0]
        both = sorted(of_row(found, "compute") + of_row(found, "wait"))
        assert sum(end - begin for begin, end, *_ in both) == pytest.approx(found["seconds"], rel=1e-3)
        for (_, end, *_), (begin, *_) in pairwise(both):
            assert begin >= end - 1e-6  # the loop does one thing at a time


def test_updates_on_the_host_and_transfers_from_disk_have_rows(ranks: Ranks, tmp_path: Path) -> None:
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    deeper = {"offload_optimizer": place, "offload_param": {**place, "max_in_cpu": 0}}
    found, _ = ranks.run(2, recorded, 3, deeper)
    assert of_row(found, "host update")
    assert {name for _, _, name, _ in of_row(found, "disk")} == {"read", "write"}
    assert all(size > 0 for *_, size in of_row(found, "disk"))


LINE = Timeline(
    (
        Span("compute", "forward blocks.0", 0.0, 0.4),
        Span("wait", "all-gather of blocks.1", 0.4, 0.7),
        Span("all-gather", "all-gather <blocks.1>", 0.1, 0.7, 1 << 20),
        Span("compute", "step (root)", 0.7, 1.0),
    ),
    1.0,
    1,
    title="a <step>",
)


def test_the_largest_reasons_come_first_in_words() -> None:
    first, second, third = LINE.reasons()
    assert first == "forward computes: 400 ms a step (40%)"
    assert {second.split(":")[0], third.split(":")[0]} == {"waits for all-gather", "step computes"}
    assert "the longest, 300 ms, is for all-gather of blocks.1" in second + third


class Tags(HTMLParser):
    """Which tags a page opens and closes, and what it loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.num_rects = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.num_rects += tag == "rect"
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_loads_nothing_and_knows_the_dark() -> None:
    text = page(LINE)
    tags = Tags()
    tags.feed(text)
    assert (tags.open, tags.loads, tags.num_rects) == ([], [], 4)
    assert "prefers-color-scheme: dark" in text
    assert "a &lt;step&gt;" in text
    assert text.count("<script>") == 1  # its own; what timelines name is escaped


def test_the_trace_is_one_that_perfetto_reads(tmp_path: Path) -> None:
    files = LINE.save(tmp_path)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    named = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == set(ROWS)
    whole = [event for event in events if event["ph"] == "X"]
    assert [(event["ts"], event["dur"]) for event in whole][1] == (pytest.approx(4e5), pytest.approx(3e5))
    assert {file.suffix for file in files} >= {".html", ".json"}


@pytest.mark.slow
def test_a_run_with_profile_writes_a_timeline_of_each_rank(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script = tmp_path / "script.py"
    script.write_text(
        "import shardwell, torch\n"
        "model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(3)])\n"
        "config = {'zero_optimization': {'stage': 3, 'stage3_param_persistence_threshold': 0},\n"
        "          'optimizer': {'type': 'AdamW'}}\n"
        "engine = shardwell.initialize(model=model, config=config).engine\n"
        "for _ in range(7):\n"
        "    engine.backward(engine(torch.ones(2, 32)).sum())\n"
        "    engine.step()\n"
    )
    done = command("run", "-n", "2", "--profile", tmp_path / "out", script, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "2 steps of rank 0: " in done.stdout
    assert "largest parts of a step:" in done.stdout
    names = {f"rank{rank}.{suffix}" for rank in range(2) for suffix in ("html", "json", "png")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
