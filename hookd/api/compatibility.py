"""The version of what plugins are written against, what has been renamed in it, and names. Runs on both sides.

The policy (docs/plugins.md): `API_VERSION` is `MAJOR.MINOR` of its own, not hookd's. A minor version adds, and may rename; a
name that it has renamed works for that one minor version, with a warning that has the author's file and line, and is
refused from the next one on, with the new name in the error. What is taken away without another name makes a major one.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Iterable

API_VERSION = "1.0"
CORE = frozenset(["target", "agent", "build", "attach", "collectives", "compiling", "hang", "straggler", "steps", "step", "modules", "heartbeat", "incidents", "overhead", "sampling", "plugin", "series", "process", "scrape", "daemon", "run", "rank", "hookd"])  # fmt: skip
"""Words that begin the names of core metrics, so no plugin can have them as a name."""

NAMING = ("mutating", "sampled", "rare", "sampled_last", "fixed_by_every")
"""The attributes of a plugin that name hooks of its."""


@dataclass(frozen=True)
class Renamed:
    """A hook, or an argument of one, that has another name since a version.

    Attributes:
        old: the name that it had.
        new: the name that it has.
        since: the version that renamed it, "1.1".
        hook: whose argument it is; "" for a hook itself.
    """

    old: str
    new: str
    since: str
    hook: str = ""

    @property
    def is_served(self) -> bool:
        """Whether the old name still works."""
        return parsed(self.since) == parsed(API_VERSION)

    def told(self, where: str) -> str:
        """Say it in a sentence, with the author's line."""
        what = f"the argument {self.old!r} of {self.hook}" if self.hook else f"the hook {self.old!r}"
        until = f"; it works until API {_next(self.since)}" if self.is_served else ""
        return f"{what} is {self.new!r} since API {self.since}{until} ({where})"


RENAMED: tuple[Renamed, ...] = ()
"""All that has ever been renamed."""


def renamed(old: str, hook: str = "") -> Renamed | None:
    """Find what a hook, or an argument of a hook, is called now; None if it was never renamed."""
    return next((one for one in RENAMED if one.old == old and one.hook == hook), None)


def check(name: str, required: str) -> None:
    """Check that this hookd has the API that a plugin asks for: the same major version, and no lesser minor one.

    Args:
        name: of the plugin.
        required: its `requires_api`; "" asks for nothing.

    Raises:
        PluginError: it has not, or `required` is no version.
    """
    if not required:
        return
    try:
        major, minor = parsed(required)
    except ValueError:
        raise PluginError(
            f"{name}: requires_api must be like {API_VERSION!r}, not {required!r}", reason="api"
        ) from None
    mine = parsed(API_VERSION)
    if major != mine[0] or minor > mine[1]:
        hint = "Update hookd where it attaches from." if (major, minor) > mine else "Update the plugin."
        raise PluginError(f"{name} needs API {required} of hookd, this one has {API_VERSION}", reason="api", hint=hint)


def parsed(version: str) -> tuple[int, int]:
    """Read `MAJOR.MINOR`.

    Raises:
        ValueError: it is something else.
    """
    major, minor = version.split(".")
    return int(major), int(minor)


def is_name(name: str) -> bool:
    """Whether a plugin may be called so."""
    return name.isidentifier() and name.islower() and name.split("_", maxsplit=1)[0] not in CORE


def nearest(word: str, known: Iterable[str]) -> str:
    """Give the hint for a name that there is not."""
    near = difflib.get_close_matches(word, known, 1)
    return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(sorted(known))}"


def _next(version: str) -> str:
    major, minor = parsed(version)
    return f"{major}.{minor + 1}"
