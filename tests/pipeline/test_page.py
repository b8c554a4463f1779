"""The listings of the page about pipelines run as they are printed."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

from tests.support.command import ROOT
from tests.support.ranks import Ranks


def run_page() -> str:
    """Run all listings of the page, one after another; return what they print."""
    listings = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "pipeline.md").read_text(), flags=re.DOTALL)
    assert len(listings) == 3
    names: dict[str, Any] = {}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        # The second one builds a model of one stage: on two ranks it is the same on both.
        for listing in listings:
            exec(listing, names)
    assert names["net"](names["torch"].zeros(1, 2, dtype=names["torch"].int64)).shape == (1, 2, 1000)
    return out.getvalue()


def test_the_listings_run(ranks: Ranks) -> None:
    first, second = ranks.run(2, run_page)
    assert first.splitlines()[0].split()[0] == second.splitlines()[0].split()[0]  # the loss
    assert "0.111" in first  # the bubble of zb-h1 with 4 ranks and 8 micro-batches: 3 / 27
