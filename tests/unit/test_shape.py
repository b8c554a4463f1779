"""Core classes stay small, and the scheduler and the optimizer do not know where state is stored."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import shardwell

HOME = Path(shardwell.__file__).parent
CORE = ("memory", "parallel", "sharding", "optim", "runtime", "engine")
MOST = 15  # attributes of an instance
TIER = re.compile(r"tier|offload|disk|nvme|swap|host", re.IGNORECASE)


def core_classes() -> Iterator[ast.ClassDef]:
    for package in CORE:
        for path in sorted((HOME / package).glob("*.py")):
            yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


def attributes(one: ast.ClassDef) -> set[str]:
    """The annotated names of a class, and what its methods assign to `self`."""
    found = {n.target.id for n in one.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for method in (node for node in one.body if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(method):
            is_assigned = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_assigned and isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
    return found


def test_core_classes_have_few_attributes() -> None:
    numbers = {one.name: len(attributes(one)) for one in core_classes()}
    too_many = {name: number for name, number in numbers.items() if number > MOST}
    assert not too_many, too_many


def test_the_scheduler_and_the_optimizer_have_no_fork_on_a_tier() -> None:
    for file in ("runtime/scheduler.py", "optim/optimizer.py"):
        lines = (HOME / file).read_text().splitlines()
        assert not [line for line in lines if re.search(r"is (not )?None", line) and TIER.search(line)], file
