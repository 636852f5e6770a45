"""The agent's control socket, and the thread that serves it: requests, leases and the tick.

The protocol is one JSON object per line in each direction, answered in order. Only the target's own user and root are
answered. The thread blocks all signals, so that the training's handlers still run in the same threads as before.

A part of the protocol is the same in every version, so that any hookd can detach any other's agent. The page's identity
contains the socket's path as `control`. `{"op": "detach", "timeout": S}` is answered by an object with `ok`, and then first
the connection and then the page are closed. `{"op": "status"}` is answered by an object with `ok`, `version`, `leases` and
`plugins`, a list of objects with `name`, `options`, `by_name` and `mutates`. All else may change with the version.
"""

from __future__ import annotations

import contextlib
import functools
import json
import posix
from typing import TYPE_CHECKING, cast

from hookd.errors import ControlError, HookdError, worded
from hookd.target.boot.spawn import Thread
from hookd.target.plugins.faults import Failure
from hookd.target.remote.endpoint import open_endpoint, receive
from hookd.wire.descriptors import Descriptor, moved_up
from hookd.wire.originals import HAS_LEFT, RLock, clock, ready, thread
from hookd.wire.peer import peer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hookd.target.boot.work import Work
    from hookd.wire.agent import Request
    from hookd.wire.descriptors import Socket

MAX_LINE = 16 << 20
MAX_LEASE_S = 1e9
TICK_S = 1.0
_MOST_CONNECTIONS, _MOST_REQUESTS, _MOST_FDS = 64, 256, 4
_SEND_TIMEOUT_S = 1.0


class Connection:
    """One client.

    Attributes:
        pid: its pid as the target sees it; `uid` is its user.
        files: descriptors that it has sent, and no request has taken yet.
    """

    def __init__(self, sock: Socket, pid: int, uid: int) -> None:
        self.socket = sock
        self.pid = pid
        self.uid = uid
        self.buffer = bytearray()
        self.files: list[Descriptor] = []
        self.lease_s: float | None = None

    def is_gone(self) -> bool:
        """Whether the client has closed the connection, for example while this process was stopped."""
        return bool(ready([self.socket.fileno()], 0, HAS_LEFT))


class Wake:
    """An event that can be awaited together with sockets; without one, a waiting thread wakes up a moment later."""

    def __init__(self) -> None:
        self._event: Descriptor | None = None
        # Without it, one thread might close the event while another writes to it, and the number belong to a file of the
        # program by then.
        self._lock = RLock()
        # There may be no descriptors left, a seccomp filter, or a Python built without it.
        with contextlib.suppress(OSError, AttributeError):
            self._event = Descriptor(moved_up(posix.eventfd(0, posix.EFD_CLOEXEC | posix.EFD_NONBLOCK)))

    def is_ours(self) -> bool:
        """Whether the event exists, and the program has not closed it."""
        return self._event is not None and self._event.is_ours()

    def numbers(self) -> list[int]:
        """Return the descriptor to wait for, in a list; the list is empty once the program has closed it."""
        return [self._event.number] if self._event is not None and self._event.is_ours() else []

    def up(self) -> None:
        """Wake up the waiting thread."""
        with self._lock:
            for number in self.numbers():
                posix.eventfd_write(number, 1)

    def clear(self) -> None:
        """Reset the event, so that threads wait again."""
        for number in self.numbers():
            with contextlib.suppress(BlockingIOError):
                posix.eventfd_read(number)

    def close(self) -> None:
        """Close the event; may be called twice."""
        with self._lock:
            self.abandon()

    def abandon(self) -> None:
        """Close the event without the lock, which in a forked child may belong to a thread that does not exist there."""
        if self._event is not None:
            self._event.close()


class _Service:
    """The service of one thread until it is halted for good; the next service has another thread.

    Attributes:
        thread: the thread.
        is_halted: whether it is to end.
        tokens: a list with one item, which the caller that begins the next service pops: a fork may interrupt another caller there.
    """

    def __init__(self, serve: Callable[[_Service], None]) -> None:
        self.thread = Thread(functools.partial(serve, self))
        self.is_halted = False
        self.tokens: list[None] = [None]


