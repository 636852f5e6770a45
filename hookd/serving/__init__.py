"""The API for daemon plugins; their hooks are in `hookd.serving.hookspecs`.

The plugin in the target imports from `hookd`, the daemon plugin from here: the daemon has no torch, and the target does not
have this package.
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
from hookd.wire.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hookd.wire.page import Family

__all__ = ["Address", "DaemonPlugin", "Metrics", "Panel", "PluginError", "Reading", "hookimpl"]

hookimpl = HookimplMarker("hookd_daemon")
"""Marks a method as a hook of `hookd.serving.hookspecs`."""

MAX_SERIES = 200
"""Series of one plugin at a time, over all runs."""
MAX_EVER = 2000
"""Series of one plugin in total, without the label `run`; reached only if label values change all the time."""
MAX_LABEL = 100
"""Characters of a label value; the rest is cut off."""
RESERVED_LABELS = frozenset({"run", "job", "instance", "pod", "le", "quantile"})
UNBOUNDED = frozenset({"step", "steps", "epoch", "iteration", "time", "timestamp", "pid", "message", "error", "shape"})
"""Labels whose values are unbounded."""
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_NOT_IN_URL = re.compile(r"[\x00-\x20\x7f]")


class DaemonPlugin:
    """Base class of daemon plugins.

    Attributes:
        name: the middle part of all its metrics' names; the same as that of the plugin in the target, if there is one.
        every_s: seconds from one `collect` to the next, if it should be called less often than about once a second;
            `configure` may set it.
        readmit: whether it is readmitted, on probation, after a quarantine.
    """

    name: str = ""
    every_s: float = 0.0
    readmit: bool = True


@dataclass(frozen=True)
class Reading:
    """Metrics and state that one target has published, copied at most about a second ago.

    Attributes:
        run: the value of the label `run`.
        rank: the value of the label `rank`.
        pid: of the process, as the daemon sees it.
        state: running, hung, detached, lost and so on: see `hookd_target_state`.
        step: number of optimizer steps counted; None before the first copy.
        families: the metrics on its page; `value` and `series` read them.
    """

    run: str
    rank: str
    pid: int
    state: str
    step: int | None
    families: Sequence[Family] = field(default=(), repr=False)

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of one series, named as on `/metrics`: `value("hookd_steps_total")`; None if there is none."""
        return next((value for present, value in self.series(name) if present == labels), None)

    def numbers(self) -> Iterator[tuple[Family, dict[str, str], float]]:
        """Yield the family (`name`, `kind`, `help`), the labels and the value of each series of all gauges and counters."""
        for family in self.families:
            if family.kind != "histogram":
                yield from ((family, *row) for row in self.series(family.name))

    def series(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yield the labels (without run and rank) and the value of each series with a given name.

        A counter's name may end with `_total`; a histogram's must end with `_sum` or `_count`.
        """
        for family in self.families:
            part = _PARTS.get(name[len(family.name) :]) if name.startswith(family.name) else None
            if part is not None and (family.kind == "histogram") == (part in ("sum", "count")):
                for values, cells in family.series:
                    value = cells[0] if part == "value" else cells[-1] if part == "sum" else sum(cells[:-1])
                    yield dict(zip(family.labels, values, strict=True)), value


_PARTS = {"": "value", "_total": "value", "_sum": "sum", "_count": "count"}


@dataclass
class Address:
    """A receiver of JSON over HTTP, such as a chat's incoming webhook.

    For hooks that may block, such as `incident`.

    Args:
        url: http:// or https://. Often the URL alone permits posting, so error messages do not contain it.
        timeout_s: how long the receiver may be silent.

    Raises:
        PluginError: the URL has another scheme, a space or a control character, no host, or an invalid port.
    """

    url: str = field(repr=False)
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("https://", "http://")):  # urllib would open `file:///etc/passwd` as well
            raise PluginError("the URL must begin with https:// or http://")
        if _NOT_IN_URL.search(self.url):
            raise PluginError("the URL contains a space or a control character, such as a newline")
        if not _has_host(self.url):
            raise PluginError("the URL has no valid host and port: write https://HOST/PATH or https://HOST:PORT/PATH")

    def post(self, value: object) -> None:
        """Post a value as JSON.

        Raises:
            OSError: the connection failed, no answer came in time, or the status was not 2xx; a redirect is an error too.
        """
        body, headers = json.dumps(value).encode(), {"Content-Type": "application/json"}
        request = Request(self.url, body, headers)  # noqa: S310  __post_init__ has checked the scheme
        try:
            with build_opener(_OnlySuccess).open(request, timeout=self.timeout_s):
                pass
        except OSError:
            raise
        except (HTTPException, ValueError) as error:  # InvalidURL has the path in its text (http.client, Python 3.11)
            raise OSError(f"cannot post to the URL: {type(error).__name__}") from None


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class _OnlySuccess(HTTPErrorProcessor):
    """Treats any status other than 2xx as an error, without looking for a handler.

    Following a redirect would send a GET without the value (urllib.request.HTTPRedirectHandler, Python 3.11).
    """

    def http_response(self, request: Request, response: Any) -> Any:
        if 200 <= response.status < 300:
            return response
        error = HTTPError(request.host, response.status, response.reason, response.headers, response)
        error.close()  # an HTTPError is a file too, and the code that reports it does not close it
        raise error

    def https_response(self, request: Request, response: Any) -> Any:
        return self.http_response(request, response)


@dataclass(frozen=True)
class Panel:
    """A table for the status page.

    Attributes:
        title: a few words.
        columns: their names.
        rows: each has one cell per column: text, a number or None.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]


