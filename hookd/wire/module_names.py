"""Names of modules: `(root)`, `layers.0.fc`, and `#Critic.layers.0.fc` below another root, see `hookd/target/modeltree/names.py`."""

from __future__ import annotations

ROOT = "(root)"


def split(name: str) -> tuple[str, str]:
    """Split a name into the prefix of its root, "" or "#Critic.", and the rest."""
    if not name.startswith("#"):
        return "", name
    head, dot, path = name.partition(".")
    return head + dot, path


def is_root(name: str) -> bool:
    """Whether this is the name of a root, or empty."""
    return split(name)[1] in (ROOT, "")


def depth(name: str) -> int:
    """Return how far below its root a module is: 0 for `(root)` and `#Critic.(root)`, 1 for `fc`, 2 for `blocks.0`."""
    path = split(name)[1]
    return 0 if path in (ROOT, "") else path.count(".") + 1


def is_bare(name: str) -> bool:
    """Whether a name has only the indices of containers, as in a model that is an `nn.Sequential`: `3`, `0.2`."""
    return all(part.isdigit() for part in split(name)[1].split("."))


def described(name: str, kind: str) -> str:
    """Return a name as people read it: with the name of its class if indices are all there is, as in `3 (Linear)`."""
    return f"{name} ({kind})" if kind and is_bare(name) else name


def name_within(module: str, path: str) -> str:
    """Return the name of what is found at a path inside a module, as in `named_modules()`; "" is the module itself."""
    prefix, inside = split(module)
    return module if not path else prefix + path if inside in (ROOT, "") else f"{module}.{path}"


def owner_of(parameter: str) -> tuple[str, str]:
    """Return the name of the module that owns a parameter, and the parameter's name in it: `(root)` and `scale`."""
    prefix, path = split(parameter)
    owner, _, own_name = path.rpartition(".")
    return prefix + (owner or ROOT), own_name


def names_above(name: str) -> list[str]:
    """Return the names of the modules that contain a module, its parent first and the root last; none for a root."""
    prefix, path = split(name)
    if path in (ROOT, ""):
        return []
    parts = path.split(".")[:-1]
    return [prefix + ".".join(parts[:count]) for count in range(len(parts), 0, -1)] + [prefix + ROOT]
