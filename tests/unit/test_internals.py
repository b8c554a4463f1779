"""The pages for engineers name files, classes and members that exist, and every source file has its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "shardwell"
INTERNALS = ROOT / "docs" / "internals"
PAGES = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted(INTERNALS.glob("*.md"))]

FILES = [path for folder in (SOURCES, ROOT / "tests") for path in folder.rglob("*.py")]
WORDS = {word for path in FILES for word in re.findall(r"\w+", path.read_text())}


def spans(page: Path) -> list[str]:
    """Return what stands in single backticks on a page."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))


def exists(name: str) -> bool:
    """Tell whether a path exists from the root, or from any folder of the sources or of the tests."""
    return (ROOT / name).is_file() or any(f"/{path.as_posix()}".endswith(f"/{name}") for path in FILES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = {name for span in spans(page) for name in re.findall(r"[\w./-]+\.py\b", span)}
    assert sorted(name for name in named if not exists(name)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_folder_that_a_page_names_exists(page: Path) -> None:
    folder = r"[\w.]+/(?:[\w.]+/)*|(?:tests|docs|src|native)/\w+"
    named = {span for span in spans(page) if re.fullmatch(folder, span)}
    assert sorted(name for name in named if not any((home / name).is_dir() for home in (ROOT, SOURCES))) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_class_that_a_page_names_exists_with_its_members(page: Path) -> None:
    dotted = {name for span in spans(page) for name in re.findall(r"\b[A-Z]\w*[a-z]\w*(?:\.\w+)*", span)}
    named = {word for name in dotted if not name.endswith(".md") for word in name.split(".")}
    assert sorted(named - WORDS) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_architecture_is_one_sitting() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().split()) <= 3000  # more is reference, and has its own pages


def test_the_project_has_few_words_of_its_own() -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text().partition("## The words")[2].partition("\n## ")[0]
    words = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")][1:]
    assert "unit" in words
    assert len(words) <= 15  # all others are PyTorch's, NCCL's, FSDP2's, Megatron's or DeepSpeed's


def test_every_source_file_has_its_line() -> None:
    named = set(spans(INTERNALS / "files.md"))
    assert sorted(name for path in SOURCES.rglob("*.py") if (name := str(path.relative_to(SOURCES))) not in named) == []
