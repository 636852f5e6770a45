"""The stylesheet and the script: package files, served under names that contain a hash of their content."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources

STYLE, SCRIPT = "page.css", "page.js"
KINDS = {STYLE: "text/css", SCRIPT: "text/javascript"}


@functools.cache
def content(name: str) -> str:
    """Return the text of STYLE or SCRIPT."""
    return resources.files("hookd.tool.daemon.web.pages").joinpath("static", name).read_text("utf-8")


@functools.cache
def path(name: str) -> str:
    """Return the URL path of STYLE or SCRIPT; a browser may cache it forever."""
    stem, _, kind = name.partition(".")
    return f"/static/{stem}.{hashlib.sha256(content(name).encode()).hexdigest()[:16]}.{kind}"
