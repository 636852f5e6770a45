"""Load the configuration of the daemon and of the plugins that it enables.

    # hookd.toml
    [serve]
    listen = "127.0.0.1:9465"
    linger_s = 120

    [attach]
    plugins = ["nan", "timing", "activations:every=20", "learning"]

    [metrics]
    detail = "auto"

    [hang]
    after_s = 60

    [eval]
    allow = true                 # anyone with access to the control socket may evaluate expressions in targets

    [[rule]]                     # processes to attach to automatically; the first matching rule decides
    match = "train.py"
    user = "alice"

    [[webhook]]                  # where incidents are sent
    url = "https://alerts.example.org/hookd"

    [plugins]
    allow = ["nan", "acme_*"]    # which plugins may be used; all if there is no such list

    [plugins.activations]        # options of a plugin that apply unless it is enabled with its own
    every = 50

Flags override the environment (`HOOKD_LISTEN`, `HOOKD_LINGER_S`...), which overrides the file, which overrides the
defaults of `ServeConfig`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hookd.api.compatibility import nearest
from hookd.errors import ConfigError
from hookd.tool.config import ownership
from hookd.tool.config.rules import Rule, read_rules
from hookd.tool.config.values import (
    Address,
    PluginSpec,
    as_text,
    read_address,
    read_detail,
    read_endpoint,
    read_hosts,
    read_number,
    read_path,
    read_paths,
    read_patterns,
    read_plugins,
    read_switch,
    read_whole,
)
from hookd.tool.config.webhooks import Webhook, read_webhooks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "DEFAULT_PLUGINS",
    "SETTINGS",
    "Address",
    "PluginSpec",
    "Rule",
    "ServeConfig",
    "Webhook",
    "check",
    "default_control_path",
    "default_state_dir",
    "host_path",
    "load",
]

DEFAULT_PLUGINS = tuple(PluginSpec(name, {}, by_name=False) for name in ("nan", "timing", "activations", "learning"))
"""The observers that are enabled if no plugin is named."""


@dataclass(frozen=True)
class Setting:
    """A setting of `[table]`; in the file its name lacks the prefix `table_`.

    Attributes:
        read: returns its value, from TOML, the environment or a flag.
    """

    table: str
    read: Callable[[object], Any]


def _setting(table: str, default: Any, read: Callable[[object], Any]) -> Any:
    """Declare a setting as a field."""
    return field(default=default, metadata={"setting": Setting(table, read)})


@dataclass(frozen=True)
class ServeConfig:
    """The settings of a daemon.

    Attributes:
        listen: address of `/metrics`; on the loopback interface by default.
        web_config: file with TLS and passwords for this address, in the format of exporter-toolkit; see `webconfig`.
        allow_hosts: host names that requests may use besides the machine's own, or patterns such as `*.example.org`.
        control: the control socket; None means `default_control_path`.
        state_dir: directory of the incident store; None means `default_state_dir`.
        linger_s: how long a dead target's last counters are served, in seconds.
        poll_s: interval at which heartbeats are read, in seconds.
        scan_s: interval at which new processes are searched for, in seconds.
        targets_per_user: maximum number of processes of one user that are served at a time; later ones are not served.
        plugins: plugins to enable if an attach names none.
        plugin_dirs: directories to search for plugins, besides the installed ones.
        plugins_allow: patterns of names; a plugin that matches none of them is refused. None allows all.
        timeout_s: timeout of an attach, in seconds.
        lease_s: how long an agent stays in its target after its last connection was closed, in seconds.
        budget: the share of a step's time that observers may take, 0 to 1.
        detail: "auto" serves the modules that matter, "all" serves every module.
        max_series: maximum number of series of one target in detail "auto".
        max_depth: in detail "auto", modules down to this depth below the root are served.
        top_modules: in detail "auto", this many of the costliest modules are served at any depth, and all modules
            that a plugin's options select.
        replicas: whether every rank serves its modules, also in a data-parallel job.
        otlp_endpoint: URL of an OpenTelemetry collector to which metrics are sent, with its path; "" for none.
        otlp_interval_s: interval at which they are sent, in seconds.
        retention_days: how long incidents are retained, in days.
        hang_after_s: a rank hangs if it is silent for this many seconds, unless it is often silent for long.
        hang_factor: such a rank hangs after this many times its usual silence in that phase, or the time of this many steps.
        hang_start_s: the same in seconds, before its third step is done and while torch compiles.
        eval_allow: whether `hookd eval` is answered: `allow` in the table `eval`.
        retention_mb: maximum size of the incident store, in MB (10^6 bytes); beyond it the oldest incidents are deleted.
        fingerprints_mb: maximum size of all fingerprints that are kept, in MB; beyond it the oldest are deleted. 0: none is kept.
        plugin_options: by plugin, options that apply where an attach does not give them.
        daemon_plugin_options: by daemon plugin, its options: the tables `daemon_plugins.NAME`.
        rules: processes to attach to automatically, the first matching rule decides; see `rules`.
        webhooks: where incidents are sent; see `webhooks`.
    """

    listen: Address = _setting("serve", Address("127.0.0.1", 9465), read_address)  # noqa: RUF009  gives a field
    web_config: Path | None = _setting("serve", None, read_path)  # noqa: RUF009  gives a field
    allow_hosts: tuple[str, ...] = _setting("serve", (), read_hosts)
    control: Path | None = _setting("serve", None, read_path)  # noqa: RUF009  gives a field
    state_dir: Path | None = _setting("serve", None, read_path)  # noqa: RUF009  gives a field
    linger_s: float = _setting("serve", 120.0, read_number(0))
    poll_s: float = _setting("serve", 1.0, read_number(0.05, 60))
    scan_s: float = _setting("serve", 1.0, read_number(0.05, 3600))
    retention_days: float = _setting("serve", 30.0, read_number(0))
    retention_mb: float = _setting("serve", 100.0, read_number(1))
    fingerprints_mb: float = _setting("serve", 512.0, read_number(0))
    targets_per_user: int = _setting("serve", 256, read_whole(1))
    plugins: tuple[PluginSpec, ...] = _setting("attach", DEFAULT_PLUGINS, read_plugins)
    plugin_dirs: tuple[Path, ...] = _setting("attach", (), read_paths)
    plugins_allow: tuple[str, ...] | None = _setting("plugins", None, read_patterns)  # noqa: RUF009  gives a field
    timeout_s: float = _setting("attach", 10.0, read_number(0.1, 3600))
    lease_s: float = _setting("attach", 900.0, read_number(1))
    budget: float = _setting("attach", 0.01, read_number(0, 1))
    detail: str = _setting("metrics", "auto", read_detail)
    max_series: int = _setting("metrics", 1000, read_whole(0))
    max_depth: int = _setting("metrics", 2, read_whole(0))
    top_modules: int = _setting("metrics", 50, read_whole(0))
    replicas: bool = _setting("metrics", False, read_switch)
    otlp_endpoint: str = _setting("otlp", "", read_endpoint)
    otlp_interval_s: float = _setting("otlp", 60.0, read_number(1, 3600))
    hang_after_s: float = _setting("hang", 60.0, read_number(0.1))
    hang_factor: float = _setting("hang", 5.0, read_number(1))
    hang_start_s: float = _setting("hang", 600.0, read_number(0.1))
    eval_allow: bool = _setting("eval", False, read_switch)
    plugin_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    daemon_plugin_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    webhooks: tuple[Webhook, ...] = ()

    def allows(self, plugin: str) -> bool:
        """Whether a plugin may be used."""
        return self.plugins_allow is None or any(fnmatchcase(plugin, pattern) for pattern in self.plugins_allow)

    def with_options(self, spec: PluginSpec) -> PluginSpec:
        """Return `spec` with the configured options that it does not set itself."""
        return replace(spec, options={**self.plugin_options.get(spec.name, {}), **spec.options})


SETTINGS: Mapping[str, Setting] = {f.name: f.metadata["setting"] for f in fields(ServeConfig) if f.metadata}


def load(flags: Mapping[str, object], environ: Mapping[str, str], path: Path | None = None) -> ServeConfig:
    """Load the daemon's configuration: flags over environment over file over defaults.

    Args:
        flags: by field of `ServeConfig`; None for a flag that was not given.
        environ: the environment; `HOOKD_CONFIG` names the file if `path` is None.
        path: of the file.

    Raises:
        ConfigError: all mistakes, one per line.
    """
    if path is None and environ.get("HOOKD_CONFIG"):
        path = Path(environ["HOOKD_CONFIG"])
    reading = _from_file(path) if path is not None else _Reading()
    for name in SETTINGS:
        variable = "HOOKD_" + name.upper()
        if environ.get(variable):
            reading.add(name, environ[variable], variable)
        if flags.get(name) is not None:
            reading.add(name, flags[name], "--" + name.replace("_", "-"))
    if unknown := set(flags) - set(SETTINGS):
        raise ValueError(f"no such settings: {sorted(unknown)}")
    config = ServeConfig(**reading.values)
    if "plugins" not in reading.values:  # a new version may have more of them than a list allows
        config = replace(config, plugins=tuple(spec for spec in config.plugins if config.allows(spec.name)))
    problems = [*reading.problems, *_forbidden(config)]
    if problems:
        raise ConfigError("\n".join(problems))
    return config


@dataclass
class _Reading:
    """Settings that have been read: their values by name, and a message for each mistake."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, value: object, source: str) -> None:
        """Read the value of a setting from a place that messages call `source`."""
        try:
            self.values[name] = SETTINGS[name].read(value)
        except ConfigError as exc:
            self.problems.append(f"{source}: {exc.message}. {exc.hint}".rstrip(". ") + ".")
        except ValueError as exc:
            reason = "is not a number" if "convert" in str(exc) else str(exc)
            self.problems.append(f"{source}: {value!r} {reason}.")


