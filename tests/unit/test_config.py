from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from hookd.errors import ConfigError
from hookd.tool import config
from hookd.tool.config import Address, PluginSpec, ServeConfig


def test_a_plugin_is_written_as_name_and_options():
    spec = PluginSpec.parse("gradclip:mode=norm,max_norm=0.5")
    assert (spec.name, dict(spec.options), spec.by_name) == ("gradclip", {"mode": "norm", "max_norm": "0.5"}, True)
    assert str(spec) == "gradclip:mode=norm,max_norm=0.5"
    assert PluginSpec.from_json(spec.as_json()) == spec


def test_a_plugin_that_nobody_named_is_not_named_by_being_passed_on():
    spec = PluginSpec("gradclip", {}, by_name=False)
    assert PluginSpec.from_json(json.loads(json.dumps(spec.as_json()))) == spec


def test_an_option_may_hold_colons_equal_signs_and_nothing():
    assert dict(PluginSpec.parse("nan:path=a:b=c,empty=").options) == {"path": "a:b=c", "empty": ""}


@pytest.mark.parametrize(
    "text", ["", ":", "Nan", "nan:", "nan:every", "nan:=1", "nan:every=1,every=2", "../nan", "nan:a=1,,b=2"]
)
def test_a_plugin_that_is_written_wrong_is_refused_with_the_text(text):
    with pytest.raises(ConfigError) as caught:
        PluginSpec.parse(text)
    assert caught.value.exit_code == 2
    assert "nan" in caught.value.message + caught.value.hint or text in caught.value.message


@pytest.mark.parametrize("part", ["every", "=1", ""])
def test_an_option_without_a_key_or_value_is_not_called_an_unknown_option(part):
    with pytest.raises(ConfigError, match=rf"^'{part}' of plugin nan is not of the form key=value$"):
        PluginSpec.parse(f"nan:a=1,{part}")


@pytest.mark.parametrize("value", [None, 3, {}, {"name": 3}, {"name": "nan", "options": []}, ["nan"]])
def test_a_plugin_in_json_that_is_no_plugin_is_refused(value):
    with pytest.raises(ConfigError):
        PluginSpec.from_json(value)


def test_the_default_plugins_are_observers_that_nobody_named():
    assert [spec.name for spec in config.DEFAULT_PLUGINS] == ["nan", "timing", "activations", "learning"]
    assert not any(spec.by_name for spec in config.DEFAULT_PLUGINS)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:9465", "127.0.0.1", 9465),
        (":80", "0.0.0.0", 80),
        ("[::1]:0", "::1", 0),
        ("node-7:1", "node-7", 1),
        ("h:65535", "h", 65535),
    ],
)
def test_an_address_is_host_and_port(text, host, port):
    assert Address.parse(text) == Address(host, port)


@pytest.mark.parametrize("text", ["9465", "localhost", "a:b", "1:2:3", "x:65536", "http://x:1", ""])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError):
        Address.parse(text)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "hookd.toml"
    path.write_text(
        '[serve]\nlisten = "127.0.0.1:1"\nlinger_s = 5\n[attach]\nplugins = ["nan:every=2", "timing"]\n'
        '[metrics]\ndetail = "all"\n[plugins.nan]\nevery = 7\nstrict = true\n'
    )
    return path


def test_flags_win_over_the_environment_over_the_file_over_the_defaults(file):
    environ = {"HOOKD_LISTEN": "127.0.0.1:2", "HOOKD_LINGER_S": "6"}
    found = config.load({"listen": "127.0.0.1:3", "linger_s": None}, environ, file)
    assert found.listen.port == 3
    assert found.linger_s == 6
    assert found.detail == "all"
    assert found.poll_s == ServeConfig().poll_s


def test_the_environment_can_name_the_file(file):
    assert config.load({}, {"HOOKD_CONFIG": str(file)}).linger_s == 5


