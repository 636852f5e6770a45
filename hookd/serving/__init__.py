"""What the daemon half of a plugin is made with; its hooks are in `hookd.serving.hookspecs`. Runs in the daemon.

The target half imports from `hookd`, this half from here: the daemon has no torch, and the target none of this.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPErrorProcessor, Request, build_opener

from hookd._pluggy import HookimplMarker
from hookd.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hookd.wire.page import Family

__all__ = ["Address", "DaemonPlugin", "Metrics", "Panel", "PluginError", "Reading", "hookimpl"]

hookimpl = HookimplMarker("hookd_daemon")
"""Marks a method as a hook of `hookd.serving.hookspecs`."""

MAX_SERIES = 200
"""Series of one plugin at a time, over all runs."""
MAX_EVER = 2000
"""Series that it may make up in all, without the label `run`: labels that change with every step are none."""
MAX_LABEL = 100
"""Characters of a label's value."""
RESERVED_LABELS = frozenset({"run", "job", "instance", "pod", "le", "quantile"})
UNBOUNDED = frozenset({"step", "steps", "epoch", "iteration", "time", "timestamp", "pid", "message", "error", "shape"})
"""Labels that have a new value for ever."""
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_NOT_IN_URL = re.compile(r"[\x00-\x20\x7f]")


class DaemonPlugin:
    """The base class of daemon halves.

    Attributes:
        name: as that of the target half, if there is one: the middle of all its metrics' names.
        every_s: seconds from one `collect` to the next, if it is to come less often than the daemon looks, which is
            about once a second; `configure` may set it.
        readmit: whether it may come back, on probation, after it was put aside for its errors.
    """

    name: str = ""
    every_s: float = 0.0
    readmit: bool = True


@dataclass(frozen=True)
class Reading:
    """What one target has published, copied at most about a second ago.

    Attributes:
        run: the job; `rank` its rank there, as its labels have them.
        pid: of the process, as the daemon sees it.
        state: running, hung, detached, lost and so on: see `hookd_target_state`.
        step: optimizer steps that were counted; None before the first copy.
        families: what is on its page; `value` and `series` read it.
    """

    run: str
    rank: str
    pid: int
    state: str
    step: int | None
    families: Sequence[Family] = field(default=(), repr=False)

    def value(self, name: str, **labels: str) -> float | None:
        """Give the value of one series, as `/metrics` names it: `value("hookd_steps_total")`; None if it is not there."""
        return next((value for found, value in self.series(name) if found == labels), None)

    def numbers(self) -> Iterator[tuple[Family, dict[str, str], float]]:
        """Give all gauges and counters: the family (`name`, `kind`, `help`), the labels and the value of each series."""
        for family in self.families:
            if family.kind != "histogram":
                yield from ((family, *one) for one in self.series(family.name))

    def series(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Give the labels (without run and rank) and the value of each series of a name.

        A counter's name may have its `_total`; of a histogram there are `_sum` and `_count`.
        """
        for family in self.families:
            which = _PARTS.get(name[len(family.name) :]) if name.startswith(family.name) else None
            if which is not None and (family.kind == "histogram") == (which in ("sum", "count")):
                for values, cells in family.series:
                    value = cells[0] if which == "value" else cells[-1] if which == "sum" else sum(cells[:-1])
                    yield dict(zip(family.labels, values, strict=True)), value


_PARTS = {"": "value", "_total": "value", "_sum": "sum", "_count": "count"}


@dataclass
class Address:
    """Somebody who takes JSON by HTTP, such as a chat's incoming webhook. For hooks that may wait, such as `incident`.

    Args:
        url: with http:// or https://. Who knows it may often post there, so no error of ours shows it.
        timeout_s: how long the other end may be silent.

    Raises:
        PluginError: it begins with something else (urllib would open `file:///etc/passwd` as well), has a space or a
            control character, no host, or a port that is none.
    """

    url: str = field(repr=False)
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("https://", "http://")):
            raise PluginError("it needs an address that begins with https:// or http://")
        if _NOT_IN_URL.search(self.url):
            raise PluginError("its address has a space or a control character, such as the end of a line, in it")
        if not _has_host(self.url):
            raise PluginError("its address has no proper host and port: https://HOST/PATH or https://HOST:PORT/PATH")

    def post(self, value: object) -> None:
        """Post a value as JSON.

        Raises:
            OSError: nobody took it: there was no answer in time, or one that is no success. A redirect is none; to follow
                it would be a GET, without the value (urllib.request.HTTPRedirectHandler, Python 3.11).
        """
        body, headers = json.dumps(value).encode(), {"Content-Type": "application/json"}
        asked = Request(self.url, body, headers)  # noqa: S310  its scheme was looked at
        try:
            with build_opener(_OnlySuccess).open(asked, timeout=self.timeout_s):
                pass
        except OSError:
            raise
        except (HTTPException, ValueError) as error:  # InvalidURL has the path in its text (http.client, Python 3.11)
            raise OSError(f"it cannot be posted: {type(error).__name__}") from None


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class _OnlySuccess(HTTPErrorProcessor):
    """Takes any other status for an error, in place of looking for who could make good of it."""

    def http_response(self, request: Request, response: Any) -> Any:
        if 200 <= response.status < 300:
            return response
        error = HTTPError(request.host, response.status, response.reason, response.headers, response)
        error.close()  # with all that it holds: whoever reports it does not know that it is a file, too
        raise error

    def https_response(self, request: Request, response: Any) -> Any:
        return self.http_response(request, response)


@dataclass(frozen=True)
class Panel:
    """A table for people.

    Attributes:
        title: a few words.
        columns: their names.
        rows: each with as many cells as there are columns: text, numbers or None.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]


