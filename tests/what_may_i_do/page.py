"""The page: every operation at every stage, as it was found by running it."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

from tests.support.ranks import RankFailedError, Ranks
from tests.what_may_i_do.operations import FAILS_STILL, OPERATIONS, Operation
from tests.what_may_i_do.performing import COLUMNS, Result, perform_all, plain_words

PAGE = Path(__file__).parents[2] / "docs" / "what-may-i-do.md"
HEAD = """# What may I do to the model?

Each line was run in a small training loop, on two ranks, and compared with the same code on plain PyTorch.
`python -m tests.what_may_i_do` writes this page, and the tests fail if it is not what they find.

- **works**: the numbers of plain PyTorch.
- **warns**: it goes on, and a warning says what is different or what it costs.
- **raises**: an error says what to do instead; nothing was changed.

The columns are ZeRO stages, and stages 2 and 3 with optimizer state on the host. Code that is not a whole step stands
where the title of its table says. `model` is the module, `engine` what `initialize` made of it, `optimizer` the one
that was given to `initialize`. The sentences that the numbers stand for follow each table.
"""


# Here the way that an operation takes differs from stage to stage: where gradients rest, and who updates.
DIFFERS_BY_STAGE = (
    "The loop", "Gradients, between backward and step", "Gradients, by hooks and before the first step", "The optimizer"
)  # fmt: skip


def in_turn() -> dict[str, list[Operation]]:
    """The operations that the tests run, by column: each at stage 3, and at others in turn.

    The next operation of a section is at the next columns, so that each section meets each column.
    """
    whole, host = [("0", "1", "2"), ("2, host", "3, host")]
    turns: dict[str, list[Operation]] = {column: [] for column in COLUMNS}
    numbers: dict[str, int] = {}
    for operation in OPERATIONS:
        number = numbers[operation.section] = numbers.get(operation.section, -1) + 1
        others = (*whole, *host)
        columns = (
            [whole[number % 3], host[number % 2]] if operation.section in DIFFERS_BY_STAGE else [others[number % 5]]
        )
        for column in ("3", *columns):
            turns[column].append(operation)
    return turns


def found(pool: Ranks, column: str, operations: list[Operation] = OPERATIONS) -> dict[str, Result]:
    """What comes of each operation at a stage."""
    names = [operation.name for operation in operations]
    results: list[Result] = []
    while len(results) < len(names):
        results.extend(_some(pool, column, names[len(results) :]))
    return dict(zip(names, results, strict=True))


def _some(pool: Ranks, column: str, names: list[str]) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="what-may-i-do-") as folder:
        progress = Path(folder, "progress")
        try:
            done = pool.run(2, perform_all, names, column, folder, str(progress), limit=600.0)[0]
        except RankFailedError as error:
            written = [file.read_text().splitlines() for file in Path(folder).glob("progress.*")]
            lines = max(written, key=len, default=[])
            crashed = "the process dies" if "exit code" in str(error) else "the ranks do not come to an end"
            return [Result(**json.loads(line)) for line in lines] + [Result("fails", plain_words(crashed, folder))]
        return [Result(**one) for one in done]


def written(results: dict[str, dict[str, Result]]) -> str:
    """The page of what was found, by column and operation."""
    parts = [HEAD]
    for section in dict.fromkeys(operation.section for operation in OPERATIONS):
        notes: dict[str, int] = {}
        rows = [f"| | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
        for operation in OPERATIONS:
            if operation.section == section:
                cells = [_cell(results[column][operation.name], notes) for column in COLUMNS]
                rows.append(f"| {_title(operation)} | {' | '.join(cells)} |")
        parts.append(f"## {section}\n\n" + "\n".join(rows) + "\n")
        if notes:
            parts.append("\n".join(f"{number}. {_escaped(text)}" for text, number in notes.items()) + "\n")
    return "\n".join(parts)


def read(text: str) -> dict[str, dict[str, Result]]:
    """What a page says, by column and operation: the opposite of `written`."""
    said: dict[str, dict[str, Result]] = {column: {} for column in COLUMNS}
    for section in text.split("\n## ")[1:]:
        notes = dict(re.findall(r"^(\d+)\. (.*)$", section, re.MULTILINE))
        for row in section.splitlines():
            title, *cells = row.removeprefix("| ").removesuffix(" |").rsplit(" | ", len(COLUMNS))
            for column, cell in zip(COLUMNS, cells, strict=False):
                kind, _, number = cell.partition(" ")
                said[column][title.partition("<br>")[0]] = Result(kind, _plain(notes.get(number, "")))
    return said


def _title(operation: Operation) -> str:
    """What is done, and the code for it, one line of a cell for each."""
    code = [*operation.born.splitlines(), *operation.lines]
    return "<br>".join([operation.name, *(f"`{line}`".replace("|", "\\|") for line in code)])


def _cell(result: Result, notes: dict[str, int]) -> str:
    if not result.sentence:
        return result.kind
    return f"{result.kind} {notes.setdefault(result.sentence, len(notes) + 1)}"


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def _plain(text: str) -> str:
    return re.sub(r"\\([*_])", r"\1", text).replace("&lt;", "<")


def failures(results: dict[str, dict[str, Result]]) -> list[str]:
    """What neither works nor says so, and is not known for it."""
    return [
        f"{name} at {column}: {result.sentence}"
        for column, of_column in results.items()
        for name, result in of_column.items()
        if result.kind == "fails" and name not in FAILS_STILL
    ]