def test_options_of_the_file_hold_where_an_attach_gives_none(file):
    found = config.check(file)
    assert dict(found.with_options(PluginSpec("nan")).options) == {"every": "7", "strict": "true"}
    assert dict(found.with_options(found.plugins[0]).options) == {"every": "2", "strict": "true"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[serv]\na = 1", "did you mean 'serve'"),
        ("[serve]\nlingr_s = 1", "did you mean 'linger_s'"),
        ('[serve]\ndetail = "all"', "belongs under [metrics]"),
        ("serve = 1", "write [serve]"),
        ("[serve]\nlinger_s = true", "is not a number"),
        ("[serve]\nlinger_s = -1", "must be 0 or more"),
        ("[attach]\nbudget = 2", "must be from 0 to 1"),
        ("[metrics]\nmax_series = 1.5", "whole number"),
        ('[metrics]\ndetail = "some"', "neither 'auto' nor 'all'"),
        ('[serve]\nlisten = "x"', "HOST:PORT"),
        ('[attach]\nplugins = ["nan", "nan"]', "twice"),
        ('[attach]\nplugins = ["NaN"]', "plugin's name"),
        ("[plugins.nan]\nx = [1]", "plain options"),
        ("nonsense", "not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_what_was_meant(tmp_path, text, words):
    path = tmp_path / "hookd.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.check(path)
    assert words in caught.value.message
    assert str(path) in caught.value.message


def test_all_mistakes_are_reported_at_once(tmp_path):
    path = tmp_path / "hookd.toml"
    path.write_text('[serve]\nlinger_s = "x"\npoll_s = 0\n[nope]\n')
    with pytest.raises(ConfigError) as caught:
        config.load({"listen": "x"}, {"HOOKD_LEASE_S": "y"}, path)
    assert len(caught.value.message.splitlines()) == 5


def test_a_file_that_is_not_there_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        config.load({}, {}, tmp_path / "none.toml")


def test_every_setting_is_documented():
    for name in config.SETTINGS:
        assert f"\n    {name}: " in inspect.cleandoc(ServeConfig.__doc__ or "")


def test_root_and_users_have_their_own_default_places():
    assert config.default_control_path({}, 0) == Path("/run/hookd/control.sock")
    assert config.default_control_path({"XDG_RUNTIME_DIR": "/run/user/7"}, 7) == Path("/run/user/7/hookd/control.sock")
    assert config.default_control_path({"TMPDIR": "/scratch"}, 7) == Path("/scratch/hookd-7/control.sock")
    assert config.default_state_dir({"XDG_STATE_HOME": "/home/a/.state"}, 7) == Path("/home/a/.state/hookd")


def test_a_user_without_a_home_and_an_entry_in_passwd_has_places_too(monkeypatch):
    """As in a container that gets a random uid."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert config.default_state_dir({}, 1000770000) == Path("/tmp/hookd-1000770000/state")
    assert config.default_state_dir({"XDG_RUNTIME_DIR": "/run/user/7"}, 7) == Path("/run/user/7/hookd/state")
    with pytest.raises(ConfigError, match="there is none: write the whole path"):
        config.load({"state_dir": "~/state"}, {})


@pytest.mark.parametrize("host", ["", "/run/x.sock", "tcp://localhost:1", "unix://x.sock"])
def test_the_daemons_host_is_a_unix_socket_with_an_absolute_path(host):
    with pytest.raises(ConfigError):
        config.host_path(host)
    assert config.host_path("unix:///run/x.sock") == Path("/run/x.sock")


def test_an_allow_list_stands_beside_the_options_of_plugins(tmp_path):
    file = tmp_path / "hookd.toml"
    file.write_text('[plugins]\nallow = ["nan", "t*", "activations"]\n[plugins.activations]\nevery = 50\n')
    loaded = config.load({}, {}, file)
    assert [name for name in ("nan", "timing", "gradclip") if loaded.allows(name)] == ["nan", "timing"]
    assert loaded.plugin_options == {"activations": {"every": "50"}}
    assert config.load({}, {"HOOKD_PLUGINS_ALLOW": "nan timing activations"}, file).plugins_allow == (
        "nan",
        "timing",
        "activations",
    )
    assert config.load({}, {}).allows("whatever"), "without a list all are allowed"


def test_of_the_default_plugins_those_are_loaded_that_are_allowed():
    loaded = config.load({}, {"HOOKD_PLUGINS_ALLOW": "nan acme_*"})
    assert [spec.name for spec in loaded.plugins] == ["nan"]


@pytest.mark.parametrize(
    ("text", "environ", "said"),
    [
        ('[plugins]\nallow = ["nan"]\n', {"HOOKD_PLUGINS": "timing"}, "plugin timing is not allowed"),
        ('[plugins]\nallow = ["nan"]\n[attach]\nplugins = ["nan"]\n', {"HOOKD_PLUGINS": "mine"}, "plugin mine is not"),
        ('[plugins]\nallow = []\n[attach]\nplugins = []\n[[rule]]\nmatch = "x"\nplugins = ["nan"]\n', {}, "[[rule]] 1: plugin nan"),
        ("[plugins]\nallow = [1]\n", {}, "not a list of patterns"),
        ("[plugins]\nallow = 1\n", {}, "[plugins.allow] is not a table"),
    ],
)  # fmt: skip
def test_what_is_configured_must_be_allowed(tmp_path, text, environ, said):
    file = tmp_path / "hookd.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load({}, environ, file)
    assert said in caught.value.message
