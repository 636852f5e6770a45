"""Receivers of incidents: webhooks, and the daemon plugins with the hook `incident`."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.tool.daemon.incidents.store import IncidentStore
    from hookd.wire.incident import IncidentRow, StoredIncident

MAX_WAITING = 1000
"""Maximum number of incidents that wait for a receiver; further ones reach it after the next start of the daemon."""
_log = logging.getLogger(__name__)


class Receiver(Protocol):
    """A receiver of incidents; the store records deliveries by the receiver's name, in its table `notices`.

    Attributes:
        name: must be the same after a restart.
    """

    name: str

    def wants(self, incident: StoredIncident) -> bool:
        """Whether to deliver an incident; called in any thread, must not block."""

    def receive(self, incident: IncidentRow) -> None:
        """Accept an incident, usually once; called in the store's own thread, must not block.

        The receiver calls `IncidentStore.delivered` for handled incidents. After a restart,
        `IncidentStore.undelivered` returns all others again.
        """


class FunctionReceiver:
    """A receiver that calls a function with each incident in its own thread; the function may block and may raise.

    Args:
        function: called with the row of an incident; one at a time.
        store: records the delivery when the function has returned or raised.
    """

    def __init__(self, name: str, function: Callable[[IncidentRow], object], store: IncidentStore) -> None:
        self.name = name
        self._function = function
        self._store = store
        self._waiting: queue.Queue[IncidentRow | None] = queue.Queue(MAX_WAITING)
        # A daemon thread, because a function that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"hookd-tell-{name}", daemon=True)
        self._thread.start()

    def wants(self, incident: StoredIncident) -> bool:  # noqa: ARG002  the function chooses by itself
        """Whether to deliver an incident: always."""
        return True

    def receive(self, incident: IncidentRow) -> None:
        """Put the incident in the queue."""
        try:
            self._waiting.put_nowait(incident)
        except queue.Full:
            _log.warning("%s: the queue of %d incidents is full; the newest is not delivered", self.name, MAX_WAITING)

    def catch_up(self) -> None:
        """Queue the undelivered incidents of earlier daemons; blocks. Call this before the first incident."""
        for incident in self._store.undelivered(self.name, MAX_WAITING):
            self.receive(incident)

    def close(self, timeout_s: float = 2.0) -> None:
        """Wait up to the timeout for pending incidents; the next daemon delivers the rest."""
        self._store.flush(timeout_s)
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (incident := self._waiting.get()) is not None:
            try:
                self._function(incident)
            except Exception:  # noqa: BLE001  an error must not stop further deliveries
                _log.exception("%s raised an exception while handling an incident", self.name)
            self._store.delivered(self.name, [incident])
