"""Parse and validate single values of a configuration: plugins, addresses, numbers, paths.

Each reader takes a value from TOML, the environment or a flag. It raises ValueError or ConfigError if the value is invalid.
The message of a ValueError continues a sentence that begins with the value: "is not a path".
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from hookd.wire.agent import PluginConfig

from hookd.errors import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_HOST = re.compile(r"[\w*.-]+\Z", re.ASCII)
_LISTEN = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^\s:/\[\]]*)):(?P<port>\d{1,5})\Z")


@dataclass(frozen=True)
class PluginSpec:
    """One plugin to enable.

    Attributes:
        name: as in `hookd plugin list`.
        options: as texts; the plugin's `configure` converts them.
        by_name: whether a person named it; a mutator may only then change the training.
    """

    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    by_name: bool = True

    @classmethod
    def parse(cls, text: str) -> PluginSpec:
        """Parse `NAME[:key=value,…]`, the form of `-p`.

        Raises:
            ConfigError: the text has another form.
        """
        name, colon, rest = text.strip().partition(":")
        if not _NAME.match(name):
            raise ConfigError(f"'{text}' does not start with a plugin's name", hint="Write NAME or NAME:key=value,…")
        if colon and not rest:
            raise ConfigError(f"'{text}' has no options after the colon", hint=f"Write {name} or {name}:key=value,…")
        options: dict[str, str] = {}
        for part in rest.split(",") if rest else ():
            key, equals, value = part.partition("=")
            key = key.strip()
            if not equals or not _NAME.match(key):
                raise ConfigError(
                    f"'{part}' of plugin {name} is not of the form key=value", hint=f"Write {name}:key=value,key=value"
                )
            if key in options:
                raise ConfigError(f"plugin {name} has the option {key} twice")
            options[key] = value.strip()
        return cls(name, options)

    @classmethod
    def from_json(cls, value: object) -> PluginSpec:
        """Return the plugin of an `as_json` object, or of a string in the form of `-p`.

        Raises:
            ConfigError: the value has another form.
        """
        if isinstance(value, str):
            return cls.parse(value)
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            raise ConfigError("a plugin must be a string NAME:key=value,… or an object with a name")
        options = value.get("options", {})
        if not isinstance(options, Mapping):
            raise ConfigError(f"the options of plugin {value['name']} are not an object")
        spec = cls.parse(value["name"])
        texts = {str(key): as_text(option) for key, option in options.items()}
        return cls(spec.name, {**spec.options, **texts}, bool(value.get("by_name", True)))

    def as_json(self) -> PluginConfig:
        """Return the object that `from_json` reads."""
        return {"name": self.name, "options": dict(self.options), "by_name": self.by_name}

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name


@dataclass(frozen=True)
class Address:
    """A TCP address to listen on; with port 0 the kernel chooses one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `HOST:PORT`, `:PORT` (all interfaces) or `[V6]:PORT`.

        Raises:
            ConfigError: the text has another form.
        """
        match = _LISTEN.match(text.strip())
        if match is None or int(match["port"]) > 65535:
            raise ConfigError(
                f"'{text}' is not an address to listen on", hint="Write HOST:PORT, for example 127.0.0.1:9465"
            )
        return cls(match["v6"] or match["host"] or "0.0.0.0", int(match["port"]))  # noqa: S104  asked for by ':PORT'

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def as_text(value: object) -> str:
    """Return a TOML or JSON value as it is written on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_number(low: float, high: float = float("inf")) -> Callable[[object], float]:
    """Return a reader of numbers from `low` to `high`, both included."""

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError("is not a number")  # noqa: TRY004  all readers raise the same
        number = float(value)
        if not low <= number <= high:
            raise ValueError(
                f"must be {low:g} or more" if high == float("inf") else f"must be from {low:g} to {high:g}"
            )
        return number

    return read


def read_whole(low: int) -> Callable[[object], int]:
    """Return a reader of whole numbers from `low`."""

    def read(value: object) -> int:
        number = read_number(low)(value)
        if number != int(number):
            raise ValueError("must be a whole number")
        return int(number)

    return read


def read_path(value: object) -> Path:
    """Read one path."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError("is not a path")
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ValueError("is below a home directory, and there is none: write the whole path") from None


def read_paths(value: object) -> tuple[Path, ...]:
    """Read a list of paths, or a string in the form of PATH."""
    parts = value.split(os.pathsep) if isinstance(value, str) else value
    if not isinstance(parts, Sequence):
        raise ValueError("is not a list of paths")  # noqa: TRY004  all readers raise the same
    return tuple(read_path(part) for part in parts)


def read_patterns(value: object) -> tuple[str, ...]:
    """Read a list or string of patterns for plugin names; it may be empty."""
    parts = re.split(r"[\s,;]+", value.strip()) if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
        raise ValueError("is not a list of patterns for plugin names")
    return tuple(pattern for pattern in parts if pattern)


def read_hosts(value: object) -> tuple[str, ...]:
    """Read a list or string of host names or patterns, without scheme, port and path."""
    parts = re.split(r"[\s,;]+", value.strip()) if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
        raise ValueError("is not a list of host names")
    wrong = [host for host in parts if host and not _HOST.match(host)]
    if wrong:
        raise ValueError(f"has {wrong[0]!r}, which is not a host name: write it without scheme, port and path")
    return tuple(host.lower() for host in parts if host)


def read_plugins(value: object) -> tuple[PluginSpec, ...]:
    """Read a list or string of plugins."""
    # A comma separates options, so several plugins in one string are separated by blanks or semicolons.
    parts = re.split(r"[\s;]+", value.strip()) if isinstance(value, str) else value
    if not isinstance(parts, Sequence):
        raise ValueError("is not a list of plugins")  # noqa: TRY004
    specs = tuple(part if isinstance(part, PluginSpec) else PluginSpec.from_json(part) for part in parts if part)
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise ValueError("names a plugin twice")
    return specs


def read_address(value: object) -> Address:
    """Read `HOST:PORT`."""
    if isinstance(value, Address):
        return value
    if not isinstance(value, str):
        raise ValueError("is not an address; write HOST:PORT")  # noqa: TRY004
    return Address.parse(value)


def read_text(value: object) -> str:
    """Return a text that must not be empty."""
    if not isinstance(value, str) or not value:
        raise ValueError("is not a text")
    return value


def read_url(value: object) -> str:
    """Read an address of the web."""
    parts = urlsplit(url := read_text(value))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("is not an address; write https://HOST/PATH")
    return url


def read_endpoint(value: object) -> str:
    """Read the address of an OpenTelemetry collector, or "" for none; without a path it is the usual one."""
    if value == "":
        return ""
    url = read_url(value)
    return url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/v1/metrics"


def read_detail(value: object) -> str:
    """Read the detail of /metrics: "auto" or "all"."""
    if value not in ("auto", "all"):
        raise ValueError("is neither 'auto' nor 'all'")
    return str(value)


def read_switch(value: object) -> bool:
    """Read true or false; an environment variable may also be 1 or 0."""
    words = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise ValueError("is neither true nor false")  # noqa: TRY004  all readers raise the same
    return value
