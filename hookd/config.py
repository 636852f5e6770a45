"""What a person asks for: which plugins with which options, and how the daemon is to serve. Tool side.

    # hookd.toml
    [serve]
    listen = "127.0.0.1:9465"
    linger_s = 120

    [attach]
    plugins = ["nan", "timing", "activations:every=20"]

    [metrics]
    detail = "auto"

    [plugins.activations]        # options of a plugin, wherever it is enabled without naming them
    every = 50

Flags win over the environment (`HOOKD_LISTEN`, `HOOKD_LINGER_S`...), which wins over the file, which wins over the
defaults of `ServeConfig`, where each of them stands once.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hookd.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_LISTEN = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^\s:/\[\]]*)):(?P<port>\d{1,5})\Z")


@dataclass(frozen=True)
class PluginSpec:
    """One plugin to enable.

    Attributes:
        name: as in `hookd plugin list`.
        options: as written, the plugin's `configure` gives them their types.
        by_name: whether a person named it; only then may a mutating plugin change the training.
    """

    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    by_name: bool = True

    @classmethod
    def parse(cls, text: str) -> PluginSpec:
        """Read `NAME[:key=value,…]`, the form of `-p`.

        Raises:
            ConfigError: with what is wrong and how to write it.
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
                raise ConfigError(f"'{part}' is no option of plugin {name}", hint=f"Write {name}:key=value,key=value")
            if key in options:
                raise ConfigError(f"plugin {name} is given the option {key} twice")
            options[key] = value.strip()
        return cls(name, options)

    @classmethod
    def from_json(cls, value: object) -> PluginSpec:
        """Read what `as_json` wrote, or a string in the form of `-p`.

        Raises:
            ConfigError: the value has another shape.
        """
        if isinstance(value, str):
            return cls.parse(value)
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            raise ConfigError("a plugin is a string NAME:key=value,… or an object with a name")
        options = value.get("options", {})
        if not isinstance(options, Mapping):
            raise ConfigError(f"the options of plugin {value['name']} are no object")
        spec = cls.parse(value["name"])
        texts = {str(key): _text(option) for key, option in options.items()}
        return cls(spec.name, {**spec.options, **texts}, bool(value.get("by_name", True)))

    def as_json(self) -> dict[str, Any]:
        """Give the object that `from_json` reads."""
        return {"name": self.name, "options": dict(self.options), "by_name": self.by_name}

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name


DEFAULT_PLUGINS = tuple(PluginSpec(name, {}, by_name=False) for name in ("nan", "timing", "activations"))
"""The observers that are enabled when nobody names any."""


