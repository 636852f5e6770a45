"""Elements of a page. What is put into one is escaped, unless it is an element itself."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from hookd.tool.daemon.web.pages.text import text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Child = object
    """Markup as it is, None for nothing; all else is text."""

_EMPTY = ("br", "input", "link", "meta")


class Markup(str):
    """HTML: made of `tag`, or of what is known to be escaped."""

    __slots__ = ()


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """Make an element.

    Args:
        name: of the element.
        children: what is in it.
        attributes: by name, `class_` for `class` and `aria_label` for `aria-label`; None and False leave one out, True
            gives one without a value.
    """
    told = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{told}>" + ("" if name in _EMPTY else f"{join(*children)}</{name}>"))


def join(*children: Child) -> Markup:
    """Put several things one after the other."""
    return Markup("".join(_part(child) for child in children))


def _part(child: Child) -> str:
    return "" if child is None else str(child) if isinstance(child, Markup) else text(child)


def address(*parts: str, at: str = "", **query: object) -> str:
    """Make the address of a page: each part of its path quoted, those of the query that are there, a place in it."""
    asked = urlencode({key: str(value) for key, value in query.items() if value not in (None, "")})
    path = "/".join(quote(part, safe="") for part in parts)
    return f"/{path}" + (f"?{asked}" if asked else "") + (f"#{at}" if at else "")


def link(where: str, *children: Child, **attributes: object) -> Markup:
    """Make a link to another page of ours."""
    return tag("a", *children, href=where, **attributes)


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[Child]]) -> Markup:
    """Make a table of which the first cell of a row names it. A column whose name starts with `>` holds numbers.

    It can be scrolled where it is too wide, by keyboard, too.
    """
    kinds = ["n" if name.startswith(">") else None for name in head]
    names = [tag("th", name.lstrip(">"), scope="col", class_=kind) for name, kind in zip(head, kinds, strict=True)]
    lines = [tag("tr", *_cells(row, kinds)) for row in rows]
    made = tag("table", tag("caption", caption, class_="aside"), tag("thead", tag("tr", *names)), tag("tbody", *lines))
    return tag("div", made, class_="wide", tabindex=0, role="region", aria_label=caption)


def _cells(row: Sequence[Child], kinds: Sequence[str | None]) -> list[Markup]:
    first, *rest = zip(row, kinds, strict=True)
    return [tag("th", first[0], scope="row", class_=first[1]), *(tag("td", cell, class_=kind) for cell, kind in rest)]


def section(name: str, title: str, *children: Child) -> Markup:
    """Make a part of a page that is renewed by itself while somebody looks at it."""
    return tag("section", tag("h2", title, id=f"{name}-title"), *children, id=name, aria_labelledby=f"{name}-title")
