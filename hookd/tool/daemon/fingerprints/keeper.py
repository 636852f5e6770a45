"""Keep a fingerprint of each target that has the plugin `fingerprint`.

One thread reads the streams of all targets, writes the files, and compares the replicas of each run. It starts with the first such
target. Its share of a processor is bounded, whatever the targets send: a target that is too fast loses steps, and the training
never waits.
"""

from __future__ import annotations

import contextlib
import logging
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hookd.errors import HookdError
from hookd.tool.attach import Control
from hookd.tool.daemon.directories import make_private
from hookd.tool.daemon.fingerprints.kept import Kept, file_name
from hookd.tool.daemon.fingerprints.parted import PARTED, Parted
from hookd.tool.daemon.watch.watcher import Declared, Sample, Watcher
from hookd.tool.fingerprints.file import Writer
from hookd.tool.fingerprints.recording import NAME, Received, about, stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hookd.tool.daemon.fleet.fleet import Fleet
    from hookd.tool.daemon.fleet.targets import Target
    from hookd.tool.fingerprints.steps import Step
    from hookd.wire.stream import StreamReader

DIRECTORY = "fingerprints"
"""In the state directory."""
MEMORY = 4 << 20
"""Bytes of a target's stream."""
SHARE = 32
"""A file has at most this part of the room for all files."""
ROUND_S, BUSY = 0.5, 3.0
"""Pause between two rounds; it is at least this many times as long as the round before."""
TURN_S = 0.2
"""Longest time for the records of one target in a round."""
SETTLE_S = 2.0
"""Time for a tool that has loaded the plugin, such as `hookd fingerprint`, to read its records itself."""
RETRY_S, MOST_RETRY_S = 30.0, 960.0
"""Pause after a stream could not be opened, or a file not be written, which doubles each time, and its maximum."""
CONNECT_S = 3.0
MOST_EARLIER = 64
"""Number of files of earlier targets that are compared with, the newest."""

RECORDED = Declared(
    "hookd_fingerprint_recorded_timestamp_seconds",
    "gauge",
    "Unix time at which the daemon has recorded the last step of a target's fingerprint.",
)
_log = logging.getLogger(__name__)


class _Recording(NamedTuple):
    """The recording of one target, and what must be closed at its end."""

    kept: Kept
    reader: StreamReader
    received: Received
    resources: contextlib.ExitStack


class _Sink:
    """Writes steps to the file, and notes their digests."""

    def __init__(self, writer: Writer, kept: Kept) -> None:
        self._writer, self._kept = writer, kept

    def add(self, step: Step) -> None:
        """Take a step."""
        self._kept.add(step, self._writer.add(step), time.time())


