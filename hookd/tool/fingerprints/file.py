"""The file of a fingerprint: lines of JSON, which any program can read.

    {"hookd fingerprint": 1, "run": …, "rank": …, …}       the first line; the number is the version of the format
    {"keys": [[phase, name, call, slot, dtype, shape], …]}  keys that are new; they are counted from 0 through the file. A key of a tensor
                                                            on a device has the algorithm of its digest, "mix64", at its end; the
                                                            others are XXH3 with 64 bits: see `hookd.Digest`
    {"step": 17, "is_absolute": true, "digest": "…", "mark": 0, "settings": […], "unread": 0,
     "entries": [[key, digest, bad, norm, least, greatest], …]}     a step, see `steps.Step`
    {"step": 16, "digest": "…"}                             a step whose entries were dropped to keep the file small

Each line is written at once. A line without its end is that of a writer that was killed, and does not count.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from hookd.errors import HookdError
from hookd.tool.fingerprints.steps import Entry, Key, Step, count, key_of, settings_of
from hookd.tool.linux import private_file
from hookd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from typing_extensions import Self

FORMAT, VERSION = "hookd fingerprint", 1
LAST = 16
"""The last steps keep their entries."""
_MAX_LINE, _MAX_HEAD = 1 << 28, 1 << 20
_STEP = re.compile(rb'\{"step":(\d+),')
_DIGEST = re.compile(rb'\{"step":(\d+),(?:"is_absolute":(?:true|false),)?"digest":"([0-9a-f]{16})"')
_SHORT = 44
"""Bytes of the line of a step without entries."""


class About(TypedDict, total=False):
    """The training of a file."""

    run: str
    rank: int
    pid: int
    python: str
    torch: str
    hookd: str
    options: dict[str, str]
    began: float
    """Unix time at which the recording began."""


@dataclass
class Fingerprint:
    """The contents of a file.

    Attributes:
        about: the training.
        steps: by number, in order; those without entries are None.
        digests: of all steps.
    """

    about: About
    steps: dict[int, Step | None] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)


class Writer:
    """Writes a fingerprint step by step, and drops entries of old steps when the file gets too large.

    Args:
        path: of a file that does not exist.
        about: the training.
        max_bytes: largest size of the file.

    Attributes:
        size: of the file in bytes.
        first, last, steps: the numbers of the first and the last step, and of the steps.

    Raises:
        HookdError: reason "cannot-write".
    """

    def __init__(self, path: Path, about: About, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self.size = self.steps = self.first = self.last = 0
        self._keys: dict[Key, int] = {}
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise _cannot_write(path, exc) from exc
        _lock(self._fd, fcntl.LOCK_EX)
        try:
            self._line({FORMAT: VERSION, "hookd": __version__, **about})
        except BaseException:
            os.close(self._fd)
            path.unlink(missing_ok=True)  # without its first line it is not a fingerprint
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _lock(self._fd, fcntl.LOCK_UN)  # a forked process may have the descriptor, too
        os.close(self._fd)

    def add(self, step: Step) -> str:
        """Append a step, and return its digest.

        Raises:
            HookdError: reason "cannot-write".
        """
        new = [key for key in step.entries if key not in self._keys]
        if new:
            self._keys.update({key: len(self._keys) + at for at, key in enumerate(new)})
            self._line({"keys": [key.row() for key in new]})
        digest = step.digest()
        entries = [[self._keys[key], f"{one.bits:016x}", *one[1:]] for key, one in step.entries.items()]
        self._line({
            "step": step.number, "is_absolute": step.is_absolute, "digest": digest, "mark": step.mark, "settings": step.settings,
            "unread": step.unread, "entries": entries,
        })  # fmt: skip
        self.first = self.first if self.steps else step.number
        self.last, self.steps = step.number, self.steps + 1
        if self.size > self._max_bytes:
            self._shrink()
        return digest

    def _line(self, value: Mapping[str, Any]) -> None:
        data = memoryview(_encoded(value))
        try:
            while data:
                written = os.write(self._fd, data)
                data, self.size = data[written:], self.size + written
        except OSError as exc:
            raise _cannot_write(self._path, exc) from exc

    def _shrink(self) -> None:
        """Write the file again, with fewer of the old steps: entries take 0.3 of its largest size at most, and all of it 0.8."""
        try:
            head, *lines = self._path.read_bytes().splitlines(keepends=True)
        except OSError as exc:  # somebody has deleted it
            raise _cannot_write(self._path, exc) from exc
        steps = {int(found.group(1)): line for line in lines if (found := _STEP.match(line))}
        data = head
        for whole in _thinned(steps):
            if self._sizes(steps, whole, set()) > 0.3 * self._max_bytes:
                continue
            listed = next(
                (one for one in _thinned(steps) if self._sizes(steps, whole, one) <= 0.8 * self._max_bytes), set[int]()
            )
            data = b"".join([head, *self._rewritten(steps, lines, whole, listed)])
            if len(data) <= 0.9 * self._max_bytes:  # with the keys, which count only now
                break
        self._replace(data)

    @staticmethod
    def _sizes(steps: Mapping[int, bytes], whole: set[int], listed: set[int]) -> int:
        return sum(len(line) if step in whole else _SHORT if step in listed else 0 for step, line in steps.items())

    def _rewritten(
        self, steps: Mapping[int, bytes], lines: list[bytes], whole: set[int], listed: set[int]
    ) -> Iterator[bytes]:
        """Yield the lines of the steps that are kept, with the keys that they need."""
        keys = [key_of(key) for line in lines if line.startswith(b'{"keys"') for key in json.loads(line)["keys"]]
        self._keys = {}
        for step, line in steps.items():
            row = json.loads(line) if step in whole or step in listed else {}
            if step in whole and "entries" in row:
                found = [keys[entry[0]] for entry in row["entries"]]
                new = [key for key in dict.fromkeys(found) if key not in self._keys]
                self._keys.update({key: len(self._keys) + at for at, key in enumerate(new)})
                if new:
                    yield _encoded({"keys": [key.row() for key in new]})
                row["entries"] = [
                    [self._keys[key], *entry[1:]] for key, entry in zip(found, row["entries"], strict=True)
                ]
                yield _encoded(row)
            elif row:
                yield _encoded({"step": step, "digest": row["digest"]})

    def _replace(self, data: bytes) -> None:
        try:
            with private_file.replacing(self._path) as file:
                file.write(data)
                file.flush()
                fd = os.dup(file.fileno())
                _lock(fd, fcntl.LOCK_EX)
        except OSError as exc:
            raise _cannot_write(self._path, exc) from exc
        os.close(self._fd)
        self._fd, self.size = fd, len(data)


def _thinned(steps: Iterable[int]) -> Iterator[set[int]]:
    """Yield all steps, each tenth of them, each hundredth and so on, and at last none; and the first and the last ones while they fit."""
    numbers = list(steps)
    spacing, largest = 10, max(numbers)
    ends = {numbers[0], *numbers[-LAST:]}
    yield set(numbers)
    while spacing <= largest:
        yield {step for step in numbers if step % spacing == 0} | ends
        spacing *= 10
    last = LAST
    while last:
        yield {numbers[0], *numbers[-last:]}
        last //= 2
    yield {numbers[-1]}
    yield set()


def _encoded(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _lock(fd: int, operation: int) -> bool:
    """Lock or unlock a file, and return whether that is possible; it never waits. See `wait`."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def wait(path: Path, lives: Callable[[int], bool], pause: Callable[[], None], attempts: int = 200) -> None:
    """Wait until a file is complete: its process has ended, and its writer, the companion of `hookd run`, has not.

    Args:
        path: of the file.
        lives: whether a process lives, whose file is read as it is.
        pause: called between two attempts.
        attempts: their number; then the file is read as it is.

    Raises:
        HookdError: reason "cannot-read" or "damaged".
    """
    for _ in range(attempts):
        try:
            with path.open("rb") as file:
                if _lock(file.fileno(), fcntl.LOCK_SH) or lives(digests(path)[0].get("pid", 0)):
                    return
        except OSError as exc:
            raise _cannot_read(path, exc) from exc
        pause()


