"""What a person asks for: which plugins with which options, and how the daemon is to serve. Tool side.

    # hookd.toml
    [serve]
    listen = "127.0.0.1:9465"
    linger_s = 120

    [attach]
    plugins = ["nan", "timing", "activations:every=20"]

    [metrics]
    detail = "auto"

    [hang]
    after_s = 60

    [eval]
    allow = true                 # whoever may use the control socket may have expressions evaluated in targets

    [[rule]]                     # which processes it attaches to by itself; the first rule that fits decides
    match = "train.py"
    user = "alice"

    [[webhook]]                  # who is told of incidents
    url = "https://alerts.example.org/hookd"

    [plugins]
    allow = ["nan", "acme_*"]    # which plugins may be used at all; all of them where there is no such list

    [plugins.activations]        # options of a plugin, wherever it is enabled without naming them
    every = 50

Flags win over the environment (`HOOKD_LISTEN`, `HOOKD_LINGER_S`...), which wins over the file, which wins over the
defaults of `ServeConfig`, where each of them stands once.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hookd.errors import ConfigError
from hookd.tool.config import ownership
from hookd.tool.config.rules import Rule, read_rules
from hookd.tool.config.values import (
    Address,
    PluginSpec,
    as_text,
    read_address,
    read_detail,
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

DEFAULT_PLUGINS = tuple(PluginSpec(name, {}, by_name=False) for name in ("nan", "timing", "activations"))
"""The observers that are enabled when nobody names any."""


def _setting(table: str, default: Any, read: Callable[[object], Any]) -> Any:
    """Declare a setting. In the file it stands in `[table]`, without that word before its name."""
    return field(default=default, metadata={"table": table, "read": read})


@dataclass(frozen=True)
class ServeConfig:
    """How a daemon serves.

    Attributes:
        listen: where `/metrics` is; loopback unless told otherwise.
        web_config: TLS and passwords for it, a file in exporter-toolkit's format; see `webconfig`.
        allow_hosts: names under which it may be asked beside the machine's own, patterns such as `*.example.org` among them.
        control: the control socket; None stands for `default_control_path`.
        state_dir: where incidents are kept; None stands for `default_state_dir`.
        linger_s: how long a dead target's last counters are served, in seconds.
        poll_s: how often heartbeats are looked at, in seconds.
        scan_s: how often new processes are looked for, in seconds.
        targets_per_user: so many processes of one user are served at a time; those that come later are not.
        plugins: what is enabled where an attach names none.
        plugin_dirs: where plugins are sought beside those installed.
        plugins_allow: patterns of names; a plugin that none of them matches is refused. None: all may be used.
        timeout_s: how long an attach may take, in seconds.
        lease_s: how long an agent stays when nobody holds it any more, in seconds.
        budget: the share of a step's time that observers may take, 0 to 1.
        detail: "auto" serves the modules that matter, "all" serves every one.
        max_series: series of one target in detail "auto".
        max_depth: in detail "auto", modules down to this depth below the root are served.
        top_modules: in detail "auto", so many of the costliest modules are served whatever their depth,
            as are those that a person has selected by a plugin's options.
        retention_days: how long incidents are kept, in days.
        hang_after_s: a rank that is silent for so many seconds hangs, unless it is often silent for long.
        hang_factor: then it takes so many times its own usual silence in that phase, or so many of its steps.
        hang_start_s: so many seconds before its third step is done and while torch compiles.
        eval_allow: whether `hookd eval` is answered: `allow` in the table `eval`.
        retention_mb: how large their file may become, in MB (10^6 bytes); then the oldest go.
        plugin_options: by plugin, options that hold wherever an attach does not give them.
        daemon_plugin_options: by plugin, the options of its half in the daemon: the tables `daemon_plugins.NAME`.
        rules: which processes it attaches to by itself, the first that fits decides; see `rules`.
        webhooks: who is told of incidents; see `webhooks`.
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
        return self.plugins_allow is None or any(fnmatchcase(plugin, one) for one in self.plugins_allow)

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
    config = ServeConfig(**values)
    problems += _forbidden(config)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _forbidden(config: ServeConfig) -> list[str]:
    """Say which plugins are to be enabled and may not be used."""
    return [
        f"{where}: plugin {spec.name} is not allowed by [plugins] allow."
        for where, specs in plugins_asked_for(config).items()
        for spec in specs
        if not config.allows(spec.name)
    ]