@dataclass(frozen=True)
class Told:
    """A family that a plugin has told of one run: `samples` are label values, in the order of `labels`, and the value."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    samples: dict[tuple[str, ...], float]


class Metrics:
    """Takes in what `collect` has to say of one run.

    Args:
        plugin: whose metrics they are: all names begin with `hookd_<plugin>_`.
        ever: every series that the plugin has made up so far, shared between calls.
        room: how many series it may still make: a list of that one number, shared between the runs of one round.

    Attributes:
        told: by name, what was said.
        dropped: series over a limit.
    """

    def __init__(self, plugin: str, ever: set[tuple[str, ...]], room: list[int]) -> None:
        self._plugin, self._ever, self._room = plugin, ever, room
        self.told: dict[str, Told] = {}
        self.dropped = 0

    def gauge(self, name: str, help: str, value: float, labels: Mapping[str, str] | None = None) -> None:  # noqa: A002
        """Tell the present value of something.

        Args:
            name: without `hookd_<plugin>_`, in base units: `spread_seconds`.
            help: a sentence.
            value: a number; NaN is served as such.
            labels: names and values, of which there are few; `run` is added.

        Raises:
            PluginError: the name or a label is none, or a label has a new value for ever, such as a step.
        """
        self._tell(name, "gauge", help, value, labels or {})

    def counter(self, name: str, help: str, value: float, labels: Mapping[str, str] | None = None) -> None:  # noqa: A002
        """Tell the total of something that only grows; the plugin keeps it. Served with `_total`, which `name` has not.

        Raises:
            PluginError: see `gauge`.
        """
        self._tell(name, "counter", help, value, labels or {})

    def _tell(self, name: str, kind: str, text: str, value: float, labels: Mapping[str, str]) -> None:
        full = self._checked(name, labels)
        if type(text) is not str or not text.isprintable():  # what is no text would break every scrape
            raise PluginError(f"{full}: its help must be a line of text, not {text!r}")
        number = float(value)
        if kind == "counter" and not (math.isfinite(number) and number >= 0):
            raise PluginError(f"{full}: a counter cannot be {value!r}")
        names = tuple(labels)
        told = self.told.setdefault(full, Told(full, kind, text, names, {}))
        if told.kind != kind or set(told.labels) != set(names):
            raise PluginError(f"{full} was a {told.kind} with the labels {told.labels} a moment ago")
        values = tuple(_text(full, label, labels[label]) for label in told.labels)
        if values not in told.samples and not self._has_room((full, *values)):
            self.dropped += 1
            return
        told.samples[values] = number

    def _checked(self, name: str, labels: Mapping[str, str]) -> str:
        full = f"hookd_{self._plugin}_{name}"
        if not _NAME.match(name) or name.endswith(("_total", "_sum", "_count", "_bucket", "_info")):
            raise PluginError(
                f"{full!r} cannot be the name of a metric: lower-case words, and '_total' comes by itself"
            )
        for label in labels:
            if not _NAME.match(label) or label.startswith("__") or label in RESERVED_LABELS:
                raise PluginError(f"{full}: {label!r} cannot be a label")
            if label in UNBOUNDED:
                raise PluginError(f"{full}: {label!r} has a new value for ever, so it cannot be a label")
        return full

    def _has_room(self, series: tuple[str, ...]) -> bool:
        if self._room[0] <= 0 or (series not in self._ever and len(self._ever) >= MAX_EVER):
            return False
        self._ever.add(series)
        self._room[0] -= 1
        return True


def _text(metric: str, label: str, value: Any) -> str:
    """Give a label's value as it may be served: short, printable, no fraction.

    Raises:
        PluginError: it is a float.
    """
    if isinstance(value, float):
        raise PluginError(f"{metric}: {label}={value!r} is a float, which has too many values for a label")
    return "".join(char if char.isprintable() else " " for char in str(value)[:MAX_LABEL])
