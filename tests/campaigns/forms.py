"""Points by chance of models by chance: the bytes that a page's forms have there, beside those of a simulated engine.

The page itself computes them too, if there is a Chromium. A point is what the controls of a page can ask for.

python -m tests.campaigns.forms --count 1000 --minutes 60
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwell.plan import SimulatedMachine, SimulatedRanks
from shardwell.plan.decoder import DecoderSizes
from shardwell.plan.forms import compare
from shardwell.plan.models import PlanModel, decoder
from shardwell.plan.page import PlanPage
from shardwell.plan.simulation import FEWEST_STEPS
from shardwell.plan.terms import SEQUENCE, NoFormError, Point
from shardwell.plan.what_if import STRUCTURES, Asked, Structure, WhatIf
from tests.campaigns.result import Result, command_line
from tests.support.browser import PROGRAM, Browser

OF_A_MODEL = 25  # points
OFFERED, LEFT_OUT = "classes that a page offers", "classes that it leaves out, and says why"
WITHOUT = "plans without a panel, which say why"
_PRECISIONS: tuple[dict[str, Any], ...] = ({"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}, {})
_PLACES = ((1, 2), (1, 4), (1, 8), (2, 2), (2, 8), (3, 4), (4, 8), (8, 8), (16, 4), (16, 8))


@dataclass(frozen=True)
class Drawn:
    """A model with a configuration and ranks, and the class of configurations that its forms are asked for."""

    sizes: DecoderSizes
    config: dict[str, Any]
    place: tuple[int, int]
    sequence: int
    recomputes: bool
    structure: Structure

    def asked(self) -> Asked:
        model = PlanModel(
            "drawn", lambda batch, length, again: decoder("drawn", self.sizes, batch, length, recomputes=again)
        )
        nodes, per_node = self.place
        machine = SimulatedMachine(ranks=SimulatedRanks(0, nodes * per_node, per_node))
        return Asked(model, self.config, machine, self.sequence, self.recomputes)


def drawn(draw: random.Random) -> Drawn:
    """Draw a model, a configuration, ranks, and a class."""
    head_dim, kv_heads = draw.choice((16, 32, 64, 80)), draw.choice((1, 2, 4))
    heads, gated = kv_heads * draw.choice((1, 2, 4)), draw.random() < 0.6
    sizes = DecoderSizes(
        layers=draw.randint(10, 20),
        hidden=heads * head_dim,
        heads=heads,
        vocabulary=draw.choice((1000, 1024, 5003, 32000, 50257)),
        mlp=draw.choice((0, 96, 352, 1000, 1024)),
        kv_heads=kv_heads,
        positions=0 if gated else draw.choice((0, 16384)),
        gated=gated,
        tied=draw.random() < 0.3,
        qkv_bias=draw.random() < 0.3,
        head_norm=gated and draw.random() < 0.2,
        norms=draw.choice(("before", "before", "around")) if gated else "before",
    )
    structure = draw.choice(STRUCTURES)
    zero = structure.zero()
    if draw.random() < 0.5:
        zero["stage3_param_persistence_threshold"] = draw.choice((0, 1000))
    config = {
        "train_micro_batch_size_per_gpu": draw.randint(1, 4),
        "gradient_accumulation_steps": draw.choice((1, 1, 2)),
        "gradient_clipping": draw.choice((0.0, 1.0)),
        "zero_optimization": zero,
        "optimizer": {"type": draw.choice(("AdamW", "AdamW", "SGD")), "params": {"lr": 1e-4}},
        **draw.choice(_PRECISIONS),
    }
    sequence = SEQUENCE * draw.randint(1, 16)
    return Drawn(sizes, config, draw.choice(_PLACES), sequence, draw.random() < 0.5, structure)


def points(what_if: WhatIf, one: Drawn, draw: random.Random) -> Iterator[Point]:
    """Draw points that the page offers."""
    places = what_if.places[one.structure]
    for _ in range(OF_A_MODEL):
        batch, sequence = draw.randint(1, 9), SEQUENCE * draw.randint(1, 40)
        yield Point(*draw.choice(places), batch, sequence, what_if.layers)


def in_browser(asked: Asked, what_if: WhatIf, one: Drawn, compared: list[Point], result: Result) -> None:
    """Compare what the page computes at these points with what Python does."""
    if PROGRAM is None or not compared:
        return
    report = asked.model.report(one.config, asked.machine, one.sequence, one.recomputes)
    given = [{name: size for name, size in point.values().items() if name != "ranks"} for point in compared]
    script = (
        f"JSON.stringify({json.dumps(given)}.map(at => numbersAt('{one.structure.key}', at)), "
        "(key, value) => typeof value === 'bigint' ? String(value) : value)"
    )
    with Browser() as browser, tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.html")
        page = PlanPage(report, "drawn", "h100-80gb", one.sequence, asked, what_if)
        path.write_text(page.html(), encoding="utf-8")
        browser.open(path)
        found = json.loads(browser.value(script))
    for point, numbers in zip(compared, found, strict=True):
        for name, expected in what_if.forms[one.structure].at(point).items():
            if {key: int(size) for key, size in numbers[name].items() if int(size)} != expected:
                result.count("differs", f"in the browser, {name} at {point}: {one}")
        result.figures["of them computed by the page too"] += 1


def campaign(count: int, seed: int, seconds: float) -> Result:
    """Compare at so many points."""
    result, begin, number = Result("forms"), time.monotonic(), 0
    while result.tried < count and time.monotonic() - begin < seconds:
        draw, number = random.Random(f"{seed} {number}"), number + 1
        one = drawn(draw)
        asked = one.asked()
        try:
            found = asked.what_if((one.structure,), said=lambda text: None)
        except NoFormError:  # the page says why in place of its controls
            result.figures[WITHOUT] += 1
            continue
        if one.structure not in found.forms:
            result.figures[LEFT_OUT] += 1
            continue
        result.figures[OFFERED] += 1
        simulated, compared = asked.structure_class(one.structure), list[Point]()
        for point in points(found, one, draw):
            if result.tried == count or time.monotonic() - begin > seconds:
                break
            try:
                compare(simulated, found.forms[one.structure], point, FEWEST_STEPS)
                result.count("the same to the byte")
                compared.append(point)
            except NoFormError as error:
                result.count("differs", f"{error}: {one}")
        in_browser(asked, found, one, compared, result)
    result.seconds = round(time.monotonic() - begin, 1)
    result.figures["CPU seconds"] += round(time.process_time())
    return result


if __name__ == "__main__":
    sys.exit(command_line(campaign, "tests.campaigns.forms", __doc__))