@dataclass(frozen=True)
class ReportedFamily:
    """A family that a plugin has reported for one run.

    Attributes:
        name: with `hookd_<plugin>_`.
        kind: gauge or counter.
        help: a sentence.
        labels: names, without `run`.
        samples: values by label values, which are in the order of `labels`.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    samples: dict[tuple[str, ...], float]


class Metrics:
    """Receives the metrics that `collect` reports for one run.

    Args:
        plugin: name of the plugin: all metric names begin with `hookd_<plugin>_`.
        ever: every series that the plugin has created so far, shared between calls.
        room: how many series it may still create, as a list of this one number, shared between the runs of one round.

    Attributes:
        families: the reported families, by name.
        dropped: number of samples dropped because of a limit on series.
    """

    def __init__(self, plugin: str, ever: set[tuple[str, ...]], room: list[int]) -> None:
        self._plugin, self._ever, self._room = plugin, ever, room
        self.families: dict[str, ReportedFamily] = {}
        self.dropped = 0

    def gauge(self, name: str, help: str, value: float, labels: Mapping[str, str] | None = None) -> None:  # noqa: A002
        """Report the current value of a gauge.

        Args:
            name: without `hookd_<plugin>_`, in base units: `spread_seconds`.
            help: a sentence.
            value: a number; NaN is served as such.
            labels: names and values; keep the number of distinct values small. `run` is added.

        Raises:
            PluginError: the name or a label is invalid, or the values of a label are unbounded, such as steps.
        """
        self._tell(name, "gauge", help, value, labels or {})

    def counter(self, name: str, help: str, value: float, labels: Mapping[str, str] | None = None) -> None:  # noqa: A002
        """Report the total of a counter; the plugin itself keeps the total.

        It is served with the suffix `_total`, which `name` does not have.

        Raises:
            PluginError: see `gauge`.
        """
        self._tell(name, "counter", help, value, labels or {})

    def _tell(self, name: str, kind: str, text: str, value: float, labels: Mapping[str, str]) -> None:
        full = self._checked(name, labels)
        if type(text) is not str or not text.isprintable():  # anything else would break every scrape
            raise PluginError(f"{full}: the help must be one line of printable text, not {text!r}")
        number = float(value)
        if kind == "counter" and not (math.isfinite(number) and number >= 0):
            raise PluginError(f"{full}: a counter must be a finite number >= 0, not {value!r}")
        names = tuple(labels)
        family = self.families.setdefault(full, ReportedFamily(full, kind, text, names, {}))
        if family.kind != kind or set(family.labels) != set(names):
            raise PluginError(f"{full} was already reported as a {family.kind} with the labels {family.labels}")
        values = tuple(_text(full, label, labels[label]) for label in family.labels)
        if values not in family.samples and not self._has_room((full, *values)):
            self.dropped += 1
            return
        family.samples[values] = number

    def _checked(self, name: str, labels: Mapping[str, str]) -> str:
        full = f"hookd_{self._plugin}_{name}"
        if not _NAME.match(name) or name.endswith(("_total", "_sum", "_count", "_bucket", "_info")):
            raise PluginError(
                f"{full!r} cannot be the name of a metric: use lower-case words without suffixes; '_total' is added"
            )
        for label in labels:
            if not _NAME.match(label) or label.startswith("__") or label in RESERVED_LABELS:
                raise PluginError(f"{full}: {label!r} cannot be a label")
            if label in UNBOUNDED:
                raise PluginError(f"{full}: {label!r} cannot be a label, because its values are unbounded")
        return full

    def _has_room(self, series: tuple[str, ...]) -> bool:
        if self._room[0] <= 0 or (series not in self._ever and len(self._ever) >= MAX_EVER):
            return False
        self._ever.add(series)
        self._room[0] -= 1
        return True


def _text(metric: str, label: str, value: Any) -> str:
    """Return a label value as it is served: at most 100 characters, unprintable ones replaced by spaces.

    Raises:
        PluginError: it is a float.
    """
    if isinstance(value, float):
        raise PluginError(f"{metric}: {label}={value!r} is a float, which has too many values for a label")
    return printable(str(value)[:MAX_LABEL])
