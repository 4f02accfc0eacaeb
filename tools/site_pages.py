"""Hooks of mkdocs for the documentation site: pages from outside of docs/, links, generated tables, the playground.

README.md is the site's first page; CONTRIBUTING.md and CHANGELOG.md are pages, too. Their links and those to them are
written for the repository, and are changed here to what they are on the site. Links to source files become plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from tools.reference_tables import with_tables

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Pages of the site that lie in the repository's root, by their name there."""
PLAYGROUND = ROOT / "build" / "playground"
"""Where `make docs` puts the playground if Python for the browser has been fetched."""
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the repository's root, and the playground's files."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=site_text((ROOT / source).read_text(), "")))
    for path in PLAYGROUND.rglob("*") if PLAYGROUND.is_dir() else ():
        if path.is_file():
            uri = f"playground/{path.relative_to(PLAYGROUND).as_posix()}"
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Change the links of a page, and add its generated tables; show the playground where it has been built."""
    if page.file.src_uri in PAGES.values():
        return markdown
    address = config["extra"]["playground"]
    if page.file.src_uri == "playground.md" and (PLAYGROUND.is_dir() or "://" in address):
        markdown += f'\n<a href="{address}">In a window of its own</a>\n'
        markdown += f'\n<iframe class="playground" src="{address}" title="The playground"></iframe>\n'
    return site_text(with_tables(markdown), "../")


def site_text(markdown: str, root: str) -> str:
    """The text of a page with the site's links; `root` is the way from the page to the repository's root."""
    outside_of_code = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if part.startswith("```") else _without_docs(_LINK.sub(lambda match: _link(match, root), part), root)
        for part in outside_of_code
    )


def _link(match: re.Match[str], root: str) -> str:
    words, target = match.groups()
    path, _, anchor = target.partition("#")
    if not path.startswith(root) or path.startswith(("http:", "https:")) or not path:
        return match[0]
    inside = path.removeprefix(root)
    if inside in PAGES:
        return f"[{words}]({PAGES[inside]}{'#' + anchor if anchor else ''})"
    return match[0] if inside.startswith("docs/") or (not root and not (ROOT / inside).exists()) else words


def _without_docs(text: str, root: str) -> str:
    """The text with links to `docs/` as seen from within it."""
    return text.replace(f"]({root}docs/", "](")