@dataclass(frozen=True)
class Address:
    """Where to listen on TCP. Port 0 lets the kernel choose."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `HOST:PORT`, `:PORT` (every interface) or `[V6]:PORT`.

        Raises:
            ConfigError: the text is none of these.
        """
        match = _LISTEN.match(text.strip())
        if match is None or int(match["port"]) > 65535:
            raise ConfigError(
                f"'{text}' is no address to listen on", hint="Write HOST:PORT, for example 127.0.0.1:9465"
            )
        return cls(match["v6"] or match["host"] or "0.0.0.0", int(match["port"]))  # noqa: S104  asked for by ':PORT'

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _text(value: object) -> str:
    """Write a TOML or JSON value as it would stand on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(low: float, high: float = float("inf")) -> Callable[[object], float]:
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError("is no number")  # noqa: TRY004  one kind of error for every reader
        number = float(value)
        if not low <= number <= high:
            raise ValueError(
                f"must be {low:g} or more" if high == float("inf") else f"must be from {low:g} to {high:g}"
            )
        return number

    return read


def _whole(low: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        number = _number(low)(value)
        if number != int(number):
            raise ValueError("must be a whole number")
        return int(number)

    return read


def _path(value: object) -> Path:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError("is no path")
    return Path(value).expanduser()


def _paths(value: object) -> tuple[Path, ...]:
    parts = value.split(os.pathsep) if isinstance(value, str) else value
    if not isinstance(parts, Sequence):
        raise ValueError("is no list of paths")  # noqa: TRY004  one kind of error for every reader
    return tuple(_path(part) for part in parts)


def _plugins(value: object) -> tuple[PluginSpec, ...]:
    # A comma separates options, so several plugins in one string are separated by blanks or semicolons.
    parts = re.split(r"[\s;]+", value.strip()) if isinstance(value, str) else value
    if not isinstance(parts, Sequence):
        raise ValueError("is no list of plugins")  # noqa: TRY004
    specs = tuple(part if isinstance(part, PluginSpec) else PluginSpec.from_json(part) for part in parts if part)
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise ValueError("names a plugin twice")
    return specs


def _listen(value: object) -> Address:
    if isinstance(value, Address):
        return value
    if not isinstance(value, str):
        raise ValueError("is no address; write HOST:PORT")  # noqa: TRY004
    return Address.parse(value)


def _detail(value: object) -> str:
    if value not in ("auto", "all"):
        raise ValueError("is neither 'auto' nor 'all'")
    return str(value)


def _setting(table: str, default: Any, read: Callable[[object], Any]) -> Any:
    return field(default=default, metadata={"table": table, "read": read})


@dataclass(frozen=True)
class ServeConfig:
    """How a daemon serves.

    Attributes:
        listen: where `/metrics` is; loopback unless told otherwise.
        control: the control socket; None stands for `default_control_path`.
        state_dir: where incidents are kept; None stands for `default_state_dir`.
        linger_s: how long a dead target's last counters are served, in seconds.
        poll_s: how often heartbeats are looked at, in seconds.
        scan_s: how often new processes are looked for, in seconds.
        plugins: what is enabled where an attach names none.
        plugin_dirs: where plugins are sought beside those installed.
        timeout_s: how long an attach may take, in seconds.
        lease_s: how long an agent stays when nobody holds it any more, in seconds.
        budget: the share of a step's time that observers may take, 0 to 1.
        detail: "auto" serves the modules that matter, "all" serves every one.
        max_series: series of one target in detail "auto".
        max_depth: in detail "auto", modules down to this depth below the root are served.
        top_modules: in detail "auto", so many of the costliest modules are served whatever their depth.
        retention_days: how long incidents are kept, in days.
        plugin_options: by plugin, options that hold wherever an attach does not give them.
    """

    listen: Address = _setting("serve", Address("127.0.0.1", 9465), _listen)  # noqa: RUF009  gives a field
    control: Path | None = _setting("serve", None, _path)  # noqa: RUF009  gives a field
    state_dir: Path | None = _setting("serve", None, _path)  # noqa: RUF009  gives a field
    linger_s: float = _setting("serve", 120.0, _number(0))
    poll_s: float = _setting("serve", 1.0, _number(0.05, 60))
    scan_s: float = _setting("serve", 2.0, _number(0.05, 3600))
    retention_days: float = _setting("serve", 30.0, _number(0))
    plugins: tuple[PluginSpec, ...] = _setting("attach", DEFAULT_PLUGINS, _plugins)
    plugin_dirs: tuple[Path, ...] = _setting("attach", (), _paths)
    timeout_s: float = _setting("attach", 10.0, _number(0.1, 3600))
    lease_s: float = _setting("attach", 900.0, _number(1))
    budget: float = _setting("attach", 0.01, _number(0, 1))
    detail: str = _setting("metrics", "auto", _detail)
    max_series: int = _setting("metrics", 1000, _whole(0))
    max_depth: int = _setting("metrics", 2, _whole(0))
    top_modules: int = _setting("metrics", 50, _whole(0))
    plugin_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def with_options(self, spec: PluginSpec) -> PluginSpec:
        """Give `spec` the options that the configuration holds for it and that it does not give itself."""
        return replace(spec, options={**self.plugin_options.get(spec.name, {}), **spec.options})


SETTINGS: Mapping[str, Field[Any]] = {f.name: f for f in fields(ServeConfig) if f.metadata}


def load(flags: Mapping[str, object], environ: Mapping[str, str], path: Path | None = None) -> ServeConfig:
    """Build the daemon's configuration: flags over environment over file over defaults.

    Args:
        flags: by field of `ServeConfig`; a None is a flag that was not given.
        environ: the environment; `HOOKD_CONFIG` names the file where `path` does not.
        path: the file.

    Raises:
        ConfigError: every mistake that was found, one a line.
    """
    if path is None and environ.get("HOOKD_CONFIG"):
        path = Path(environ["HOOKD_CONFIG"])
    values, problems = _from_file(path) if path is not None else ({}, [])
    for name in SETTINGS:
        variable = "HOOKD_" + name.upper()
        if environ.get(variable):
            _read(name, environ[variable], variable, values, problems)
        if flags.get(name) is not None:
            _read(name, flags[name], "--" + name.replace("_", "-"), values, problems)
    if unknown := set(flags) - set(SETTINGS):
        raise ValueError(f"no such settings: {sorted(unknown)}")
    if problems:
        raise ConfigError("\n".join(problems))
    return ServeConfig(**values)


def check(path: Path) -> ServeConfig:
    """Read a configuration file for `hookd config check`.

    Raises:
        ConfigError: every mistake that was found, one a line.
    """
    return load({}, {}, path)


def _from_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Read the file's settings, and what is wrong with them."""
    tables = _toml(path)
    values: dict[str, Any] = {}
    problems: list[str] = []
    known: dict[str, list[str]] = {"plugins": []}
    for name, setting in SETTINGS.items():
        known.setdefault(setting.metadata["table"], []).append(name)
    for table, content in tables.items():
        if table not in known:
            problems.append(f"{path}: unknown table [{table}]{_meant(table, known, SETTINGS)}")
        elif not isinstance(content, Mapping):
            problems.append(f"{path}: {table} is no table; write [{table}]")
        elif table == "plugins":
            values["plugin_options"] = _plugin_options(content, path, problems)
        else:
            for key, value in content.items():
                if key in known[table]:
                    _read(key, value, f"{path}: [{table}] {key}", values, problems)
                else:
                    problems.append(f"{path}: [{table}] has no key '{key}'{_meant(key, known[table], SETTINGS)}")
    return values, problems


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}", hint="Give another file with --config.") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is no TOML: {exc}") from exc


