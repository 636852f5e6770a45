"""Asks the agent in this process for a change, over its control socket, as `hookd plugin config` does."""

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
"""How long a change waits for the step of a training that runs in another thread."""
_POLL_S = 0.005


def configure(
    path: str, name: str, options: Mapping[str, str], step: Callable[[], object] | None, patience_s: float = PATIENCE_S
) -> dict[str, str]:
    """Do what `FakeTarget.configure` says, of the agent that listens at the socket file `path`."""
    with _asking(path) as ask:
        told = ask("configure", name=name, options=dict(options))
        if told["state"] == "prepared":
            ask("arm")
            if step is not None:
                step()
            _await_done(ask, name, 0.0 if step is not None else patience_s)
        options_now: dict[str, str] = told["options"]
        return options_now


@contextlib.contextmanager
def _asking(path: str) -> Iterator[Ask]:
    """Give what sends a request and gives its answer; to close the connection takes back what is only prepared."""
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
    """Wait until the training has come to the step at which the change takes place.

    Raises:
        AssertionError: it has not.
    """
    deadline = time.monotonic() + patience_s
    while (ask("status").get("change") or {}).get("state") != "done":
        assert time.monotonic() < deadline, (
            f"{name} changes the training, so it is changed where an optimizer's step begins, and none has come: give "
            "configure() a function that takes one, or let another thread train"
        )
        time.sleep(_POLL_S)
