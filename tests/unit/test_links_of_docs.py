"""The links between the pages resolve, and the front page stays short and true."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

import shardwell
from tests.support.command import ROOT

FRONT = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = sorted([*(ROOT / name for name in FRONT), *(ROOT / "docs").rglob("*.md")])
MOST_BYTES = 9_000  # of README.md: a front page, not a manual

FENCE = re.compile(r"^ {0,3}(```+|~~~+).*?^ {0,3}\1[`~]*[ \t]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(
    r"(?<!`)(`+)(?!`)((?:(?!\n\s*\n|\n\s*(?:\||[-*] |\d+\. )).)+?)(?<!`)\1(?!`)", re.DOTALL
)  # in one block
INLINE = re.compile(r"\]\(\s*<?([^()\s<>]*(?:\([^()\s]*\)[^()\s<>]*)*)>?(?:\s+[\"'][^)]*)?\)")
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?([^\s>]+)", re.MULTILINE)
HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(.+?)(?:[ \t]+#+)?[ \t]*$", re.MULTILINE)
OWN_ANCHOR = re.compile(r"<a\s+(?:id|name)=[\"']([^\"']+)[\"']")


def prose(text: str) -> str:
    """Return a page without its code, in which brackets are no links."""
    return CODE.sub("", FENCE.sub("", text))


def links(text: str) -> list[str]:
    """Return the relative targets of all links and pictures of a page."""
    found = INLINE.findall(prose(text)) + REFERENCE.findall(prose(text))
    return [target for target in found if not re.match(r"[a-z][a-z0-9+.-]*:|//", target, re.IGNORECASE)]


def anchors(text: str) -> set[str]:
    """Return the names that the headings of a page have on GitHub."""
    text = FENCE.sub("", text)
    names: set[str] = set(OWN_ANCHOR.findall(text))
    for heading in HEADING.findall(text):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = first = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        repeats = 0
        while name in names:
            repeats += 1
            name = f"{first}-{repeats}"
        names.add(name)
    return names


@cache
def anchors_of(page: Path) -> frozenset[str]:
    return frozenset(anchors(page.read_text()))


def trouble(page: Path, target: str) -> str | None:
    """Return why a link leads nowhere, or None if it resolves."""
    path, _, anchor = unquote(target).partition("#")
    found = (page.parent / path).resolve() if path else page
    if not found.is_relative_to(ROOT):
        return "leaves the repository"
    if not found.exists():
        return "no such file"
    if anchor and found.suffix == ".md" and anchor not in anchors_of(found):
        return f"{found.relative_to(ROOT)} has no heading for it"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_resolves(page: Path) -> None:
    broken = {target: why for target in links(page.read_text()) if (why := trouble(page, target))}
    assert not broken


def test_links_that_lead_nowhere_are_found() -> None:
    page = ROOT / "README.md"
    text = """[a](docs/no-such-page.md) ![b](docs/images/none.png) [c](#nothing "title") `[d](e)`
```
[f](g)
```
| a stray ` in a table |
| `[j](k)` |
[h]: i.md
"""
    assert links(text) == ["docs/no-such-page.md", "docs/images/none.png", "#nothing", "i.md"]
    assert all(trouble(page, target) for target in links(text))
    assert trouble(page, "../outside.md") == "leaves the repository"


def test_headings_are_named_as_on_github() -> None:
    text = '# `a_b`, and C++\n## Same\n## Same\n```\n# code\n```\n### "auto" (x)\n'
    assert anchors(text) == {"a_b-and-c", "same", "same-1", "auto-x"}


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= MOST_BYTES


def test_the_readme_has_the_commands_that_ci_runs() -> None:
    """`.ci/run` installs and checks as the test command of README does, in a new virtual environment."""
    readme = (ROOT / "README.md").read_text()
    install, _, check = "pip install -c constraints.txt -e '.[test]' && .ci/check".partition(" && ")
    assert f"\n{install} && {check}\n" in readme
    assert "\npip install -c constraints.txt '.[demo]' && shardwell demo\n" in readme
    lines = (ROOT / ".ci" / "run").read_text().replace(" --quiet", "").splitlines()
    assert lines[-2:] == [install, check]


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {shardwell.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_package_is_typed() -> None:
    assert (Path(shardwell.__file__).parent / "py.typed").is_file()
