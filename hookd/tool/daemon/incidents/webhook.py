"""Post incidents to a webhook, one message for each user, run, rank and kind, with retries until it is accepted."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import itertools
import json
import logging
import random
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from hookd.tool.daemon.incidents.rows import key
from hookd.version import __version__
from hookd.wire.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hookd.tool.config import Webhook
    from hookd.tool.daemon.incidents.store import IncidentStore
    from hookd.wire.incident import IncidentRow, StoredIncident

MAX_WAITING = 1000
"""Maximum number of incidents that wait in memory; others wait in the store until these are sent."""
MAX_INCIDENTS = 20
"""Maximum number of incidents in one message; `truncated` counts the others."""
_FIELDS = ("id", "time", "last", "count", "user", "run", "rank", "pid", "kind", "module", "step", "message")
"""The columns of a stored incident that a message carries."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
    """The rate of messages and retries, in seconds.

    Attributes:
        window_s: minimum time between two messages of a group; incidents in between are collected for the next message.
        timeout_s: how long one attempt may take.
        first_s: wait after the first failure; it doubles with each further one, and is reduced randomly by up to half.
        longest_s: maximum wait.
    """

    window_s: float = 30.0
    timeout_s: float = 10.0
    first_s: float = 1.0
    longest_s: float = 300.0

    def wait_s(self, failures: int) -> float:
        """Return the wait after this number of failures in a row."""
        full_s: float = min(self.longest_s, self.first_s * 2 ** min(failures - 1, 32))
        return full_s * random.uniform(0.5, 1)  # noqa: S311  spreads daemons, keeps no secret


@dataclass
class _Group:
    name: tuple[int | str, ...]
    owner: int
    due: float
    incidents: dict[tuple[Any, ...], IncidentRow] = field(default_factory=dict)


