"""Core classes stay small, and the scheduler and the optimizer do not know where state is stored."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest

import shardwell

HOME = Path(shardwell.__file__).parent
CORE = ("memory", "parallel", "sharding", "optim", "runtime", "engine")
MOST = 15  # attributes of an instance
MOST_COLLABORATORS = 8  # classes of other modules of which an instance holds objects
LONGEST_FUNCTION, MOST_ARGUMENTS = 60, 8  # lines of a body; arguments of a constructor
# constructors with the arguments of another library's class, or of an optimizer
FOREIGN_ARGUMENTS = {"OneCycle", "Muon", "PipelineModule", "TiledLinear"}
LONGEST_FILE, LONGEST_SEAM = 500, 300  # lines; the seams are the files of the forms and of the executors
SEAMS = (
    *("sharding/storage_form.py", "sharding/storage.py", "sharding/assembled_storage.py", "offload/storage.py"),
    *("optim/executor.py", "offload/host_executor.py"),
)
# the scheduler and the optimizer, and the files that do their work at stages 0 to 3
WITHOUT_TIERS = ("runtime/scheduler.py", "runtime/reducer.py", "optim/optimizer.py", "optim/executor.py")
# words that a sentence about what a function does does not begin with
NO_VERBS = {
    *("A", "An", "At", "By", "For", "From", "How", "In", "It", "Its", "Of", "On", "One", "The", "There", "This", "To"),
    *("What", "When", "Where", "Whether", "Which", "Who", "With", "Without"),
}
# words that no sentence about a class begins with, either
NO_SUBJECTS = NO_VERBS - {"A", "An", "One", "The", "This"}
TIER = re.compile(r"tier|offload|disk|nvme|swap|host", re.IGNORECASE)


@cache
def modules() -> dict[str, ast.Module]:
    """Return all modules of the package, parsed, by their dotted names."""
    found = {}
    for path in sorted(HOME.rglob("*.py")):
        name = ".".join(("shardwell", *path.relative_to(HOME).with_suffix("").parts)).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text())
    return found


@cache
def homes() -> dict[str, set[str]]:
    """Return the modules that define each class of the package."""
    found: dict[str, set[str]] = {}
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).add(name)
    return found


def core_classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for name, tree in modules().items():
        if name.removeprefix("shardwell.").split(".")[0] in CORE:
            yield from ((name, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def assigned(one: ast.ClassDef) -> Iterator[tuple[str, list[ast.expr]]]:
    """Yield the attributes of a class: annotated names, and what methods assign to `self`, with what tells the type."""
    for node in one.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, [node.annotation]
    for method in (node for node in one.body if isinstance(node, ast.FunctionDef)):
        parameters = {arg.arg: arg.annotation for arg in (*method.args.args, *method.args.kwonlyargs) if arg.annotation}
        for node in ast.walk(method):
            for target, value in pairs(node):
                is_own = isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
                if is_own and isinstance(target.value, ast.Name) and target.value.id == "self":
                    hints = [node.annotation] if isinstance(node, ast.AnnAssign) else []
                    if isinstance(value, ast.Name) and value.id in parameters:
                        hints.append(parameters[value.id])
                    elif isinstance(value, ast.Call):
                        hints.append(value.func)
                    yield target.attr, hints


def pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield the targets of an assignment, each with its value, where one belongs to it."""
    if isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        yield node.target, node.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple):
                values = node.value.elts if isinstance(node.value, ast.Tuple) else []
                yield from zip_longest(target.elts, values)
            else:
                yield target, node.value


def attributes(one: ast.ClassDef) -> set[str]:
    return {name for name, _ in assigned(one)}


def collaborators(module: str, one: ast.ClassDef) -> set[str]:
    """Return the classes of other modules whose objects a class has as attributes. Values and functions are none."""
    names: set[str] = set()
    for _, hints in assigned(one):
        for hint in hints:
            if not (isinstance(hint, ast.Subscript) and "Callable" in ast.unparse(hint.value)):
                names.update(re.findall(r"\w+", ast.unparse(hint)))
    found = {name for name in names if name in homes() and module not in homes()[name]}
    return found - values()