def _plugin_options(content: Mapping[str, Any], path: Path, problems: list[str]) -> dict[str, dict[str, str]]:
    options: dict[str, dict[str, str]] = {}
    for name, table in content.items():
        if isinstance(table, Mapping) and not any(isinstance(value, (Mapping, list)) for value in table.values()):
            options[name] = {key: _text(value) for key, value in table.items()}
        else:
            problems.append(f"{path}: [plugins.{name}] is no table of plain options")
    return options


def _read(name: str, value: object, source: str, values: dict[str, Any], problems: list[str]) -> None:
    try:
        values[name] = SETTINGS[name].metadata["read"](value)
    except ConfigError as exc:
        problems.append(f"{source}: {exc.message}. {exc.hint}".rstrip(". ") + ".")
    except ValueError as exc:
        reason = "is no number" if "convert" in str(exc) else str(exc)
        problems.append(f"{source}: {value!r} {reason}.")


def _meant(word: str, here: Mapping[str, object] | Sequence[str], everywhere: Mapping[str, Field[Any]]) -> str:
    """Say which of the known words was probably meant, and in which table it belongs."""
    if word in everywhere:
        return f"; it belongs under [{everywhere[word].metadata['table']}]"
    close = difflib.get_close_matches(word, list(here), 1, 0.6) or difflib.get_close_matches(word, everywhere, 1, 0.6)
    return f"; did you mean '{close[0]}'?" if close else f"; there are {', '.join(sorted(here))}"


def default_control_path(environ: Mapping[str, str], uid: int) -> Path:
    """Name the control socket: `$XDG_RUNTIME_DIR/hookd/control.sock`, for root `/run/hookd/control.sock`.

    A user without a runtime directory (cron, a bare ssh) gets a directory of their own among the temporary files,
    whose owner both sides check before they use it.
    """
    if uid == 0:
        return Path("/run/hookd/control.sock")
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "hookd" / "control.sock"
    return Path(environ.get("TMPDIR") or "/tmp") / f"hookd-{uid}" / "control.sock"  # noqa: S108  owner is checked


def default_state_dir(environ: Mapping[str, str], uid: int) -> Path:
    """Name the directory of the incident store: `/var/lib/hookd` for root, else below `$XDG_STATE_HOME`."""
    if uid == 0:
        return Path("/var/lib/hookd")
    state = environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "hookd"


def host_path(host: str) -> Path:
    """Read the value of `--host` or `HOOKD_HOST`: `unix://PATH`.

    Raises:
        ConfigError: it is something else; the control API is never served over TCP.
    """
    scheme, _, rest = host.partition("://")
    if scheme != "unix" or not rest.startswith("/"):
        raise ConfigError(f"'{host}' is no control socket", hint="Write unix:///path/to/control.sock")
    return Path(rest)
