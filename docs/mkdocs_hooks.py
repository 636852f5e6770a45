"""Make a site of files that are read on a code host as well: called by mkdocs, see mkdocs.yml.

A relative link in a page may lead anywhere in the repository. Where it leaves docs/, it leads to the same file on the
site: README.md and the other pages below as pages, any other file as a page that shows it, a directory as a list.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"README.md": "index.md", "plugins/README.md": "plugins/README.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Pages outside of docs/, and their places on the site."""
SHOWN = "files"
"""The directory of the site with the files that are not pages."""
LARGEST = 64 << 10
"""A larger file, such as a dashboard, is named and not shown."""
LINK = re.compile(
    r"^```.*?^```|^ {4}[^\n]*|(?<!!)(?P<head>\[(?:[^\]`]|`[^`]*`)*\]\()(?!\w+:|#)(?P<path>[^)#\s]+)(?P<rest>#[^)\s]*)?\)|`[^`\n]+`",
    re.MULTILINE | re.DOTALL,
)
"""Code, which contains no links, or a relative link."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Remove missing pages from the navigation; it must contain every existing page, so no mistake hides."""
    config.nav = list(_present(config.nav or []))
    return config


def _present(entries: list[Any]) -> Iterator[Any]:
    for entry in entries:
        ((title, what),) = entry.items()
        if isinstance(what, list):
            yield {title: list(_present(what))}
        elif what in OUTSIDE.values() or (ROOT / "docs" / what).is_file():
            yield {title: what}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside, and all files of the repository to which a page links."""
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text("utf-8")))
    tracked = _tracked()
    waiting = {path for file in files.documentation_pages() for path in _linked(file) if path not in OUTSIDE}
    done: set[str] = set()
    while waiting:
        done.add(path := waiting.pop())
        inside = (
            []
            if (ROOT / path).is_file()
            else sorted({_child(path, one) for one in tracked if one.startswith(path + "/")})
        )
        waiting |= {one for one in inside if one not in OUTSIDE} - done
        files.append(File.generated(config, f"{SHOWN}/{path}.md", content=_shown(path, inside)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Replace links out of docs/ by links to the page that stands for their target."""
    here, directory = posixpath.dirname(page.file.src_uri), posixpath.dirname(_source(page.file.src_uri))

    def led(match: re.Match[str]) -> str:
        if match["path"] is None:
            return match[0]
        path = posixpath.normpath(posixpath.join(directory, match["path"]))
        return f"{match['head']}{posixpath.relpath(_place(path), here or '.')}{match['rest'] or ''})"

    return LINK.sub(led, markdown)


def _source(place: str) -> str:
    """Return the path in the repository of the file at a place on the site."""
    return next((source for source, one in OUTSIDE.items() if one == place), f"docs/{place}")


def _place(path: str) -> str:
    """Return the place on the site of a path in the repository."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{SHOWN}/{path}.md"


def _linked(file: File) -> Iterator[str]:
    """Yield the existing files outside of docs/ to which a page links."""
    directory = posixpath.dirname(_source(file.src_uri))
    for match in LINK.finditer(file.content_string):
        path = posixpath.normpath(posixpath.join(directory, match["path"] or "docs/"))
        if not path.startswith(("docs", "..")) and (ROOT / path).exists():
            yield path


def _tracked() -> list[str]:
    """Return the files of the repository, without ignored ones."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split("\n")
    return [one for one in found if one] or [
        str(one.relative_to(ROOT)) for one in ROOT.glob("deploy/**/*") if one.is_file()
    ]


def _child(directory: str, path: str) -> str:
    return f"{directory}/{path[len(directory) + 1 :].partition('/')[0]}"


def _shown(path: str, inside: list[str]) -> str:
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if inside:
        here = posixpath.dirname(f"{SHOWN}/{path}")
        return head + "".join(f"- [{Path(one).name}]({posixpath.relpath(_place(one), here)})\n" for one in inside)
    text = (ROOT / path).read_text("utf-8", errors="replace")
    if len(text) > LARGEST:
        return head + f"{len(text) >> 10} KiB, in the repository.\n"
    return f"{head}`````text\n{text}\n`````\n"
