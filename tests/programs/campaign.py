"""Many programs on a pool of ranks: counts of what came of them, and each new failure made small."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.programs.program import Program, Setting
from tests.programs.shrink import shrunk
from tests.programs.trial import Outcome, attempt_all
from tests.support.patience import soon
from tests.support.ranks import RankFailedError, Ranks

BATCH = 40  # programs in one job


def outcomes(pool: Ranks, programs: list[Program]) -> Iterator[tuple[Program, Outcome]]:
    """Of programs with one number of ranks, in order. A job that ends early is followed by another."""
    left = list(programs)
    while left:
        batch = left[:BATCH]
        with tempfile.TemporaryDirectory(prefix="programs-") as folder:
            done = _run(pool, batch, Path(folder))
        yield from zip(batch, done, strict=False)
        left = left[len(done) :]


def _run(pool: Ranks, batch: list[Program], folder: Path) -> list[Outcome]:
    progress = folder / "progress"
    try:
        limit = soon(60.0 + 2.0 * len(batch))
        texts = [str(program) for program in batch]
        done = pool.run(batch[0].setting.ranks, attempt_all, texts, str(folder), str(progress), limit=limit)[0]
    except RankFailedError as error:
        written = [file.read_text().splitlines() for file in folder.glob("progress.*")]
        done = [json.loads(line) for line in max(written, key=len, default=[])]
        kind = "crash" if "died with exit code" in str(error) else "hang" if "did not answer" in str(error) else "end"
        return [Outcome(**one) for one in done] + [Outcome("failed", kind, detail=str(error)[-2500:])]
    return [Outcome(**one) for one in done]


@dataclass
class Campaign:
    """What came of the programs so far. Of each cause of failure one program is made small and reported."""

    pool: Ranks
    report: Callable[[str, Program, Outcome], None]
    verdicts: Counter[str] = field(default_factory=Counter)
    sentences: Counter[str] = field(default_factory=Counter)  # of refusals and warnings
    failures: Counter[str] = field(default_factory=Counter)  # by cause
    _causes: list[tuple[str, frozenset[str]]] = field(default_factory=list)  # signatures, and what they need

    def run(self, programs: Iterable[tuple[str, Program]]) -> None:
        """Programs with their seeds."""
        batch: list[tuple[str, Program]] = []
        for pair in programs:
            batch.append(pair)
            if len(batch) == BATCH:
                self._run(batch)
                batch = []
        self._run(batch)

    def _run(self, batch: list[tuple[str, Program]]) -> None:
        found = list(outcomes(self.pool, [program for _, program in batch]))
        for (seed, _), (program, outcome) in zip(batch, found, strict=True):
            self.verdicts[outcome.verdict] += 1
            if outcome.verdict in ("refused", "warned"):
                self.sentences[outcome.signature[:200]] += 1
            elif outcome.verdict == "failed":
                self.failures[self._cause(seed, program, outcome)] += 1

    def _cause(self, seed: str, program: Program, outcome: Outcome) -> str:
        """A program that holds all of a known cause is not made small: it most likely fails of that."""
        for signature, needed in self._causes:
            if signature == outcome.signature and needed <= essence(program):
                return _named(signature, needed)
        small, its_outcome = shrunk(program, outcome, lambda one: next(iter(outcomes(self.pool, [one])))[1])
        needed = frozenset(essence(small))
        self._causes.append((outcome.signature, needed))
        self.report(seed, small, its_outcome)
        return _named(outcome.signature, needed)

    def __str__(self) -> str:
        total = sum(self.verdicts.values())
        lines = [f"{total} programs: " + ", ".join(f"{count} {verdict}" for verdict, count in self.verdicts.items())]
        for title, counter in (("sentences", self.sentences), ("failures", self.failures)):
            if counter:
                lines.append(f"{title}:")
                lines.extend(f"  {count:5}  {text}" for text, count in counter.most_common())
        return "\n".join(lines)


def _named(signature: str, needed: frozenset[str]) -> str:
    return f"{signature[:120]} [{' '.join(sorted(needed))}]"


def essence(program: Program) -> set[str]:
    """What in a program is more than a plain loop: kinds of instructions, and of the setting."""
    ordinary = {"forward:tensor", "backward:loss", "backward:engine", "step", "look:gathered"}
    found = {one.tag for one in program.instructions} - ordinary
    default = Setting(stage=program.setting.stage, ranks=program.setting.ranks)
    keys = ("offload", "loop", "engines", "accumulation", "clip", "dtype")
    found |= {f"{k}={getattr(program.setting, k)}" for k in keys if getattr(program.setting, k) != getattr(default, k)}
    return found or {"the loop itself"}