def _forbidden(config: ServeConfig) -> list[str]:
    """Return a message for each enabled plugin that is not allowed."""
    return [
        f"{where}: plugin {spec.name} is not allowed by [plugins] allow."
        for where, specs in plugins_asked_for(config).items()
        for spec in specs
        if not config.allows(spec.name)
    ]


def plugins_asked_for(config: ServeConfig) -> dict[str, tuple[PluginSpec, ...]]:
    """Return the plugins that a configuration enables, by place in the file."""
    by_rule = {f"[[rule]] {number}": rule.plugins for number, rule in enumerate(config.rules, 1)}
    return {"[attach] plugins": config.plugins, **by_rule}


def check(path: Path) -> ServeConfig:
    """Read a configuration file for `hookd config check`.

    Raises:
        ConfigError: all mistakes, one per line.
    """
    return load({}, {}, path)


def _from_file(path: Path) -> _Reading:
    """Read the file's settings."""
    tables = _toml(path)
    reading = _Reading()
    values, problems = reading.values, reading.problems
    known: dict[str, list[str]] = {"plugins": [], "daemon_plugins": [], "rule": [], "webhook": []}
    for name, setting in SETTINGS.items():
        known.setdefault(setting.table, []).append(_key(name))
    for table, content in tables.items():
        if table not in known:
            problems.append(f"{path}: unknown table [{table}]; {_meant(table, known, SETTINGS)}")
        elif table == "rule":
            values["rules"] = read_rules(content, str(path), problems)
        elif table == "webhook":
            values["webhooks"] = read_webhooks(content, str(path), problems)
        elif not isinstance(content, Mapping):
            problems.append(f"{path}: {table} is not a table; write [{table}]")
        elif table == "daemon_plugins":
            values["daemon_plugin_options"] = _plugin_options(content, path, problems, table)
        elif table == "plugins":
            rest = dict(content)
            if isinstance(rest.get("allow"), (list, str)):
                reading.add("plugins_allow", rest.pop("allow"), f"{path}: [plugins] allow")
            values["plugin_options"] = _plugin_options(rest, path, problems)
        else:
            for key, value in content.items():
                if key in known[table]:
                    name = key if key in SETTINGS else f"{table}_{key}"
                    reading.add(name, value, f"{path}: [{table}] {key}")
                else:
                    problems.append(f"{path}: [{table}] has no key '{key}'; {_meant(key, known[table], SETTINGS)}")
    return reading


