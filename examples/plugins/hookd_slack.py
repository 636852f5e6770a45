"""Tells a Slack channel, or whatever takes the same JSON, of incidents; runs in the daemon. See docs/tutorials/slack.md."""

from __future__ import annotations

import html
import json
import time
import urllib.parse
import urllib.request
from collections import Counter
from typing import TYPE_CHECKING, Any

from hookd import PluginError
from hookd.serving import DaemonPlugin, Metrics, hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT_S = 10.0
LONGEST = 500
"""Characters of a message."""


class Slack(DaemonPlugin):
    """Posts `{"text": …}` for each incident, and not the same thing all the time."""

    name = "slack"

    @hookimpl
    def configure(self, options: Mapping[str, str]) -> None:
        """Read whom to tell, of what, and for how long one is enough."""
        self.url = options.get("url", "")
        if urllib.parse.urlsplit(self.url).scheme not in ("https", "http"):
            raise PluginError("slack: it needs an address: url = 'https://…' in [daemon_plugins.slack]")
        self.kinds = set(options["kinds"].split("|")) if "kinds" in options else None
        self.quiet_s = float(options.get("quiet_s", "60"))
        self.told: dict[tuple[str, str], float] = {}
        self.held: Counter[tuple[str, str]] = Counter()
        self.posts = 0

    @hookimpl
    def incident(self, incident: Mapping[str, Any]) -> None:
        """Post it, unless one of this kind and run was posted a moment ago: the next one says how many were not."""
        key, now = (incident["run"], incident["kind"]), time.monotonic()
        if self.kinds is not None and incident["kind"] not in self.kinds:
            return
        if now - self.told.get(key, -self.quiet_s) < self.quiet_s:
            self.held[key] += 1
            return
        more = f" (and {self.held[key]} more before)" if self.held[key] else ""
        self._post(plain(f"{incident['kind']} in {incident['run']}/{incident['rank']}: {incident['message']}") + more)
        self.told = {one: at for one, at in self.told.items() if now - at < self.quiet_s} | {key: now}
        del self.held[key]

    def _post(self, text: str) -> None:
        body, headers = json.dumps({"text": text}).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url, body, headers)  # noqa: S310  its scheme was looked at
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):  # noqa: S310  raises if it is refused
            self.posts += 1

    @hookimpl
    def collect(self, metrics: Metrics) -> None:
        """Tell how many were posted."""
        metrics.counter("posts", "Incidents that were posted, of all runs.", self.posts)


def plain(text: str) -> str:
    """Give text of a target as Slack shows it: no `<!channel>`, no line that begins another message."""
    return html.escape("".join(char if char.isprintable() else " " for char in text[:LONGEST]), quote=False)
