"""Forms and the page of a plan: browser = Python = engine to the byte, offline, on phones, in light and dark."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwell.plan import SimulatedMachine, SimulatedRanks
from shardwell.plan.forms import _growing, make_forms, simulated_sizes
from shardwell.plan.models import PRESETS, PlanModel, decoder
from shardwell.plan.page import PlanPage
from shardwell.plan.simulation import FEWEST_STEPS
from shardwell.plan.terms import NoFormError, Point, Sizes, shard_tree
from shardwell.plan.trees import Symbol, as_json, evaluate, plus, times
from shardwell.plan.what_if import Asked, Structure, WhatIf
from shardwell.sharding.layout import TensorSpec, make_layout
from tests.support.browser import PROGRAM, Browser

SIZES = replace(PRESETS["llama-3-8b"], layers=14)  # sizes cost nothing: tensors have no bytes
STRUCTURES = (Structure(3, codec="both"), Structure(3))
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
NAME = "<img src=x onerror=alert(1)></script>"


def asked(ranks: int = 16, per_node: int = 4, sequence: int = 512) -> Asked:
    model = PlanModel(
        NAME, lambda batch, length, recomputes: decoder(NAME, SIZES, batch, length, recomputes=recomputes)
    )
    machine = SimulatedMachine(40e9, ranks=SimulatedRanks(0, ranks, per_node))
    return Asked(model, CONFIG, machine, sequence, recomputes=True)


@pytest.fixture(scope="module")
def what_if() -> WhatIf:
    return asked().what_if(STRUCTURES, said=lambda text: None)


@pytest.fixture(scope="module")
def page(what_if: WhatIf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = asked()
    report = plan.model.report(CONFIG, plan.machine, plan.sequence, True)
    path = tmp_path_factory.mktemp("plan") / "page.html"
    path.write_text(PlanPage(report, "'a b'", "h100-80gb", plan.sequence, plan, what_if).html(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with Browser() as made:
        yield made


def points(what_if: WhatIf, count: int, seed: int) -> list[tuple[Structure, Point]]:
    """Draw points of the classes: ranks that divide the embedding evenly, in nodes of any size."""
    draw = random.Random(seed)
    nodes = [one for one, _, is_in in what_if.ranks if is_in]
    found = []
    for _ in range(count):
        structure, per_node = draw.choice(STRUCTURES), draw.choice((2, 4, 8))
        most = max(one * local for one, local in what_if.places[structure])
        place = draw.choice([one for one in nodes if one * per_node <= most]), per_node
        found.append((structure, Point(*place, draw.randint(1, 9), 256 * draw.randint(1, 40), SIZES.layers)))
    return found


# ------------------------------------------------------------------------------------------------------------ the trees


def test_the_layout_of_symbols_is_the_layout_of_numbers() -> None:
    for numel in (1, 8, 777, 6400, 218_112_000):
        tree = shard_tree(numel)
        for ranks in (2, 3, 7, 16, 1000):
            whole = make_layout([TensorSpec("", (numel,))], ranks)
            assert evaluate(tree, {"ranks": ranks}) == whole.shard_numel


def test_sizes_that_grow_with_the_depth_are_told_from_those_of_one_depth_by_chance() -> None:
    assert _growing([672, 96, 696], [107_520, 744, 104, 768], 9) == [(672, 744), (96, 104), (696, 768)]
    assert _growing([12_288, 672, 96, 688], [744, 104, 760], 9) == [(672, 744), (96, 104), (688, 760)]


def test_a_staging_buffer_is_a_rounded_shard_and_not_a_shard_and_some_bytes() -> None:
    """At three points 32 bytes more than a shard may be what rounding adds; at others it adds none, or others."""
    points = [
        {"nodes": 1, "per_node": ranks, "ranks": ranks, "shard0": shard} for ranks, shard in ((32, 20016), (6, 106736))
    ]
    found = Sizes(points, {}).buffer((40064, 213504), ["shard0"], ["shard0"], is_staging=True)
    assert evaluate(plus(*(times(count, tree) for tree, count in found.items())), {"shard0": 10008}) == 20032


def test_arithmetic_of_symbols_is_that_of_numbers() -> None:
    for x in (-17, -1, 0, 5, 1 << 70):
        for y in (1, 3, 16):
            values = {"x": x, "y": y}
            a, b = Symbol("x"), Symbol("y")
            assert evaluate((a * 3 + b - 4).tree, values) == x * 3 + y - 4
            assert evaluate((-(-a // b)).tree, values) == -(-x // y)
            assert evaluate((a // b).tree, values) == x // y
            assert evaluate(((a * b) // b).tree, values) == x
    assert as_json(("+", 1 << 60, "x")) == ["+", str(1 << 60), "x"]
    with pytest.raises(ValueError, match="operator"):
        evaluate(("-", 1, 2), {})


# ------------------------------------------------------------------------------------------------------------ the forms


@pytest.mark.slow
def test_forms_are_what_the_engine_takes_to_the_byte(what_if: WhatIf) -> None:
    assert set(what_if.forms) == set(STRUCTURES), what_if.refused
    plan = asked()
    for structure, point in points(what_if, 4, 1):
        costs, _ = plan.structure_class(structure).run(point)
        assert what_if.forms[structure].at(point) == simulated_sizes(costs), (structure, point)


@pytest.mark.slow
def test_forms_divide_a_peak_of_the_device_into_states_as_a_simulation_does(what_if: WhatIf) -> None:
    plan = asked()
    for structure, point in points(what_if, 4, 3):
        costs, _ = plan.structure_class(structure).run(point)
        forms = what_if.forms[structure]
        for moment, expected in costs.at_moments.items():
            instants = [
                {state: evaluate(tree, forms.values(point)) for state, tree in parts.items()}
                for parts in forms.peaks[f"{moment} device"]
            ]
            highest = max(instants, key=lambda parts: sum(parts.values()))  # of equal ones the first, as the page does
            for state, size in expected.items():
                apart = abs(highest.get(state, 0) - size)
                assert apart <= 4096, (structure, point, moment, state)  # a few blocks of the allocator


@pytest.mark.parametrize("structure", [Structure(0), Structure(3, codec="both"), Structure(3, "nvme", "nvme")])
def test_a_step_after_one_that_only_touches_parameters_is_a_step_after_a_whole_one(structure: Structure) -> None:
    """Forms are made from such steps; what they are compared with has two whole ones."""
    simulated, point = asked().structure_class(structure), Point(2, 4, 2, 512, 3)
    (costs, whole), (touched_costs, touched) = (
        simulated.run(point, FEWEST_STEPS, touching=number) for number in (0, 1)
    )
    assert touched_costs == costs
    assert touched.changes[touched.begin :] == whole.changes[whole.begin :]
    assert touched.received == whole.received
    assert len(touched.changes) < 0.8 * len(whole.changes)


@pytest.mark.slow
def test_a_form_that_is_wrong_elsewhere_is_refused() -> None:
    """In one node there are no hops between nodes: forms of several nodes are wrong there, and say so."""
    plan = asked()
    with pytest.raises(NoFormError):
        make_forms(plan.structure_class(Structure(2)), [(2, 4), (4, 2), (8, 4)], [Point(1, 8, 1, 256, 6)])


def test_what_forms_are_not_for_is_refused() -> None:
    for plan in (asked(ranks=1), asked(sequence=300)):
        with pytest.raises(NoFormError, match="2 ranks or more"):
            plan.what_if(STRUCTURES, said=lambda text: None)


# ------------------------------------------------------------------------------------------------------------- the page


@pytest.mark.slow
def test_the_browser_computes_what_python_does_at_1000_points(browser: Browser, page: Path, what_if: WhatIf) -> None:
    browser.open(page)
    drawn = points(what_if, 1000, 2)
    given = [[one.key, {k: v for k, v in point.values().items() if k != "ranks"}] for one, point in drawn]
    script = (
        f"JSON.stringify({json.dumps(given)}.map(([key, at]) => numbersAt(key, at)), "
        "(key, value) => typeof value === 'bigint' ? String(value) : value)"
    )
    found = json.loads(browser.value(script))
    for (structure, point), numbers in zip(drawn, found, strict=True):
        expected = what_if.forms[structure].at(point)
        for name in ("rest", "peaks", "traffic"):
            assert {key: int(size) for key, size in numbers[name].items() if int(size)} == expected[name]
    huge = Point(1 << 20, 8, 1 << 20, 1 << 20, 1 << 12)  # totals beyond 2**53
    at = json.dumps({key: value for key, value in huge.values().items() if key != "ranks"})
    key = Structure(3).key
    assert (
        int(browser.value(f"String(numbersAt('{key}', {at}).peaks['backward device'])"))
        == (what_if.forms[Structure(3)].at(huge)["peaks"]["backward device"])
    )
    assert what_if.forms[Structure(3)].at(huge)["peaks"]["backward device"] > 1 << 53


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390, 320])
def test_the_page_loads_nothing_and_nothing_overflows(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width=width, dark=dark)
    assert browser.requests == [page.as_uri()]
    assert browser.errors == []
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value("document.querySelector('h1').textContent") == NAME  # text, and no element
    assert browser.value("document.images.length") == 0
    assert browser.value("document.querySelectorAll('.track i').length") > 3


@pytest.mark.slow
def test_controls_recompute_and_what_is_not_there_is_disabled(browser: Browser, page: Path) -> None:
    browser.open(page)
    said = "document.querySelector('.level strong').textContent"
    command = "document.querySelector('#command').textContent"
    before = browser.value(said)

    def choose(name: str, value: str) -> None:
        browser.value(
            f"(e => {{ e.value = '{value}'; e.dispatchEvent(new Event('input')); }})(document.querySelector('#{name}'))"
        )

    assert "'a b' --gpus 16 --nodes 4" in browser.value(command)
    choose("batch", "80")
    assert browser.value(said) != before
    assert "--micro-batch 80" in browser.value(command)
    assert browser.value("document.querySelector('#verdict').className") == "over"
    choose("sequence", "700")  # the nearest multiple is shown and computed
    assert "--seq 768" in browser.value(command)
    disabled = "[...document.querySelector('#{}').options].filter(o => o.disabled).map(o => o.value)"
    assert browser.value(disabled.format("stage")) == ["0", "1", "2"]
    assert browser.value(disabled.format("optimizer")) == ["cpu", "nvme"]
    assert browser.value(disabled.format("codec")) == ["weights"]
    assert "1x4" in browser.value(disabled.format("ranks"))  # one node has other buffers
    choose("codec", "both")
    zero = json.loads(browser.value("document.querySelector('#config').textContent"))["zero_optimization"]
    assert zero["zero_quantized_weights"] is True
    assert browser.errors == []
