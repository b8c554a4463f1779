"""Configurations by chance: what a simulated rank counts, beside what real ranks count.

python -m tests.campaigns.plans --count 500 --minutes 60
"""

from __future__ import annotations

import sys
import tempfile
import time

from tests.campaigns.result import Result, command_line
from tests.support.plan_matrix import PlanCase, differences, drawn, on_rank
from tests.support.ranks import RankFailedError, Ranks

AT_A_TIME = 10  # cases in one job of the ranks


def campaign(count: int, seed: int, seconds: float) -> Result:
    """Run so many configurations, each on the ranks that it is for."""
    result, begin, ranks = Result("plans"), time.monotonic(), Ranks()
    cases = sorted(drawn(count, seed), key=lambda case: case.ranks)
    jobs = [cases[at : at + AT_A_TIME] for at in range(0, len(cases), AT_A_TIME)]
    try:
        for job in jobs:
            for size in sorted({case.ranks for case in job}):
                if time.monotonic() - begin < seconds:
                    _run([case for case in job if case.ranks == size], size, ranks, result)
    finally:
        ranks.close()
    result.seconds = round(time.monotonic() - begin, 1)
    return result


def _run(cases: list[PlanCase], size: int, ranks: Ranks, result: Result) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = ranks.run(size, on_rank, cases, folder)
        except RankFailedError as error:
            for case in cases:
                result.count("failed", f"{case}, or one beside it: {error}")
            return
    for number, case in enumerate(cases):
        wrong = [
            f"rank {rank}: {words}"
            for rank, (real, plan) in enumerate(answers[number] for answers in found)
            if plan is not None
            for words in differences(case, real, plan)
        ]
        result.count("differs" if wrong else "the same", f"{case}: {wrong}" if wrong else "")


if __name__ == "__main__":
    sys.exit(command_line(campaign, "tests.campaigns.plans", __doc__))