def _key(name: str) -> str:
    """Return the key of a setting in its table of the file."""
    return name.removeprefix(SETTINGS[name].table + "_")


def _toml(path: Path) -> Mapping[str, object]:
    try:
        with ownership.open_checked(path) as file:
            return tomllib.load(file)
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}", hint="Give the path of another file.") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is not valid TOML: {exc}") from exc


def _plugin_options(
    content: Mapping[str, object], path: Path, problems: list[str], above: str = "plugins"
) -> dict[str, dict[str, str]]:
    options: dict[str, dict[str, str]] = {}
    for name, table in content.items():
        if isinstance(table, Mapping) and not any(isinstance(value, (Mapping, list)) for value in table.values()):
            options[name] = {key: as_text(value) for key, value in table.items()}
        else:
            problems.append(f"{path}: [{above}.{name}] is not a table of plain options")
    return options


def _meant(word: str, here: Mapping[str, object] | Sequence[str], everywhere: Mapping[str, Setting]) -> str:
    """Return a hint for an unknown word: the table that it belongs to, or that of `nearest`."""
    if word in everywhere:
        table = everywhere[word].table
        return f"it belongs under [{table}]" + ("" if _key(word) == word else f" as {_key(word)}")
    return nearest(word, here, everywhere)


def default_control_path(environ: Mapping[str, str], uid: int) -> Path:
    """Return the path of the control socket.

    It is `$XDG_RUNTIME_DIR/hookd/control.sock`, for root `/run/hookd/control.sock`.

    A user without a runtime directory (cron, a bare ssh) gets a directory of their own in `$TMPDIR` or /tmp. Both the daemon
    and its clients check the owner of that directory before they use it.
    """
    if uid == 0:
        return Path("/run/hookd/control.sock")
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "hookd" / "control.sock"
    return Path(environ.get("TMPDIR") or "/tmp") / f"hookd-{uid}" / "control.sock"  # noqa: S108  owner is checked


def default_state_dir(environ: Mapping[str, str], uid: int) -> Path:
    """Return the directory of the incident store.

    It is `/var/lib/hookd` for root, else `$XDG_STATE_HOME/hookd`, by default `~/.local/state/hookd`.

    Without a home (a container with a random uid, which has no entry in /etc/passwd) it is next to the control socket.
    """
    if uid == 0:
        return Path("/var/lib/hookd")
    state = environ.get("XDG_STATE_HOME")
    with contextlib.suppress(RuntimeError):
        return (Path(state) if state else Path.home() / ".local" / "state") / "hookd"
    return default_control_path(environ, uid).parent / "state"


def host_path(host: str) -> Path:
    """Parse the value of `--host` or `HOOKD_HOST`: `unix://PATH`.

    Raises:
        ConfigError: it has another form; the control API is never served over TCP.
    """
    scheme, _, rest = host.partition("://")
    if scheme != "unix" or not rest.startswith("/"):
        raise ConfigError(f"'{host}' is not a control socket", hint="Write unix:///path/to/control.sock")
    return Path(rest)
