"""The module tree as a heat map, a part of it at a time for large models."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl

from hookd.tool.daemon.web.pages.curves import profile
from hookd.tool.daemon.web.pages.heat import CHARTED, VIEWS
from hookd.tool.daemon.web.pages.html import join, link, section, tag
from hookd.tool.reports.wording import count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hookd.tool.daemon.web.pages.heat import ColourScale, Column
    from hookd.tool.daemon.web.pages.html import Markup
    from hookd.tool.daemon.web.pages.tree import Node, Tree

PAGE = 100
"""Maximum children of one module, or search results, shown at a time."""
MOST = 300
"""Maximum modules shown at a time in total."""
OPEN = 2
"""Number of levels that are open initially."""


class MapChoice(NamedTuple):
    """The reader's choices, from the URL.

    Attributes:
        view: a key of VIEWS.
        module: the module at which the tree begins; empty for the roots.
        search: substring of names or types to search; empty for the tree.
        page: page of that module's children, or of the search results; from 1.
    """

    view: str = "time"
    module: str = ""
    search: str = ""
    page: int = 1


class HeatMap:
    """A heat map of one target.

    Args:
        where: returns the URL of this page with other choices.
    """

    def __init__(self, tree: Tree, asked: MapChoice, where: Callable[..., str]) -> None:
        self._tree, self._asked, self._where = tree, asked, where
        self._columns: Sequence[Column] = VIEWS[asked.view].columns(tree)
        self._colour_scales: list[ColourScale] = [column.colour_scale() for column in self._columns]

    def markup(self) -> Markup:
        """Return the section of the page."""
        view = VIEWS[self._asked.view]
        return section(
            "modules",
            "Modules",
            self._views(),
            tag("p", view.about, class_="soft"),
            profile(self._columns[CHARTED[self._asked.view]], self._tree),
            self._found() if self._asked.search else self._below(),
        )

    def search(self) -> Markup:
        """Return the search form; it is outside the refreshed sections, so that typing is not interrupted."""
        box = tag(
            "input", type="search", name="q", value=self._asked.search, id="q", autocomplete="off", spellcheck="false"
        )
        kept = [tag("input", type="hidden", name=key, value=value) for key, value in self._kept()]
        return tag(
            "form", tag("label", "Find modules by name or type", for_="q"), box, *kept, tag("button", "Find"),
            method="get", role="search", action="#modules",
        )  # fmt: skip

    def _kept(self) -> list[tuple[str, str]]:
        """Return the query parameters that a search preserves."""
        query = self._where(view=self._asked.view, m=None, q=None, p=None, at="").partition("?")[2]
        return [(key, value) for key, value in parse_qsl(query) if key != "q"]

    def _views(self) -> Markup:
        links = [
            link(
                self._where(view=key, at="modules"),
                view.title,
                aria_current="true" if key == self._asked.view else None,
            )
            for key, view in VIEWS.items()
        ]
        return tag("nav", *links, class_="tabs", aria_label="Columns of the map")

    def _below(self) -> Markup:
        """Return the tree below the chosen module."""
        node = self._tree.nodes.get(self._asked.module)
        if node is None and self._asked.module:
            again = link(self._where(m=None, p=None, at="modules"), "Show all modules")
            return tag("p", "This target has no such module any more. ", again, class_="bad")
        tops = self._tree.roots if node is None else node.children
        if not tops:
            return tag(
                "p", "No module has been observed yet." if node is None else "It contains no modules.", class_="soft"
            )
        shown = self._of_page(tops)
        expanded = self._expanded(shown)
        rows = [self._branch(child, expanded, depth=0) for child in shown]
        return join(self._crumbs(node), self._head(), tag("div", *rows, class_="tree"), self._pages(len(tops)))

    def _found(self) -> Markup:
        """Return the search results, without the tree around them."""
        word = self._asked.search.casefold()
        nodes = [
            node for node in self._tree.nodes.values() if word in node.name.casefold() or word in node.type.casefold()
        ]
        again = link(self._where(q=None, p=None, at="modules"), "Show the tree")
        said = tag("p", f"{count(len(nodes), 'module')} found. ", again, role="status")
        rows = [tag("div", *self._cells(node, node.name), class_="leaf") for node in self._of_page(nodes)]
        return join(said, self._head() if rows else None, tag("div", *rows, class_="tree"), self._pages(len(nodes)))

    def _of_page(self, nodes: Sequence[Node]) -> Sequence[Node]:
        first = (min(self._asked.page, _last_page(len(nodes))) - 1) * PAGE
        return nodes[first : first + PAGE]

    def _expanded(self, shown: Sequence[Node]) -> set[str]:
        """Choose the modules to expand, level by level, until MOST modules are shown."""
        chosen, level, room = set(), list(shown), MOST - len(shown)
        while level:
            below: list[Node] = []
            for node in level:
                if 0 < len(node.children) <= min(room, PAGE):
                    chosen.add(node.name)
                    room -= len(node.children)
                    below += node.children
            level = below
        return chosen

    def _branch(self, node: Node, expanded: set[str], depth: int) -> Markup:
        if not node.children:
            return tag("div", *self._cells(node, node.label), class_="leaf")
        if node.name not in expanded:
            inside = link(self._where(m=node.name, p=None, at="modules"), node.label)
            return tag("div", *self._cells(node, inside, f"{len(node.children)} inside"), class_="leaf")
        inner = [self._branch(child, expanded, depth + 1) for child in node.children]
        summary = tag("summary", *self._cells(node, node.label))
        return tag("details", summary, tag("div", *inner), id=f"m{node.place}", open=depth < OPEN)

    def _cells(self, node: Node, label: object, more: str = "") -> list[Markup]:
        found = self._tree.findings.get(node.name)
        name = tag(
            "span",
            tag("b", label),
            tag("small", more or node.type) if more or node.type else None,
            tag("small", found, class_="bad") if found else None,
            class_="name",
            title=node.name,
        )
        return [name, *(self._cell(node, n) for n in range(len(self._columns)))]

    def _cell(self, node: Node, n: int) -> Markup:
        column = self._columns[n]
        value = column.values.get(node.name)
        if value is None:
            return tag("span", class_="cell")
        return tag("span", column.write(value), class_=f"cell {self._colour_scales[n].of(value)}", title=column.name)

    def _head(self) -> Markup:
        names = (tag("span", column.name, class_="cell") for column in self._columns)
        return tag("div", tag("span", "module", class_="name"), *names, class_="leaf head", aria_hidden="true")

    def _crumbs(self, node: Node | None) -> Markup | None:
        if node is None:
            return None
        above = [
            link(self._where(m=parent.name, p=None, at="modules"), parent.label) for parent in self._tree.path(node)
        ]
        every = link(self._where(m=None, p=None, at="modules"), "all")
        parts = [part for crumb in (every, *above) for part in (crumb, " / ")]
        return tag("nav", *parts, tag("b", node.label), class_="crumbs", aria_label="Position in the model")

    def _pages(self, total: int) -> Markup | None:
        """Return links to the previous and the next page, if there is more than one."""
        last = _last_page(total)
        if last == 1:
            return None
        page = min(self._asked.page, last)
        parts: list[object] = [f"{(page - 1) * PAGE + 1} to {min(page * PAGE, total)} of {total}"]
        if page > 1:
            parts += [" · ", link(self._where(p=page - 1, at="modules"), "previous", rel="prev")]
        if page < last:
            parts += [" · ", link(self._where(p=page + 1, at="modules"), "next", rel="next")]
        return tag("nav", *parts, class_="pages", aria_label="More modules")


def _last_page(total: int) -> int:
    return max(1, -(-total // PAGE))