class Keeper(Watcher):
    """Keeps the fingerprints of all targets that have the plugin.

    Args:
        fleet: to which parted replicas are reported.
        state_dir: for the files; None: nothing is kept.
        max_bytes: room for all files; the oldest of ended targets make room for new ones. 0: nothing is kept.
    """

    families: Sequence[Declared] = (RECORDED, PARTED)

    def __init__(
        self, fleet: Fleet, state_dir: Path | None, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = None if state_dir is None or not max_bytes else state_dir / DIRECTORY
        self._max_bytes, self._clock = max_bytes, clock
        self._parted = Parted(fleet)
        self._targets: Sequence[Target] = ()
        self._due: dict[Target, float] = {}  # when a stream is opened, by the clock
        self._pauses: dict[Target, float] = {}  # before the next attempt
        self._recordings: dict[Target, _Recording] = {}
        self._kept: dict[Target, Kept] = {}
        self._earlier: list[Kept] | None = None  # not looked for yet
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()  # of `_earlier`

    # ---- for the daemon

    def poll(self, targets: Sequence[Target]) -> None:
        """Note the targets, and start the thread once one has the plugin; see `watch.Watcher`."""
        self._targets = tuple(targets)
        if self._thread is None and self._directory is not None and any(map(_is_wanted, targets)):
            self._thread = threading.Thread(target=self._run, name="fingerprints")
            self._thread.start()

    def samples(self, target: Target) -> Iterable[Sample]:
        """Return when a step was recorded last, and whether a replica has parted; see `watch.Watcher`."""
        kept = self._kept.get(target)
        if kept is not None and kept.updated:
            yield Sample(RECORDED, {}, kept.updated)
        yield from self._parted.samples(target)

    def of(self, target: Target) -> Kept | None:
        """Return the fingerprint of a target; None if there is none."""
        return self._kept.get(target)

    def every(self) -> list[Kept]:
        """Return all fingerprints, the newest first. May read the files of an earlier daemon."""
        with self._lock:
            earlier = self._earlier if self._earlier is not None else self._read_earlier()
            found = [*dict(self._kept).values(), *earlier]
        return sorted(found, key=lambda kept: kept.began, reverse=True)

    def close(self) -> None:
        """End all recordings; the files stay."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        for target in list(self._recordings):
            self._end(target)

    # ---- the thread

    def _run(self) -> None:
        took = 0.0
        while not self._over.wait(max(ROUND_S, BUSY * took)):
            start = time.thread_time()  # without the time that a target takes to answer
            try:
                self.round()
            except Exception:  # noqa: BLE001  a bug here must not stop the daemon
                _log.exception("fingerprints")
            took = time.thread_time() - start

    def round(self) -> None:
        """Open and end recordings, take what has arrived, and compare replicas."""
        targets = self._targets
        for target in targets:
            if target not in self._recordings and _is_wanted(target) and self._is_due(target):
                start = time.monotonic()
                self._try_open(target)
                if self._over.is_set():
                    return
                if time.monotonic() - start > TURN_S:  # it does not answer: others are read first
                    break
        for target, recording in list(self._recordings.items()):
            is_over = not _is_wanted(target)  # first, so that what it wrote last is read below
            if not self._try_take(target, recording) or is_over:
                self._end(target)
        self._forget(targets)
        self._parted.compare({target: self._kept[target] for target in targets if target in self._kept})

    def _is_due(self, target: Target) -> bool:
        now = self._clock()
        return now >= self._due.setdefault(target, now + SETTLE_S)

    def _try_open(self, target: Target) -> None:
        try:
            self._open(target)
        except (HookdError, OSError) as exc:
            reason = getattr(exc, "reason", "")
            self._retry_later(target, is_busy=reason == "busy")
            if reason not in ("busy", "gone", "not-attached"):
                _log.warning("no fingerprint of process %d is kept: %s", target.pid, exc)
        except Exception:  # noqa: BLE001  a bug here must not stop the recordings of other targets
            self._retry_later(target)
            _log.exception("no fingerprint of process %d is kept", target.pid)

    def _retry_later(self, target: Target, *, is_busy: bool = False) -> None:
        """Open the stream after a pause; a tool that reads it may end at any time."""
        pause = RETRY_S if is_busy else self._pauses.get(target, RETRY_S)
        self._pauses[target] = min(2 * pause, MOST_RETRY_S)
        self._due[target] = self._clock() + pause

    def _open(self, target: Target) -> None:
        assert self._directory is not None  # see `poll`
        make_private(self._directory)
        self._make_room()
        began, claim = time.time(), target.claim
        path = self._directory / file_name(claim.run, claim.rank, target.pid, began)
        with contextlib.ExitStack() as resources:
            control = resources.enter_context(Control.connect(target.pid, CONNECT_S))
            reader, number = resources.enter_context(stream(MEMORY))
            control.request("stream", name=NAME, fds=[number])
            head = about(target.pid, _identity(target), options_of(target) or {})
            head["run"], head["began"] = claim.run, began
            writer = resources.enter_context(Writer(path, head, self._max_bytes // SHARE))
            kept = Kept(path, claim.run, claim.rank, target.pid, began)
            received = Received(_Sink(writer, kept), is_whole=False)
            self._recordings[target] = _Recording(kept, reader, received, resources.pop_all())
        self._kept[target] = kept

    def _try_take(self, target: Target, recording: _Recording) -> bool:
        """Take the records that have arrived; return whether the recording goes on."""
        recording.kept.run, recording.kept.rank = (
            target.claim.run,
            target.claim.rank,
        )  # not known before torch.distributed began
        try:
            self._take(recording)
        except HookdError as exc:
            _log.warning("the fingerprint of process %d ends here: %s", target.pid, exc)
        except Exception:  # noqa: BLE001  a bug here must not stop the recordings of other targets
            _log.exception("the fingerprint of process %d ends here", target.pid)
        else:
            if recording.kept.steps:
                self._pauses.pop(target, None)
            return True
        self._retry_later(target)
        return False

    @staticmethod
    def _take(recording: _Recording) -> None:
        """Take records for TURN_S at most."""
        until = time.monotonic() + TURN_S
        for record in recording.reader.records():
            recording.received.add(record)
            if time.monotonic() > until:
                break
        recording.kept.lost = min(recording.reader.dropped, 1 << 32)

    def _end(self, target: Target) -> None:
        recording = self._recordings.pop(target)
        with contextlib.suppress(HookdError):  # the file cannot be written any more: told before
            recording.received.close()
        recording.kept.is_live = False
        recording.resources.close()
        if not recording.kept.steps:  # such as one for each attempt while the disk is full
            with contextlib.suppress(OSError):
                recording.kept.path.unlink()
            del self._kept[target]

    def _forget(self, targets: Sequence[Target]) -> None:
        """Forget targets that the daemon does not know any more; their fingerprints stay."""
        gone = [target for target in self._kept if target not in targets and target not in self._recordings]
        with self._lock:
            for target in gone:
                kept = self._kept.pop(target)
                if self._earlier is not None:
                    self._earlier = [kept, *self._earlier][:MOST_EARLIER]
        self._due = {target: due for target, due in self._due.items() if target in targets}
        self._pauses = {target: pause for target, pause in self._pauses.items() if target in targets}

    def _make_room(self) -> None:
        """Delete the oldest files of ended targets, until there is room for one more.

        Raises:
            HookdError: reason "cannot-write": all room is taken by files that are being written.
        """
        assert self._directory is not None  # see `poll`
        for part in self._directory.glob(".*.part"):  # of a daemon that was killed
            part.unlink(missing_ok=True)
        live = {recording.kept.path for recording in self._recordings.values()}
        ended = {path: size for path, size in self._files().items() if path not in live}
        used = self._max_bytes // SHARE * (len(live) + 1) + sum(ended.values())
        deleted = set[Path]()
        for path in reversed(ended):
            if used <= self._max_bytes:
                break
            used -= ended[path]
            path.unlink(missing_ok=True)
            deleted.add(path)
        with self._lock:
            if self._earlier is not None:
                self._earlier = [kept for kept in self._earlier if kept.path not in deleted]
        if used > self._max_bytes:
            raise HookdError(f"{self._max_bytes >> 20} MB are room for {SHARE} of them", reason="cannot-write")

    def _files(self) -> dict[Path, int]:
        """Return the files that there are with their sizes, the newest first."""
        assert self._directory is not None  # see `poll`
        found = []
        for path in self._directory.glob("*.jsonl"):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                status = path.lstat()
                found += [(status.st_mtime, path, status.st_size)] if stat.S_ISREG(status.st_mode) else []
        return {path: size for _, path, size in sorted(found, reverse=True)}

    def _read_earlier(self) -> list[Kept]:
        """Read the files that earlier daemons have written. Locked."""
        self._earlier, known = [], {kept.path for kept in self._kept.values()}
        for path in list(self._files())[:MOST_EARLIER] if self._directory is not None else ():
            if path not in known:
                with contextlib.suppress(HookdError, OSError):  # deleted meanwhile, or not a fingerprint
                    self._earlier.append(Kept.of_file(path))
        return self._earlier


def _identity(target: Target) -> dict[str, object]:
    snapshot = target.last()
    return {} if snapshot is None else dict(snapshot.identity)


def _is_wanted(target: Target) -> bool:
    """Whether a target lives and has the plugin; one that `hookd run --fingerprint` has started is read by that command."""
    options = options_of(target)
    return target.ended is None and options is not None and not options.get("buffer")


def options_of(target: Target) -> dict[str, str] | None:
    """Return the options of the plugin in a target; None if it is not loaded there."""
    plugins = _identity(target).get("plugins")
    own = plugins.get(NAME) if isinstance(plugins, dict) else None
    if not isinstance(own, dict):
        return None
    options = own.get("options")
    return {str(name): str(value) for name, value in options.items()} if isinstance(options, dict) else {}
