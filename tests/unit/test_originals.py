"""The original locks and events of a target."""

from __future__ import annotations

import threading

from hookd.wire.originals import Event
from tests.support.processes import wait_until


def test_a_wait_on_an_event_leaves_nothing_behind():
    event = Event()
    assert not any(event.wait(0.0) for _ in range(3))
    seen = []
    waiting = threading.Thread(target=lambda: seen.append(event.wait()))
    waiting.start()
    wait_until(lambda: event._waiting, what="a thread waits")
    event.set()
    waiting.join()
    assert seen == [event.wait()] == [True]
    assert event._waiting == []
