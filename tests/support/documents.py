"""The documents of the repository: their pages, links and headings as a code host shows them, and the generated ones."""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING

from tests.support.environment import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")


def pages() -> list[Path]:
    """Return every document that a person reads."""
    found = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", REPOSITORY / "plugins" / "README.md"]
    return found + [path for top in ("docs", "deploy", "examples") for path in sorted((REPOSITORY / top).rglob("*.md"))]


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield the targets of a page's relative links: a path, and an anchor or ""."""
    text = _CODE.sub("`", _FENCED.sub("", page.read_text("utf-8")))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"\w+:", target):
            path, _, anchor = target.partition("#")
            yield (page.parent / path if path else page).resolve(), anchor


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings: lower case, words joined by hyphens, no punctuation, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text("utf-8")), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in plain}


def generator() -> ModuleType:
    """Return docs/generate.py, which is a script."""
    spec = importlib.util.spec_from_file_location("docs_generate", REPOSITORY / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
