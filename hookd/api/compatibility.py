"""The version of the plugin API, and the names that plugins may have.

`API_VERSION` is `MAJOR.MINOR`, independent of hookd's own version. A minor version only adds; renaming or removing anything
makes a major version.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from hookd.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

API_VERSION = "1.0"
CORE = frozenset(["target", "agent", "build", "attach", "collectives", "compiling", "hang", "straggler", "steps", "step", "modules", "heartbeat", "incidents", "overhead", "sampling", "plugin", "series", "process", "scrape", "daemon", "run", "rank", "hookd"])  # fmt: skip
"""Words that begin the names of core metrics; the first word of a plugin's name must not be one of them."""

NAMING = ("mutating", "sampled")
"""The attributes of a plugin that list some of its hooks."""
FORMER = {
    "rare": 'Write sampled = {"backward": Rate(longest=1000)}, with the number that `rarest` had.',
    "rarest": 'Write sampled = {"backward": Rate(longest=1000)} for the hooks that `rare` named.',
    "sampled_last": 'Write sampled = {"step_pre": Rate(stretched_last=True)}.',
    "fixed_by_every": "Remove it: `every` fixes the hooks whose Rate has neither `longest` nor `stretched_last`.",
    "unless_finite": 'Write sampled = {"backward": Rate(unless_finite=True)}.',
}
"""Former attributes of a plugin, each with what to write instead. They are refused: to ignore one would change when hooks are called."""


def check(name: str, required: str) -> None:
    """Check that this hookd has the API that a plugin requires: the same major version, and at least its minor version.

    An empty `required` accepts any version.

    Raises:
        PluginError: the versions do not match, or `required` is not a version.
    """
    if not required:
        return
    try:
        major, minor = parsed(required)
    except ValueError:
        raise PluginError(
            f"{name}: requires_api must be like {API_VERSION!r}, not {required!r}", reason="api"
        ) from None
    ours = parsed(API_VERSION)
    if major != ours[0] or minor > ours[1]:
        hint = "Update the hookd that attaches." if (major, minor) > ours else "Update the plugin."
        raise PluginError(f"{name} needs API {required}, but this hookd has {API_VERSION}", reason="api", hint=hint)


def parsed(version: str) -> tuple[int, int]:
    """Parse `MAJOR.MINOR`.

    Raises:
        ValueError: the text has another form.
    """
    major, minor = version.split(".")
    return int(major), int(minor)


def is_name(name: str) -> bool:
    """Whether a plugin may have this name."""
    return name.isidentifier() and name.islower() and name.split("_", maxsplit=1)[0] not in CORE


def nearest(word: str, known: Collection[str], further: Iterable[str] = ()) -> str:
    """Return the hint for an unknown name: the nearest one of `known`, else of `further`, else all of `known`."""
    near = difflib.get_close_matches(word, known, 1) or difflib.get_close_matches(word, further, 1)
    return f"did you mean {near[0]!r}?" if near else f"expected one of: {', '.join(sorted(known))}"
