"""Training between two hosts: the ledger's bytes between nodes are those that cross the link."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import links
from benchmarks.hosts import why_not
from benchmarks.links_report import chosen_words, crossing_lines, crossings
from benchmarks.model import TINY

pytestmark = pytest.mark.slow

REFUSED = why_not()
needs_hosts = pytest.mark.skipif(REFUSED is not None, reason=f"no hosts here: {REFUSED}")
OVERHEAD = 1.06  # headers of TCP, IP and Ethernet in both directions, and gloo's before each message
HEADERS = 16_384  # bytes of those that short messages have, however little is in them


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, preloaded_processes: None) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("links") / "links.json"
    variants = "shardwell3,zero++"
    assert links.main(["--size", "tiny", "--fp32", "--rates", "none,40", "--only", variants, "--json", str(path)]) == 0
    assert path.with_suffix(".png").stat().st_size > 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@needs_hosts
def test_the_ledger_between_nodes_agrees_with_what_crossed_the_link(report: dict[str, Any]) -> None:
    for point in report["points"]:
        for way in ("there", "back"):
            assert point["ledger"] / 2 < point[way] < OVERHEAD * point["ledger"] / 2 + HEADERS


@needs_hosts
def test_stage_3_moves_its_parameters_one_and_a_half_times_in_each_direction(report: dict[str, Any]) -> None:
    """Of what is gathered or reduced, half rests on the other host, and enters this one once."""
    whole = 4 * TINY.num_parameters
    for point in report["points"]:
        if point["variant"] == "shardwell3":
            assert 3 * whole <= point["ledger"] < 3 * whole * 1.01  # padding, norms


@needs_hosts
def test_zero_plus_plus_moves_eight_bits_for_parameters_and_four_for_gradients(report: dict[str, Any]) -> None:
    """Once in a step each, half of them in each direction."""
    codes = TINY.num_parameters * (1 + 1 / 2)
    for point in report["points"]:
        if point["variant"] == "zero++":
            assert codes <= point["ledger"] < codes * 1.03  # scales, padding, norms


@needs_hosts
def test_every_variant_is_measured(report: dict[str, Any]) -> None:
    measured = {(point["variant"], point["mbit"]) for point in report["points"]}
    assert measured == {(variant, mbit) for variant in ("shardwell3", "zero++") for mbit in (None, 40)}
    assert report["errors"] == {}
    assert report["limiter"] in ("tbf", "htb", "netem")


@needs_hosts
def test_auto_turns_all_of_zero_plus_plus_on_where_the_link_is_slow(tmp_path: Path, preloaded_processes: None) -> None:
    """It measures, and a machine that is busy with other things may deceive it: it has three tries."""
    every = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
    path = tmp_path / "auto.json"
    command = ["--size", "tiny", "--fp32", "--rates", "20", "--only", "auto", "--json", str(path)]
    found = []
    while every not in found and len(found) < 3:
        assert links.main(command) == 0
        found += [point["chosen"] for point in json.loads(path.read_text())["points"]]
    assert every in found


def points(variant: str, seconds: dict[float | None, float]) -> list[dict[str, Any]]:
    return [{"variant": variant, "mbit": mbit, "seconds": time} for mbit, time in seconds.items()]


def test_crossings_lie_where_times_are_equal() -> None:
    few = points("few bytes", {100: 2.0, 10: 4.0, None: 2.0})
    many = points("many bytes", {100: 1.0, 10: 8.0, None: 1.0})
    (found,) = crossings(few + many)
    assert found["faster"] == "few bytes"
    assert found["changes"] == pytest.approx([10**1.5])  # both are a factor of 2 away from there
    assert crossing_lines([found]) == ["few bytes is faster than many bytes up to 32 Mbit/s"]


def test_what_was_chosen_is_told() -> None:
    assert chosen_words(None) == ""
    assert chosen_words({"weights": False, "copies": 1}) == " (nothing turned on)"
    assert chosen_words({"weights": True, "gradients": False, "copies": 2}) == " (weights true, copies 2)"


def test_a_variant_that_always_wins_has_no_crossing() -> None:
    (found,) = crossings(points("slow", {10: 2.0, None: 1.0}) + points("fast", {10: 1.0, None: 0.5}))
    assert crossing_lines([found]) == ["fast is faster than slow at every rate"]


def test_a_change_after_the_last_limit_is_told_as_that_limit() -> None:
    (found,) = crossings(points("a", {10: 1.0, None: 1.0}) + points("b", {10: 2.0, None: 0.5}))
    assert found["changes"] == [10]