@cache
def values() -> frozenset[str]:
    """Return the classes whose objects are values: enums, frozen dataclasses, blocks of the configuration."""
    found = set()
    for node in (node for tree in modules().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        bases, marks = " ".join(map(ast.unparse, node.bases)), " ".join(map(ast.unparse, node.decorator_list))
        if re.search(r"Enum|NamedTuple|ConfigBlock", bases) or "frozen=True" in marks:
            found.add(node.name)
    return frozenset(found)


@pytest.mark.slow
def test_core_classes_have_few_attributes() -> None:
    numbers = {one.name: len(attributes(one)) for _, one in core_classes()}
    too_many = {name: number for name, number in numbers.items() if number > MOST}
    assert not too_many, too_many


@pytest.mark.slow
def test_core_classes_have_few_collaborators() -> None:
    found = {one.name: sorted(collaborators(module, one)) for module, one in core_classes()}
    assert found["Scheduler"], "the check finds none"
    too_many = {name: names for name, names in found.items() if len(names) > MOST_COLLABORATORS}
    assert not too_many, too_many


def test_no_file_is_long() -> None:
    lengths = {str(path.relative_to(HOME)): len(path.read_text().splitlines()) for path in HOME.rglob("*.py")}
    too_long = {name: n for name, n in lengths.items() if n > (LONGEST_SEAM if name in SEAMS else LONGEST_FILE)}
    assert set(SEAMS) <= set(lengths)
    assert not too_long, too_long


def test_no_function_is_long() -> None:
    """Its signature and its docstring do not count: commands have an option in each line there."""
    found = {}
    for module, tree in modules().items():
        for node in (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            body = node.body[ast.get_docstring(node) is not None :]
            found[f"{module}.{node.name}"] = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
    assert max(found.values()) > LONGEST_FUNCTION / 2, "the check finds none"
    assert {name: lines for name, lines in found.items() if lines > LONGEST_FUNCTION} == {}


def test_constructors_have_few_arguments() -> None:
    found = {}
    for module, tree in modules().items():
        if ".compat." in module:
            continue  # DeepSpeed's signatures
        for one in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for method in (node for node in one.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"):
                found[one.name] = len(method.args.args) + len(method.args.kwonlyargs) - 1
    assert {name for name, number in found.items() if number > MOST_ARGUMENTS} == FOREIGN_ARGUMENTS


def test_the_scheduler_and_the_optimizer_have_no_fork_on_a_tier() -> None:
    for file in WITHOUT_TIERS:
        nodes = [node for node in ast.walk(ast.parse((HOME / file).read_text())) if isinstance(node, ast.Compare)]
        with_none = [ast.unparse(node) for node in nodes if "None" in map(ast.unparse, node.comparators)]
        assert with_none, f"{file}: the check finds none"
        assert not [text for text in with_none if TIER.search(text)], file


def test_no_two_public_classes_have_one_name() -> None:
    """Those of `compat/` have the names of another library, which the package may use, too."""
    found = {name: {home for home in places if ".compat." not in home} for name, places in homes().items()}
    twice = {name: sorted(places) for name, places in found.items() if len(places) > 1 and not name.startswith("_")}
    assert twice == {}


def test_docstrings_stand_alone() -> None:
    """Those of functions say what the function does, those of classes what an object is: neither needs the name."""
    found: dict[str, str] = {}
    for module, tree in modules().items():
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None
            is_class = isinstance(node, ast.ClassDef)
            if text is None:
                if is_class and not node.name.startswith("_"):
                    found[f"{module}.{node.name}"] = "none"
                continue
            first = re.split(r"\W", text, maxsplit=1)[0]
            is_property = any("property" in ast.unparse(mark) for mark in getattr(node, "decorator_list", ()))
            if not is_property and (first in (NO_SUBJECTS if is_class else NO_VERBS) or first[:1].islower()):
                found[f"{module}.{node.name}"] = text.splitlines()[0]
    assert found == {}
