"""The stylesheet and the script: files of this package, served under names that change with their content."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources

STYLE, SCRIPT = "page.css", "page.js"
KINDS = {STYLE: "text/css", SCRIPT: "text/javascript"}


@functools.cache
def content(name: str) -> str:
    """Give the text of STYLE or SCRIPT."""
    return resources.files("hookd.tool.daemon.web.pages").joinpath("static", name).read_text("utf-8")


@functools.cache
def path(name: str) -> str:
    """Give the path under which a browser finds it; it may keep what it gets there for ever."""
    stem, _, kind = name.partition(".")
    return f"/static/{stem}.{hashlib.sha256(content(name).encode()).hexdigest()[:16]}.{kind}"