class Control:
    """Serves the socket until `end` is called.

    Args:
        handle: called with each request; returns the fields of the answer, or raises HookdError.
        tick: called about once a second with the unix time.
        lease_s: how long the agent stays without a first lease, in seconds; None: for ever. Each lease specifies how long the
            agent stays after it; of several, the one that ends last counts.
        expire: called when that time is over.
        closed_by_program: called once the program has closed the agent's listening socket.
        clock: returns monotonic seconds, for the tick and the leases.

    Attributes:
        asking: the connection whose request is being handled.
        left: called with each connection that has been closed.
        poll: called a few times a second.
    """

    def __init__(
        self,
        handle: Callable[[Request], Mapping[str, object]],
        tick: Callable[[float], None],
        lease_s: float | None,
        expire: Callable[[], None],
        work: Work,
        *,
        closed_by_program: Callable[[], None],
        clock: Callable[[], float] = clock.monotonic,
    ) -> None:
        self._handle, self._tick, self._expire, self._work = handle, tick, expire, work
        self._closed_by_program = closed_by_program
        self._clock = clock
        self._started = clock()
        self._stay_until = None if lease_s is None else self._started + lease_s
        self._connections: dict[int, Connection] = {}
        self._is_ending = False
        self.asking: Connection | None = None
        self.left: Callable[[Connection], None] = lambda _: None
        self.poll: Callable[[], None] = lambda: None
        self._then: Callable[[], None] = lambda: None
        self._endpoint = open_endpoint()
        self.path = self._endpoint.path
        self._server = 0  # the ident of the thread that serves
        self._service = _Service(self._serve)
        self._wake = Wake()
        self._ticked = self._started

    @property
    def leases(self) -> int:
        """The number of connections that hold a lease."""
        return sum(1 for c in self._connections.values() if c.lease_s is not None)

    @property
    def holders(self) -> list[int]:
        """The pids of the processes that hold a lease, as the target sees them; 0 for one in another pid namespace."""
        return [c.pid for c in self._connections.values() if c.lease_s is not None]

    @property
    def age_s(self) -> float:
        """The time since the socket was opened, in seconds."""
        return self._clock() - self._started

    def start(self) -> None:
        """Start the thread."""
        self._service.thread.start()

    def end(self, then: Callable[[], None] | None = None) -> None:
        """End the thread after the current answer, and run `then` in it; wait for it, unless it is the caller."""
        self._then = then or self._then
        self._is_ending = True
        if not self.is_own_thread():
            self._wake.up()
            server = self._service.thread
            server.join(TICK_S * 5)
            if server.ident is None or server.is_over:  # it never started, or did not restart after a fork
                self._close()

    def is_own_thread(self) -> bool:
        """Whether the caller runs in the thread that answers requests."""
        return bool(thread.get_ident() == self._server)

    def halt(self) -> None:
        """End the thread soon; nothing else changes, and `resume` starts another one."""
        self._service.is_halted = True
        self._wake.up()

    def resume(self) -> bool:
        """Serve again after a `halt`, unless the agent ends; return whether that is settled. Takes no lock."""
        service = self._service
        if not service.is_halted or self._is_ending:
            return True
        try:
            service.tokens.pop()
        except IndexError:  # called in a signal handler that has interrupted another call
            return True
        # From this assignment on, a fork that interrupts halts the new service, and begins the one after it.
        new = self._service = _Service(functools.partial(self._serve_after, service.thread))
        try:
            new.thread.start()
        except ControlError:
            if self._service is new:
                self._service = service
                service.tokens.append(None)
            return False
        return True

    def _serve_after(self, before: Thread, service: _Service) -> None:
        while not before.is_over:  # it is still busy: a fork does not wait for it without limit
            if self._is_over(service):
                return
            before.join(TICK_S / 4)
        if not self._wake.is_ours():
            self._wake.close()
            self._wake = Wake()
        self._wake.clear()
        self._serve(service)

    def keep(self) -> None:
        """Stay without a lease from now on."""
        self._stay_until = None

    def stay(self, seconds: float) -> None:
        """Stay for this long from now on, and while there is a lease."""
        self._stay_until = self._clock() + seconds

    def abandon(self) -> None:
        """Close the sockets that a forked child inherited, without a lock and without removing the parent's socket file."""
        for connection in self._connections.values():
            connection.socket.close()
        self._endpoint.close()
        self._wake.abandon()

    def unlink(self) -> None:
        """Remove the socket file; for a process that ends before the thread does."""
        self._endpoint.unlink()

    # -- the thread

    def _serve(self, service: _Service) -> None:
        self._server = thread.get_ident()
        try:
            while not self._is_over(service):
                listening = self._endpoint.socket.fileno()
                # A new connection may get the descriptor number of one that has just left.
                rest_s = self._ticked + TICK_S - self._clock()
                asking = ready(
                    [*self._connections, listening, *self._wake.numbers()], max(0.0, min(rest_s, TICK_S / 4))
                )
                # Even in a training that forks all the time the tick must run, and leases must end.
                if self._is_ending or (service.is_halted and self._clock() - self._ticked < TICK_S):
                    return
                with self._work.piece():
                    if not self._endpoint.is_ours():
                        self._closed_by_program()
                        continue
                    for descriptor in asking:
                        if descriptor == listening:
                            self._accept()
                        elif descriptor in self._connections:
                            self._listen(self._connections[descriptor])
                    self.poll()
                    if self._clock() - self._ticked >= TICK_S:
                        self._ticked = self._clock()
                        self._tick(clock.time())
                        self._check_lease()
        except BaseException:
            self._is_ending = True
            raise
        finally:
            if self._is_ending:
                self._close()
                with self._work.piece():
                    self._then()
            self._server = 0

    def _is_over(self, service: _Service) -> bool:
        return self._is_ending or service.is_halted

    def _close(self) -> None:
        for connection in list(self._connections.values()):
            connection.socket.close()
            _close_all(connection)
        self._connections.clear()
        self._endpoint.close()
        self._endpoint.unlink()
        self._wake.close()

    def _check_lease(self) -> None:
        if self._stay_until is not None and not self.leases and self._clock() > self._stay_until:
            self._expire()

    def _listen(self, connection: Connection) -> None:
        if not connection.socket.is_ours():
            self._drop(connection)
            return
        try:
            data, files = receive(connection.socket, 1 << 16, _MOST_FDS)
            connection.files += files
        except OSError:
            data = b""
        buffer = connection.buffer
        buffer += data
        # The tick, the leases and a detach wait for this thread: a client that floods it is not served.
        if not data or len(buffer) > MAX_LINE or data.count(b"\n") > _MOST_REQUESTS:
            self._drop(connection)
        while (end := buffer.find(b"\n")) >= 0 and not self._is_ending:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            self._answer(connection, line)

    def _accept(self) -> None:
        try:
            sock = self._endpoint.accept()
        except OSError:
            clock.sleep(TICK_S / 4)  # avoid a busy loop while no descriptor is free
            return
        if sock is None:
            return
        if len(self._connections) >= _MOST_CONNECTIONS:
            sock.close()
            return
        sock.settimeout(_SEND_TIMEOUT_S)
        self._connections[sock.fileno()] = Connection(sock, *peer_of(sock))

    def _drop(self, connection: Connection) -> None:
        connection.buffer.clear()
        if self._connections.get(connection.socket.fileno()) is not connection:
            return
        if connection.lease_s is not None and self._stay_until is not None:  # each lease has its own duration
            self._stay_until = max(self._stay_until, self._clock() + connection.lease_s)
        self._connections.pop(connection.socket.fileno(), None)
        connection.socket.close()
        self._endpoint.spare.take()
        _close_all(connection)
        self.left(connection)

    def _answer(self, connection: Connection, line: bytes) -> None:
        answer: dict[str, object]
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                raise ControlError("a request is a JSON object with an op", reason="bad-request")
            answer = {"ok": True, **self._dispatch(connection, cast("Request", request))}
        except HookdError as exc:
            kind = type(exc).__name__
            answer = {"ok": False, "kind": kind, "reason": exc.reason, "error": exc.message, "hint": exc.hint}
        except (ValueError, RecursionError) as exc:
            answer = {"ok": False, "reason": "bad-request", "error": str(exc), "hint": ""}
        except Failure as exc:
            answer = {"ok": False, "reason": "internal", "error": worded(exc), "hint": ""}
        try:
            connection.socket.sendall(json.dumps(answer, default=str).encode() + b"\n")
        except OSError:  # the client does not read, or has gone
            self._drop(connection)

    def _dispatch(self, connection: Connection, request: Request) -> Mapping[str, object]:
        if request.get("op") == "lease":
            seconds = float(request.get("seconds", 60.0))
            if not 0 <= seconds <= MAX_LEASE_S:
                raise ControlError(
                    f"a lease must be between 0 and {MAX_LEASE_S:g} s, not {seconds:g} s", reason="bad-request"
                )
            connection.lease_s = seconds
            return {"leases": self.leases}
        self.asking = connection
        return self._handle(request)


def _close_all(connection: Connection) -> None:
    while connection.files:
        connection.files.pop().close()