class Sender:
    """A receiver that posts incidents: `run` runs in the event loop, `receive` in the store's thread.

    Delivery is at least once: accepted messages are recorded in the store, and all others are posted after a restart.

    Args:
        url: returns the address of this daemon.
    """

    def __init__(
        self,
        config: Webhook,
        store: IncidentStore,
        url: Callable[[], str] = str,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = config.name
        self._config = config
        self._store = store
        self._url = url
        self._pace = pace or Pace()
        self._clock = clock
        self._instance = socket.gethostname()
        self._inbox: deque[IncidentRow] = deque(maxlen=MAX_WAITING)
        self._groups: dict[tuple[int | str, ...], _Group] = {}
        self._sent: dict[tuple[int | str, ...], float] = {}
        self._turns: dict[int, float] = {}  # by owner, the time of their last message
        self._queued: set[tuple[Any, ...]] = set()
        # Sent recently: `undelivered` and `receive` may both return one.
        self._announced: dict[tuple[Any, ...], None] = {}
        self._is_behind = True  # whether the store has more: at first, the rest of an earlier daemon
        self._is_failing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._came = asyncio.Event()

    def wants(self, incident: StoredIncident) -> bool:
        """Whether the configuration selects the kind of an incident."""
        return not self._config.kinds or incident["kind"] in self._config.kinds

    def receive(self, incident: IncidentRow) -> None:
        """Queue an incident."""
        self._is_behind = self._is_behind or len(self._inbox) == MAX_WAITING
        self._inbox.append(incident)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the next daemon sends it
                self._loop.call_soon_threadsafe(self._came.set)

    async def run(self) -> None:
        """Post incidents until cancelled."""
        self._loop, self._came = asyncio.get_running_loop(), asyncio.Event()
        self._groups, self._queued, self._is_behind = {}, set(), True  # an earlier round may have failed
        timeout = aiohttp.ClientTimeout(total=self._pace.timeout_s)
        # Proxies of the environment are used, as by other clients.
        async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
            while True:
                self._take_in()
                if self._is_behind and not self._groups:
                    await self._catch_up()
                group = self._due()
                if group is not None:
                    await self._deliver(session, group)
                else:
                    await self._pause()

    # ---- what waits

    def _take_in(self) -> None:
        self._came.clear()
        while self._inbox:
            self._queue(self._inbox.popleft())

    async def _catch_up(self) -> None:
        """Queue incidents from the store for which memory had no room."""
        self._is_behind = False
        rows = await asyncio.to_thread(self._store.undelivered, self.name, MAX_WAITING)
        self._is_behind = len(rows) == MAX_WAITING
        for row in rows:
            self._queue(row)

    def _queue(self, incident: IncidentRow) -> None:
        if _notice_key(incident) in self._queued or _notice_key(incident) in self._announced:
            return
        waiting = sum(len(group.incidents) for group in self._groups.values() if group.owner == incident["owner"])
        if len(self._queued) >= MAX_WAITING or waiting >= max(1, MAX_WAITING // 2):  # the rest is for other users
            self._is_behind = True
            return
        self._queued.add(_notice_key(incident))
        name = (incident["owner"], incident["run"], incident["rank"], incident["kind"])
        if name not in self._groups:
            last = self._sent.get(name)
            due = self._clock() if last is None else last + self._pace.window_s
            self._groups[name] = _Group(name, incident["owner"], due)
        self._groups[name].incidents[key(incident)] = incident  # if its count has grown, the newest row

    def _due(self) -> _Group | None:
        now = self._clock()
        self._sent = {name: at for name, at in self._sent.items() if now - at < self._pace.window_s}
        due = [group for group in self._groups.values() if group.due <= now]
        group = min(due, key=lambda group: (self._turns.get(group.owner, 0.0), group.due), default=None)
        if group is None:
            return None
        self._turns[group.owner] = self._sent[group.name] = now
        return self._groups.pop(group.name)

    async def _pause(self) -> None:
        due = min((group.due for group in self._groups.values()), default=None)
        wait_s = None if due is None else max(0.0, due - self._clock())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._came.wait(), wait_s)

    # ---- one message

    async def _deliver(self, session: aiohttp.ClientSession, group: _Group) -> None:
        """Post a message until it is accepted, or refused permanently."""
        incidents = list(group.incidents.values())
        body = message(incidents, instance=self._instance, url=self._url(), labels=self._config.labels)
        names = [_notice_key(incident) for incident in incidents]
        number = "msg_" + hashlib.sha256(repr((self.name, names)).encode()).hexdigest()[:32]
        for failures in itertools.count(1):
            why = await self._post(session, number, body)
            if why is None:
                break
            self._log_failure(why)
            await asyncio.sleep(self._pace.wait_s(failures))
        self._store.delivered(self.name, incidents)
        self._queued.difference_update(names)
        self._announced.update(dict.fromkeys(names))
        for name in list(self._announced)[: -2 * MAX_WAITING]:
            del self._announced[name]

    async def _post(self, session: aiohttp.ClientSession, number: str, body: bytes) -> str | None:
        """Post once; return the reason for a retry, or None. 2xx is success. 408, 425, 429 and 5xx are temporary."""
        headers = {"Content-Type": "application/json", "User-Agent": f"hookd/{__version__}"}
        headers |= signed(self._config.secret, number, int(time.time()), body)
        try:
            # Redirects are not followed: they could lead to an address that is not configured.
            async with session.post(self._config.url, data=body, headers=headers, allow_redirects=False) as response:
                status = response.status
        except asyncio.TimeoutError:
            return f"no answer within {self._pace.timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as exc:  # its text may contain the whole address
            return f"{type(exc).__name__} {getattr(exc, 'strerror', None) or ''}".strip()
        if status >= 500 or status in (408, 425, 429):
            return f"status {status}"
        if status >= 300:
            _log.error("%s rejected incidents (status %d); they are not sent again", self._config.host, status)
        elif self._is_failing:
            self._is_failing = False
            _log.warning("%s accepts incidents again", self._config.host)
        return None

    def _log_failure(self, why: str) -> None:
        if not self._is_failing:
            self._is_failing = True
            _log.warning(
                "incidents cannot be sent to %s (%s): hookd tries again until they are accepted", self._config.host, why
            )


def message(incidents: Sequence[IncidentRow], *, instance: str, url: str, labels: Mapping[str, str]) -> bytes:
    """Return the JSON body for incidents of one user, run, rank and kind (docs/incidents.md).

    Args:
        incidents: rows of the store, the oldest first.
        instance: the name of this machine.
        url: of this daemon.
        labels: from the configuration, sent unchanged.
    """
    body = {
        "version": 1,
        "instance": instance,
        "url": url,
        "labels": dict(labels),
        "incidents": [_fields_of(incident) for incident in incidents[:MAX_INCIDENTS]],
        "truncated": max(0, len(incidents) - MAX_INCIDENTS),
    }
    return json.dumps(body).encode()


def _fields_of(incident: IncidentRow) -> dict[str, object]:
    columns: Mapping[str, object] = incident
    # The texts come from the target: `one_line` removes control characters.
    fields = {name: one_line(value) if isinstance(value := columns[name], str) else value for name in _FIELDS}
    return fields if incident["id"] is None else {**fields, "command": f"hookd report '#{incident['id']}'"}


def _notice_key(incident: IncidentRow) -> tuple[Any, ...]:
    """Return the key of a notification: an incident is sent once, and again when its count gains a digit."""
    return (*key(incident), len(str(incident["count"])))


def signed(secret: bytes | None, number: str, unix_s: int, body: bytes) -> dict[str, str]:
    """Return the headers that authenticate the sender and identify a repeated message.

    Source: Standard Webhooks 1.0 (https://www.standardwebhooks.com): HMAC-SHA256 over `id.timestamp.body`.
    """
    headers = {"webhook-id": number, "webhook-timestamp": str(unix_s)}
    if secret is not None:
        digest = hmac.digest(secret, f"{number}.{unix_s}.".encode() + body, "sha256")
        headers["webhook-signature"] = "v1," + base64.b64encode(digest).decode()
    return headers
