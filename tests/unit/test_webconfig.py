"""The file that says who may read over TCP: accepted as by exporter-toolkit, and refused with the line of the error."""

from __future__ import annotations

import os
import subprocess

import pytest

from hookd.errors import ConfigError
from hookd.tool import cli
from hookd.tool.config import webconfig
from hookd.tool.daemon.web.access import check
from tests.support import served

HASH = "$2b$04$Ovq8t8Fd3nI6b6xjgZqVFuJ1HCiPKwBsFfKsuAWJ5q0oLrO1dS.1K"
TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return served.certificates(tmp_path_factory.mktemp("web"))


GOOD = {
    "nothing": "",
    "TLS": TLS,
    "NoClientCert": TLS + "  client_auth_type: NoClientCert\n",
    "RequestClientCert": TLS + "  client_auth_type: RequestClientCert\n",
    **{
        how: f"{TLS}  client_auth_type: {how}\n  client_ca_file: ca.crt\n"
        for how in ("RequireAnyClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert")
    },
    "versions": TLS + "  min_version: TLS12\n  max_version: TLS13\n  prefer_server_cipher_suites: false\n",
    "ciphers": TLS + "  cipher_suites: [TLS_AES_128_GCM_SHA256, TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256]\n",
    "users": f"basic_auth_users:\n  alice: {HASH}\n",
    "headers": "http_server_config:\n  http2: true\n  headers:\n    X-Frame-Options: deny\n    X-XSS-Protection: 0\n",
}


@pytest.mark.parametrize("name", GOOD)
def test_what_promtool_accepts_is_read(directory, name):
    path = served.web_config(directory, GOOD[name])
    check(path)
    if served.has("promtool"):
        subprocess.run(["promtool", "check", "web-config", path], check=True, timeout=60, capture_output=True)


def test_the_example_is_one_and_promtool_accepts_it(directory):
    path = served.web_config(directory, (served.WEB / "web-config.yml").read_text())
    check(path)
    config = webconfig.read(path)
    assert (config.tls.cert_file, config.tls.client_auth_type) == (
        directory / "server.crt",
        "RequireAndVerifyClientCert",
    )
    assert list(config.users) == ["prometheus"]
    if served.has("promtool"):
        subprocess.run(["promtool", "check", "web-config", path], check=True, timeout=60, capture_output=True)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("tls_server_confg: {}\n", 1, "no key 'tls_server_confg'; did you mean 'tls_server_config'?"),
        (TLS + "  cert_fle: x\n", 4, "did you mean 'cert_file'?"),
        (TLS + "  cert_file: again.crt\n", 4, "twice"),
        ("tls_server_config:\n  key_file: server.key\n", 2, "no cert_file"),
        (TLS + "  client_auth_type: Maybe\n", 4, "not 'Maybe'"),
        (TLS + "  client_auth_type: RequireAndVerifyClientCert\n", 2, "requires a client_ca_file"),
        (TLS + "  client_ca_file: ca.crt\n", 2, "without a client_auth_type"),
        (TLS + "  client_allowed_sans: [prometheus]\n", 2, "RequireAndVerifyClientCert"),
        (TLS + "  min_version: TLS10\n", 4, "is broken"),
        (TLS + "  min_version: TLS13\n  max_version: TLS12\n", 4, "above max_version"),
        (TLS + "  cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]\n", 4, "no cipher suite"),
        (TLS + "  max_version: TLS12\n  cipher_suites: [TLS_AES_128_GCM_SHA256]\n", 5, "one of TLS 1.2"),
        (TLS + "  cipher_suites: TLS_AES_128_GCM_SHA256\n", 4, "a list is required"),
        (TLS + "  curve_preferences: [X25519]\n", 4, "not supported"),
        ("tls_server_config:\n  cert: |\n    PEM\n  key_file: server.key\n", 2, "as cert_file"),
        ("rate_limit: {interval: 1s}\n", 1, "limits of its own"),
        ("http_server_config:\n  headers:\n    X-Powered-By: us\n", 3, "no key 'X-Powered-By'"),
        ("http_server_config:\n  headers:\n    X-Frame-Options: maybe\n", 3, "deny or sameorigin"),
        ('http_server_config:\n  headers:\n    X-XSS-Protection: "0\\r\\nA: b"\n', 3, "not allowed in a header"),
        ("http_server_config:\n  http2: perhaps\n", 2, "true or false"),
        ("basic_auth_users:\n  alice: secret\n", 2, "not a bcrypt hash"),
        (f"basic_auth_users:\n  a:b: {HASH}\n", 2, "colon"),
        ("basic_auth_users: [alice]\n", 1, "is not a table"),
        ("a: [\n", 2, "not valid YAML"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path, text, line, words):
    path = served.web_config(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        webconfig.read(path)
    assert any(one.startswith(f"{path}:{line}: ") and words in one for one in caught.value.message.splitlines()), (
        caught.value.message
    )
    assert "secret" not in caught.value.message


def test_all_mistakes_are_reported_at_once(tmp_path):
    path = served.web_config(tmp_path, "a: 1\nb: 2\nbasic_auth_users:\n  c: d\n")
    with pytest.raises(ConfigError) as caught:
        webconfig.read(path)
    assert len(caught.value.message.splitlines()) == 3


def replaced(directory, name, data):
    path = directory / name
    path.unlink()
    if data is None:
        os.mkfifo(path)
    elif data:
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("server.crt", b"no PEM", "cannot be used"),
        ("server.key", b"", "No such file"),
        ("server.key", None, "is not a regular file"),
        ("ca.crt", b"", "No such file"),
        ("web-config.yml", None, "is not a regular file"),
        ("web-config.yml", b"", "cannot read"),
        ("web-config.yml", b"x" * (webconfig.MAX_BYTES + 1), "is longer"),
        ("web-config.yml", b"\xff\xfe\x00", "is not valid YAML"),
        ("web-config.yml", b"[" * 100_000, "is not valid YAML"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_none_is_waited_for(tmp_path, directory, name, data, words):
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = served.web_config(tmp_path, GOOD["RequireAndVerifyClientCert"])
    replaced(tmp_path, name, data)
    with pytest.raises(ConfigError) as caught:
        check(path)
    assert words in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_a_key_with_a_passphrase_is_refused_and_none_is_asked_for(tmp_path, directory):
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    subprocess.run(
        ["openssl", "pkey", "-in", directory / "server.key", "-aes256", "-passout", "pass:x", "-out", tmp_path / "server.key"],
        check=True, timeout=60,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="passphrase"):
        check(served.web_config(tmp_path, TLS))


def test_config_check_reads_the_web_configuration_too(tmp_path, capsys):
    path = tmp_path / "hookd.toml"
    path.write_text(f'[serve]\nweb_config = "{served.web_config(tmp_path, "users: {}")}"\n')
    assert cli.main(["config", "check", str(path)]) == 2
    assert f"{tmp_path}/web-config.yml:1: the file has no key 'users'" in capsys.readouterr().err
    served.web_config(tmp_path, "")
    assert cli.main(["config", "check", str(path)]) == 0
