"""Post incidents to Slack, or to a service with the same JSON, from the daemon. See docs/tutorials/slack.md."""

from __future__ import annotations

import html
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from hookd.serving import Address, DaemonPlugin, Metrics, hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping

LONGEST = 500
"""Most characters of a message."""


class Slack(DaemonPlugin):
    """Posts `{"text": …}` for each incident, without repeating similar ones."""

    name = "slack"

    @hookimpl
    def configure(self, options: Mapping[str, str]) -> None:
        """Read the address, the kinds to post, and the time between posts of one kind and run."""
        self.address = Address(options.get("url", ""), timeout_s=10.0)
        self.kinds = set(options["kinds"].split("|")) if "kinds" in options else None
        self.quiet_s = float(options.get("quiet_s", "60"))
        self.posted: dict[tuple[int, str, str], float] = {}
        self.omitted: Counter[tuple[int, str, str]] = Counter()
        self.posts = 0

    @hookimpl
    def incident(self, incident: Mapping[str, Any]) -> None:
        """Post it, unless one of the same user, run and kind was posted just before; the next post has the number left out."""
        key, now = (incident["owner"], incident["run"], incident["kind"]), time.monotonic()
        if self.kinds is not None and incident["kind"] not in self.kinds:
            return
        if now - self.posted.get(key, -self.quiet_s) < self.quiet_s:
            self.omitted[key] += 1
            return
        more = f" (and {self.omitted[key]} more before)" if self.omitted[key] else ""
        text = plain(f"{incident['kind']} in {incident['run']}/{incident['rank']}: {incident['message']}")
        self.address.post({"text": text + more})
        self.posts += 1
        self.posted = {past: at for past, at in self.posted.items() if now - at < self.quiet_s} | {key: now}
        del self.omitted[key]

    @hookimpl
    def collect(self, metrics: Metrics) -> None:
        """Publish the number of posts."""
        metrics.counter("posts", "Posted incidents, of all runs.", self.posts)


def plain(text: str) -> str:
    """Return a target's text, escaped so that it can neither mention `<!channel>` nor begin a new line."""
    return html.escape("".join(char if char.isprintable() else " " for char in text[:LONGEST]), quote=False)
