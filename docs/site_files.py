"""A hook of `mkdocs.yml`: files outside docs/ that pages link to, records and sources, become files of the site.

A page links to `../scripts/records/hops_2026-11.md`, as a reader of the repository needs it. The site has that file at
`scripts/records/`, beside its pages, and its links say so.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
PLACES = {"README.md": "repository.md"}
"""Files that lie elsewhere in the site: the README would take the place of its first page."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to, and what that links to in turn."""
    pages = [DOCS / file.src_uri for file in files.documentation_pages()]
    seen = set(pages)
    while pages:
        page = pages.pop()
        for link in LINK.findall(page.read_text()):
            path = linked(page, link)
            if path is None or path in seen:
                continue
            seen.add(path)
            if DOCS not in path.parents:
                files.append(File.generated(config, place(path), abs_src_path=str(path)))
            if path.suffix == ".md":
                pages.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write the links of a page as they are in the site."""
    here = {place(path): path for path in (ROOT / name for name in PLACES)}.get(page.file.src_uri)
    if here is None:
        here = next(path for path in (DOCS / page.file.src_uri, ROOT / page.file.src_uri) if path.is_file())

    def in_site(match: re.Match) -> str:
        path = linked(here, match[1])
        return match[1] if path is None else os.path.relpath(place(path), Path(page.file.src_uri).parent)

    return LINK.sub(in_site, markdown)


def linked(page: Path, link: str) -> Path | None:
    """The file of the repository that a link names; of a folder its README. None where there is no such file."""
    path = Path(os.path.normpath(page.parent / link))
    if path.is_dir():
        path = path / "README.md"
    return path if path.is_file() and ROOT in path.parents else None


def place(path: Path) -> str:
    """Where the site has a file of the repository."""
    inside = path.relative_to(ROOT).as_posix()
    return PLACES.get(inside, inside.removeprefix("docs/"))
