"""HTML elements. Children are escaped unless they are elements themselves."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from hookd.wire.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Child = object
    """Markup is inserted as it is, None is left out, everything else is escaped as text."""

MAX_TEXT = 4000
_EMPTY = ("br", "input", "link", "meta")
_KINDS = {">": "n", ":": "name"}
"""Classes of a column's cells, by the first character of its heading."""


class Markup(str):
    """Escaped HTML, made by `tag` or from strings that are known to be escaped."""

    __slots__ = ()


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """Return an element.

    Args:
        name: tag name.
        children: content.
        attributes: attributes by name, `class_` for `class` and `aria_label` for `aria-label`; None and False omit one,
            True sets one without a value. Markup is inserted as it is: `text` truncates long strings.
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_part(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{written}>" + ("" if name in _EMPTY else f"{join(*children)}</{name}>"))


def join(*children: Child) -> Markup:
    """Concatenate children."""
    return Markup("".join(_part(child) for child in children))


def text(value: object) -> str:
    """Return any value as HTML text: escaped, truncated, without characters that reorder or hide others."""
    whole = str(value)
    return escape(printable(whole[:MAX_TEXT], keep="\n") + ("…" if len(whole) > MAX_TEXT else ""))


def _part(child: Child) -> str:
    return "" if child is None else str(child) if isinstance(child, Markup) else text(child)


def address(*parts: str, at: str = "", **query: object) -> str:
    """Return the URL of a page: quoted path parts, query parameters that are not None or empty, and fragment `at`."""
    asked = urlencode({key: str(value) for key, value in query.items() if value not in (None, "")})
    path = "/".join(quote(part, safe="") for part in parts)
    return f"/{path}" + (f"?{asked}" if asked else "") + (f"#{at}" if at else "")


def link(where: str, *children: Child, **attributes: object) -> Markup:
    """Return a link to another page of hookd."""
    return tag("a", *children, href=where, **attributes)


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[Child]], *, stacks: bool = False) -> Markup:
    """Return a table whose first column holds the row headers. A column whose name starts with `>` holds numbers, with `:` names.

    A table that is too wide can be scrolled, also by keyboard. With `stacks`, on a narrow screen each row becomes a line of cells,
    with the third one, a sentence, below them.
    """
    kinds = [_KINDS.get(name[:1]) for name in head]
    names = [
        tag("th", name.lstrip(">:"), scope="col", class_=kind if kind == "n" else None)
        for name, kind in zip(head, kinds, strict=True)
    ]
    lines = [tag("tr", *_cells(row, kinds)) for row in rows]
    made = tag(
        "table",
        tag("caption", caption, class_="visually-hidden"),
        tag("thead", tag("tr", *names)),
        tag("tbody", *lines),
    )
    return tag("div", made, class_="wide stacks" if stacks else "wide", tabindex=0, role="group", aria_label=caption)


def _cells(row: Sequence[Child], kinds: Sequence[str | None]) -> list[Markup]:
    first, *rest = zip(row, kinds, strict=True)
    return [tag("th", first[0], scope="row", class_=first[1]), *(tag("td", cell, class_=kind) for cell, kind in rest)]


def section(name: str, title: str, *children: Child) -> Markup:
    """Return a section, which is refreshed separately while the page is visible."""
    return tag("section", tag("h2", title, id=f"{name}-title"), *children, id=name, aria_labelledby=f"{name}-title")
