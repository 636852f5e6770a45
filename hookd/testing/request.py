"""Request a change from the agent in this process, over its control socket, as `hookd plugin config` does."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import TYPE_CHECKING, Any

from hookd.errors import ControlError, rebuild

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Ask = Callable[..., dict[str, Any]]

PATIENCE_S = 60.0
"""Seconds that a change waits for a step of a training in another thread."""
_POLL_S = 0.005


def configure(
    path: str, name: str, options: Mapping[str, str], step: Callable[[], object] | None, patience_s: float = PATIENCE_S
) -> dict[str, str]:
    """Change options of a plugin of the agent that listens at the socket file `path`, see `FakeTarget.configure`."""
    with _asking(path) as ask:
        answer = ask("configure", name=name, options=dict(options))
        if answer["state"] == "prepared":
            ask("arm")
            if step is not None:
                step()
            _await_done(ask, name, 0.0 if step is not None else patience_s)
        options_now: dict[str, str] = answer["options"]
        return options_now


@contextlib.contextmanager
def _asking(path: str) -> Iterator[Ask]:
    """Yield a function that sends a request and returns the answer.

    Closing the connection discards a change that is only prepared.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(path)
        with connection.makefile("rwb") as lines:

            def ask(op: str, **arguments: object) -> dict[str, Any]:
                lines.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
                lines.flush()
                answer: dict[str, Any] = json.loads(lines.readline())
                if not answer["ok"]:
                    raise rebuild(answer.get("kind"), answer["error"], answer["reason"], answer["hint"], ControlError)
                return answer

            yield ask


def _await_done(ask: Ask, name: str, patience_s: float) -> None:
    """Wait until the training has reached the step at which the change takes place.

    Raises:
        AssertionError: it has not within `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    while (ask("status").get("change") or {}).get("state") != "done":
        assert time.monotonic() < deadline, (
            f"{name} changes the training, so its options change when an optimizer step begins, and none has begun: pass "
            "configure() a function that trains a step, or train in another thread"
        )
        time.sleep(_POLL_S)
