"""Many programs on a pool of ranks: counts of what came of them, and each new failure made small."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.programs.program import Program
from tests.programs.shrink import shrunk
from tests.programs.trial import Outcome, attempt_all
from tests.ranks import RankFailedError, Ranks

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
        limit = 60.0 + 2.0 * len(batch)
        texts = [str(program) for program in batch]
        done = pool.run(batch[0].setting.ranks, attempt_all, texts, str(folder), str(progress), limit=limit)[0]
    except RankFailedError as error:
        written = [file.read_text().splitlines() for file in folder.glob("progress.*")]
        done = [json.loads(line) for line in max(written, key=len, default=[])]
        kind = "crash" if "died with exit code" in str(error) else "hang" if "did not answer" in str(error) else "end"
        return [Outcome(**one) for one in done] + [Outcome("failed", kind, detail=str(error)[-2500:])]
    return [Outcome(**one) for one in done]


@dataclass
class Tally:
    """What came of the programs so far."""

    verdicts: Counter[str] = field(default_factory=Counter)
    sentences: Counter[str] = field(default_factory=Counter)  # of refusals and warnings
    failures: Counter[str] = field(default_factory=Counter)  # by signature
    kinds: Counter[str] = field(default_factory=Counter)  # of instructions in shrunk failures

    def __str__(self) -> str:
        total = sum(self.verdicts.values())
        lines = [f"{total} programs: " + ", ".join(f"{count} {verdict}" for verdict, count in self.verdicts.items())]
        for title, counter in (("sentences", self.sentences), ("failures", self.failures), ("kinds", self.kinds)):
            if counter:
                lines.append(f"{title}:")
                lines.extend(f"  {count:5}  {text}" for text, count in counter.most_common())
        return "\n".join(lines)


def campaign(
    pool: Ranks,
    programs: Iterator[tuple[str, Program]],
    report: Callable[[str, Program, Outcome], None],
    shrinks_each: int = 1,
) -> Tally:
    """Try programs, given with their seeds; report failures, of each cause so many, made small."""
    tally = Tally()
    seeds: dict[Program, str] = {}
    batch: list[Program] = []

    def try_batch() -> None:
        for program, outcome in list(outcomes(pool, batch)):
            tally.verdicts[outcome.verdict] += 1
            if outcome.verdict in ("refused", "warned"):
                tally.sentences[outcome.signature[:150]] += 1
            elif outcome.verdict == "failed":
                small, its_outcome = program, outcome
                signature = outcome.signature if outcome.what != "silent" else ""
                if not signature or tally.failures[signature] < shrinks_each:
                    small, its_outcome = shrunk(program, outcome, lambda one: next(iter(outcomes(pool, [one])))[1])
                cause = signature or f"silent: {' '.join(str(small).split()[2:])}"
                if not signature:
                    cause = "silent: " + " ".join(sorted(_essence(small)))
                tally.failures[cause] += 1
                if tally.failures[cause] <= shrinks_each:
                    tally.kinds.update(_essence(small))
                    report(seeds[program], small, its_outcome)
        batch.clear()

    for seed, program in programs:
        seeds[program] = seed
        batch.append(program)
        if len(batch) == BATCH:
            try_batch()
    try_batch()
    return tally


def _essence(program: Program) -> set[str]:
    """What in a shrunk program may be the cause: kinds of instructions that are more than the loop itself."""
    ordinary = {"forward:tensor", "backward:loss", "backward:engine", "step", "look:gathered"}
    found = {one.tag for one in program.instructions} - ordinary
    setting = program.setting
    for key in ("offload", "loop", "engines"):
        if f"{key}=" in str(setting):
            found.add(f"{key}={getattr(setting, key)}")
    return found or {"the loop itself"}
