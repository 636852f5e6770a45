"""Request a change from the agent in this process, over its control socket, as `hookd plugin config` does."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import TYPE_CHECKING, TypedDict

from hookd.errors import ControlError, rebuild

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Ask = Callable[..., "Answer"]

PATIENCE_S = 60.0
"""Seconds that a change waits for a step of a training in another thread."""
_POLL_S = 0.005


class Change(TypedDict):
    """A change of a plugin, in the agent's status."""

    state: str
    """`prepared`, `armed`, `done` or `aborted`."""


class Answer(TypedDict, total=False):
    """An answer of the agent; which keys it has depends on the request."""

    ok: bool
    """Whether the request succeeded; always present."""
    kind: str
    """Class of the error."""
    error: str
    reason: str
    hint: str
    state: str
    """`prepared` if the change waits for a step, else `done`."""
    options: dict[str, str]
    """Of the plugin."""
    change: Change | None
    """The last change."""


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
        return answer["options"]


@contextlib.contextmanager
def _asking(path: str) -> Iterator[Ask]:
    """Yield a function that sends a request and returns the answer.

    Closing the connection discards a change that is only prepared.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(path)
        with connection.makefile("rwb") as lines:

            def ask(op: str, **arguments: object) -> Answer:
                lines.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
                lines.flush()
                answer: Answer = json.loads(lines.readline())
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
    while (change := ask("status").get("change")) is None or change["state"] != "done":
        assert time.monotonic() < deadline, (
            f"{name} changes the training, so its options change when an optimizer step begins, and none has begun: pass "
            "configure() a function that trains a step, or train in another thread"
        )
        time.sleep(_POLL_S)
