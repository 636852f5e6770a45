"""Names of modules, as `hookd/target/modeltree/names.py` makes them: `(root)`, `layers.0.fc`, and `#2.layers.0.fc` below a second root."""

from __future__ import annotations

ROOT = "(root)"


def split(name: str) -> tuple[str, str]:
    """Return the prefix of a name's root, "" or "#2.", and the rest; the two joined are the name."""
    if not name.startswith("#"):
        return "", name
    head, dot, path = name.partition(".")
    return head + dot, path


def is_root(name: str) -> bool:
    """Whether this is the name of a root, or of nothing."""
    return split(name)[1] in (ROOT, "")


def depth(name: str) -> int:
    """Return how far below its root a module is: 0 for `(root)` and `#2.(root)`, 1 for `fc`, 2 for `blocks.0`."""
    path = split(name)[1]
    return 0 if path in (ROOT, "") else path.count(".") + 1


def above(name: str) -> list[str]:
    """Return the names of the modules that a module is in, its parent first and the root last; none for a root."""
    prefix, path = split(name)
    if path in (ROOT, ""):
        return []
    parts = path.split(".")[:-1]
    return [prefix + ".".join(parts[:count]) for count in range(len(parts), 0, -1)] + [prefix + ROOT]
