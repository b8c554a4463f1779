"""Hooks of the site: pages of the repository's root become pages, and files that pages link to come along.

The pages are written for readers of the repository, with relative links between files. A link that leaves `docs/` leads
to a page of the site if the file is one of ROOT_PAGES, and else to a copy of the file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
COPIES = "repository"  # folder of the site for other files
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"^```.*?^```|(?<!`)`(?:(?!\n\n)[^`])+`(?!`)", re.MULTILINE | re.DOTALL)  # a paragraph at most
BACK = {page: name for name, page in ROOT_PAGES.items()}


def on_config(config: Any) -> Any:
    """Name headings as GitHub does, since the links of the pages use those names."""
    config.mdx_configs["toc"] = {**config.mdx_configs.get("toc", {}), "slugify": slug}
    return config


def slug(text: str, separator: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", separator)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages of the root, and the files that any page links to."""
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    copied: set[str] = set()
    for file in [one for one in files if one.src_uri.endswith(".md")]:
        source = Path(str(file.abs_src_path))
        for _, target, _ in LINK.findall(CODE.sub("", source.read_text(encoding="utf-8"))):
            path = _in_repository(source.parent, target)
            if path is not None and path not in ROOT_PAGES and not path.startswith("docs/") and path not in copied:
                copied.add(path)
                files.append(File.generated(config, f"{COPIES}/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Point the links of a page to where their files are on the site."""
    source = ROOT / BACK.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    here = os.path.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        path = _in_repository(source.parent, match[2])
        if path is None:
            return match[0]
        place = ROOT_PAGES.get(path) or (path[5:] if path.startswith("docs/") else f"{COPIES}/{path}")
        return f"{match[1]}{os.path.relpath(place, here or '.')}{match[3]}"

    pieces, last = [], 0
    for code in CODE.finditer(markdown):
        pieces += [LINK.sub(moved, markdown[last : code.start()]), code[0]]
        last = code.end()
    return "".join([*pieces, LINK.sub(moved, markdown[last:])])


def _in_repository(folder: Path, target: str) -> str | None:
    """Return the path of a link's file from the root of the repository; None for other addresses."""
    if re.match(r"[a-z][a-z0-9+.-]*:|//", target, re.IGNORECASE):
        return None
    found = (folder / target).resolve()
    return str(found.relative_to(ROOT)) if found.is_file() and found.is_relative_to(ROOT) else None
