"""Campaigns of random programs: `python -m tests.programs --count 10000 --seed 1 --ranks 2`.

`--only edit grad:mul_ stage=3` and `--without engines=2 loop=before` choose what is drawn: words and tags of
instructions, and values of settings. `--replay FILE` runs programs as text, separated by blank lines.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.programs.campaign import Campaign, outcomes
from tests.programs.draw import Kinds, draw
from tests.programs.program import Program
from tests.programs.trial import Outcome
from tests.support.ranks import Ranks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many")
    parser.add_argument("--failures", type=Path, help="append failures to this file, too")
    parser.add_argument("--replay", type=Path)
    options = parser.parse_args()
    pool = Ranks()
    try:
        if options.replay is not None:
            return replay(pool, options.replay.read_text())
        kinds = Kinds(frozenset(options.only), frozenset(options.without))

        def programs() -> Iterator[tuple[str, Program]]:
            end = time.monotonic() + 60 * options.minutes
            for number in range(options.first, options.first + options.count):
                if time.monotonic() > end:
                    return
                seed = f"{options.seed}:{number}"
                yield seed, draw(seed, options.ranks, kinds)

        def report(seed: str, program: Program, outcome: Outcome) -> None:
            text = f"--- seed {seed}: {outcome.what} {outcome.at}\n{program}\n{outcome.detail.strip()}\n"
            print(text, flush=True)
            if options.failures is not None:
                with options.failures.open("a") as file:
                    file.write(text + "\n")

        campaign = Campaign(pool, report)
        try:
            campaign.run(programs())
        finally:
            print(campaign, flush=True)
        return int(bool(campaign.verdicts["failed"]))
    finally:
        pool.close()


def replay(pool: Ranks, text: str) -> int:
    failed = 0
    for part in text.split("\n\n"):
        lines = [line for line in part.splitlines() if line.strip() and not line.startswith("#")]
        if lines:
            ((program, outcome),) = outcomes(pool, [Program.read("\n".join(lines))])
            print(f"{program}\n=> {outcome.verdict} {outcome.what} {outcome.at} {outcome.detail}\n")
            failed += outcome.verdict == "failed"
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
