"""Hooks of mkdocs for the documentation site: pages from outside docs/, links, generated tables, and the playground.

README.md is the site's first page; CONTRIBUTING.md and CHANGELOG.md are pages, too. The links in these pages, and the
links to these pages, are written for the repository; this module changes these links for the site. Links to source
files become plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from tools.reference_tables import with_tables

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Path of a page in the root of the repository -> path of the page on the site."""
PLAYGROUND = ROOT / "build" / "playground"
"""Folder of the playground; `make docs` builds the playground only if Python for the browser has been downloaded."""
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from the root of the repository, and the files of the playground, to the site."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=site_text((ROOT / source).read_text(), "")))
    for path in PLAYGROUND.rglob("*") if PLAYGROUND.is_dir() else ():
        if path.is_file():
            uri = f"playground/{path.relative_to(PLAYGROUND).as_posix()}"
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Change the links of a page, add its generated tables, and add the playground to its page if it has been built."""
    if page.file.src_uri in PAGES.values():
        return markdown
    address = config["extra"]["playground"]
    if page.file.src_uri == "playground.md" and (PLAYGROUND.is_dir() or "://" in address):
        markdown += f'\n<a href="{address}">In a window of its own</a>\n'
        markdown += f'\n<iframe class="playground" src="{address}" title="The playground"></iframe>\n'
    return site_text(with_tables(markdown), "../")


def site_text(markdown: str, root: str) -> str:
    """Return a page with links for the site; `root` is the relative path from the page to the repository's root."""
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
    """Return the text with links to `docs/` changed for pages inside `docs/`."""
    return text.replace(f"]({root}docs/", "](")