def read(path: Path, first: int = 0) -> Fingerprint:
    """Read a file.

    Args:
        path: of the file.
        first: steps with a lower number are left out, which takes no time.

    Raises:
        HookdError: reason "cannot-read" or "damaged"; the message names the line.
    """
    try:
        with path.open("rb") as file:
            return _read(path, file, first)
    except OSError as exc:
        raise _cannot_read(path, exc) from exc


def digests(path: Path) -> tuple[About, dict[int, str]]:
    """Return what a file says of its training, and the digests of its steps, without reading their entries.

    Raises:
        HookdError: reason "cannot-read" or "damaged".
    """
    try:
        with path.open("rb") as file:
            about = _about(json.loads(file.readline(_MAX_HEAD)))
            found = filter(None, map(_DIGEST.match, file))
            return about, {int(step): digest.decode() for step, digest in (match.groups() for match in found)}
    except OSError as exc:
        raise _cannot_read(path, exc) from exc
    except (ValueError, AttributeError, RecursionError) as exc:
        raise _foreign(path) from exc


def _read(path: Path, file: Any, first: int) -> Fingerprint:
    keys: list[Key] = []
    found: Fingerprint | None = None
    number = 0
    while (line := file.readline(_MAX_LINE)).endswith(b"\n"):
        number += 1
        try:
            if (step := _STEP.match(line)) and int(step.group(1)) < first:
                continue
            row = json.loads(line)
            if found is None:
                found = Fingerprint(_about(row))
            elif "keys" in row:
                keys += map(key_of, row["keys"])
            else:
                _take(found, row, keys)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as exc:
            if found is None:
                break
            raise HookdError(f"{path}: line {number} is damaged: {exc}", reason="damaged") from exc
    if found is None:
        raise _foreign(path)
    return found