def plugins_asked_for(config: ServeConfig) -> dict[str, tuple[PluginSpec, ...]]:
    """Return the plugins that a configuration enables, by the words for where it does."""
    by_rule = {f"[[rule]] {number}": rule.plugins for number, rule in enumerate(config.rules, 1)}
    return {"[attach] plugins": config.plugins, **by_rule}


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
    known: dict[str, list[str]] = {"plugins": [], "daemon_plugins": [], "rule": [], "webhook": []}
    for name, setting in SETTINGS.items():
        known.setdefault(setting.metadata["table"], []).append(_key(name))
    for table, content in tables.items():
        if table not in known:
            problems.append(f"{path}: unknown table [{table}]{_meant(table, known, SETTINGS)}")
        elif table == "rule":
            values["rules"] = read_rules(content, str(path), problems)
        elif table == "webhook":
            values["webhooks"] = read_webhooks(content, str(path), problems)
        elif not isinstance(content, Mapping):
            problems.append(f"{path}: {table} is no table; write [{table}]")
        elif table == "daemon_plugins":
            values["daemon_plugin_options"] = _plugin_options(content, path, problems, table)
        elif table == "plugins":
            rest = dict(content)
            if isinstance(rest.get("allow"), (list, str)):
                _read("plugins_allow", rest.pop("allow"), f"{path}: [plugins] allow", values, problems)
            values["plugin_options"] = _plugin_options(rest, path, problems)
        else:
            for key, value in content.items():
                if key in known[table]:
                    name = key if key in SETTINGS else f"{table}_{key}"
                    _read(name, value, f"{path}: [{table}] {key}", values, problems)
                else:
                    problems.append(f"{path}: [{table}] has no key '{key}'{_meant(key, known[table], SETTINGS)}")
    return values, problems


def _key(name: str) -> str:
    """Give the word by which a setting goes in its table of the file."""
    return name.removeprefix(SETTINGS[name].metadata["table"] + "_")


def _toml(path: Path) -> dict[str, Any]:
    try:
        with ownership.open_checked(path) as file:
            return tomllib.load(file)
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}", hint="Give the path of another file.") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is no TOML: {exc}") from exc


def _plugin_options(
    content: Mapping[str, Any], path: Path, problems: list[str], above: str = "plugins"
) -> dict[str, dict[str, str]]:
    options: dict[str, dict[str, str]] = {}
    for name, table in content.items():
        if isinstance(table, Mapping) and not any(isinstance(value, (Mapping, list)) for value in table.values()):
            options[name] = {key: as_text(value) for key, value in table.items()}
        else:
            problems.append(f"{path}: [{above}.{name}] is no table of plain options")
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
        table = everywhere[word].metadata["table"]
        return f"; it belongs under [{table}]" + ("" if _key(word) == word else f" as {_key(word)}")
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
    """Name the directory of the incident store: `/var/lib/hookd` for root, else below `$XDG_STATE_HOME`.

    A user without a home (a container with a random uid, which has no entry in /etc/passwd) gets one beside the control socket.
    """
    if uid == 0:
        return Path("/var/lib/hookd")
    state = environ.get("XDG_STATE_HOME")
    with contextlib.suppress(RuntimeError):
        return (Path(state) if state else Path.home() / ".local" / "state") / "hookd"
    return default_control_path(environ, uid).parent / "state"


def host_path(host: str) -> Path:
    """Read the value of `--host` or `HOOKD_HOST`: `unix://PATH`.

    Raises:
        ConfigError: it is something else; the control API is never served over TCP.
    """
    scheme, _, rest = host.partition("://")
    if scheme != "unix" or not rest.startswith("/"):
        raise ConfigError(f"'{host}' is no control socket", hint="Write unix:///path/to/control.sock")
    return Path(rest)
