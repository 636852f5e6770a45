"""Receivers of incidents: webhooks, and the daemon plugins with the hook `incident`."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hookd.tool.daemon.incidents.store import IncidentStore

MAX_WAITING = 1000
"""Incidents that wait for a receiver; more of them are not told to it before the next start of the daemon."""
_log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Is told of incidents. The store keeps in its table `notices` what each receiver was told, by its name.

    Attributes:
        name: the same after a restart.
    """

    name: str

    def wants(self, incident: Mapping[str, Any]) -> bool:
        """Say whether to tell of an incident, a row as `incidents.query` gives it. Any thread; it must not wait."""

    def receive(self, incident: Mapping[str, Any]) -> None:
        """Take an incident in, as a rule once. Called in the store's own thread: it must not wait.

        What has been dealt with is told to `IncidentStore.delivered`; all else is given out again by
        `IncidentStore.undelivered` after a restart.
        """


class Caller:
    """A receiver that calls a function with each incident, in a thread of its own: it may take its time, and may fail.

    Args:
        name: of whose function it is.
        function: called with the row of an incident; one at a time.
        store: is told that the incident is delivered when the function has returned or raised.
    """

    def __init__(self, name: str, function: Callable[[Mapping[str, Any]], object], store: IncidentStore) -> None:
        self.name = name
        self._function = function
        self._store = store
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MAX_WAITING)
        # A daemon thread: a function that never returns must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"hookd-tell-{name}", daemon=True)
        self._thread.start()

    def wants(self, incident: Mapping[str, Any]) -> bool:  # noqa: ARG002  it chooses by itself
        """Want each of them."""
        return True

    def receive(self, incident: Mapping[str, Any]) -> None:
        """Put the incident in the queue."""
        try:
            self._waiting.put_nowait(incident)
        except queue.Full:
            _log.warning("%s is behind by %d incidents: the newest is not told to it", self.name, MAX_WAITING)

    def catch_up(self) -> None:
        """Take in what no daemon has told it; blocks. To be called before the first incident comes."""
        for incident in self._store.undelivered(self.name, MAX_WAITING):
            self.receive(incident)

    def close(self, timeout_s: float = 2.0) -> None:
        """Wait a while for what is on its way, and in the queue; the next daemon tells the rest."""
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
            except Exception:  # noqa: BLE001  whatever it is, the next incident comes
                _log.exception("%s failed with an incident", self.name)
            self._store.delivered(self.name, [incident])
