"""Tells a Slack channel, or whatever takes the same JSON, of incidents; runs in the daemon. See docs/tutorials/slack.md."""

from __future__ import annotations

import html
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from hookd.serving import Address, DaemonPlugin, Metrics, hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping

LONGEST = 500
"""Characters of a message."""


class Slack(DaemonPlugin):
    """Posts `{"text": …}` for each incident, and not the same thing all the time."""

    name = "slack"

    @hookimpl
    def configure(self, options: Mapping[str, str]) -> None:
        """Read whom to tell, of what, and for how long one is enough."""
        self.address = Address(options.get("url", ""), timeout_s=10.0)
        self.kinds = set(options["kinds"].split("|")) if "kinds" in options else None
        self.quiet_s = float(options.get("quiet_s", "60"))
        self.told: dict[tuple[int, str, str], float] = {}
        self.held: Counter[tuple[int, str, str]] = Counter()
        self.posts = 0

    @hookimpl
    def incident(self, incident: Mapping[str, Any]) -> None:
        """Post it, unless one of this kind and run of its user was posted a moment ago: the next one says how many were not."""
        key, now = (incident["owner"], incident["run"], incident["kind"]), time.monotonic()
        if self.kinds is not None and incident["kind"] not in self.kinds:
            return
        if now - self.told.get(key, -self.quiet_s) < self.quiet_s:
            self.held[key] += 1
            return
        more = f" (and {self.held[key]} more before)" if self.held[key] else ""
        text = plain(f"{incident['kind']} in {incident['run']}/{incident['rank']}: {incident['message']}")
        self.address.post({"text": text + more})
        self.posts += 1
        self.told = {one: at for one, at in self.told.items() if now - at < self.quiet_s} | {key: now}
        del self.held[key]

    @hookimpl
    def collect(self, metrics: Metrics) -> None:
        """Tell how many were posted."""
        metrics.counter("posts", "Incidents that were posted, of all runs.", self.posts)


def plain(text: str) -> str:
    """Give text of a target as Slack shows it: no `<!channel>`, no line that begins another message."""
    return html.escape("".join(char if char.isprintable() else " " for char in text[:LONGEST]), quote=False)