def _about(row: Any) -> About:
    if row.get(FORMAT) != VERSION:
        raise ValueError("another format")
    about: About = {
        "run": str(row.get("run", "")),
        "python": str(row.get("python", "")),
        "torch": str(row.get("torch", "")),
    }
    for name in ("rank", "pid"):
        if isinstance(row.get(name), int):
            about[name] = row[name]
    if isinstance(row.get("began"), float):
        about["began"] = row["began"]
    return about


def _take(found: Fingerprint, row: Mapping[str, Any], keys: list[Key]) -> None:
    number, digest = count(row["step"]), str(row["digest"])
    found.digests[number] = digest
    if "entries" not in row:
        found.steps[number] = None
        return
    step = Step(
        number,
        row["is_absolute"] is True,
        settings_of(row["settings"]),
        count(row["unread"]),
        mark=count(row.get("mark", 0)),
    )
    for key, bits, bad, *ends in row["entries"]:
        step.entries[keys[count(key)]] = Entry(int(bits, 16), count(bad), *map(float, ends))
    if step.digest() != digest:
        raise ValueError(f"the digest of step {number} does not agree with its entries")
    found.steps[number] = step


def _cannot_read(path: Path, exc: OSError) -> HookdError:
    return HookdError(f"cannot read {path}: {exc.strerror or exc}", reason="cannot-read")


def _foreign(path: Path) -> HookdError:
    return HookdError(f"{path} is not a fingerprint of version {VERSION}", reason="damaged",
                      hint="`hookd fingerprint PID -o FILE` makes one.")  # fmt: skip


def _cannot_write(path: Path, exc: OSError) -> HookdError:
    return HookdError(
        f"cannot write {path}: {exc.strerror or exc}", reason="cannot-write", hint="Choose another file with -o."
    )
