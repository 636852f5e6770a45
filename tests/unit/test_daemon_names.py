"""Under which names a daemon may be asked: a web page whose own name is made to lead here is not answered."""

from __future__ import annotations

import logging
import socket

import bcrypt
import pytest
from aiohttp import web

from hookd.errors import ConfigError
from hookd.tool.config import Address, check, load
from hookd.tool.daemon.web import host_names, tcp
from hookd.tool.daemon.web.host_names import HostNames
from tests.support import served


async def hello(_):
    return web.Response(text="hello\n")


@pytest.fixture
def serve(stack):
    def start(path=None, host="127.0.0.1", **how):
        app = web.Application()
        app.router.add_get("/", hello)
        return stack.enter_context(served.in_thread(lambda: tcp.serving(app, Address(host, 0), path, **how)))

    return start


def asked(url, *heads, context=None, line="GET / HTTP/1.1"):
    head = "\r\n".join([line, *heads, "Connection: close", "", ""])
    answer = served.exchange(url, head.encode(), context)
    return int(answer.split(b" ", 2)[1]), answer.decode()


@pytest.mark.parametrize(
    "name", ["localhost", "localhost:9465", "LOCALHOST.", "127.0.0.1:80", "127.9.9.9", "[::1]:9465", "[::1]"]
)
@pytest.mark.parametrize("is_local", [True, False])
def test_loopback_is_known_everywhere(name, is_local):
    assert HostNames(is_local=is_local).refusal(name) is None


@pytest.mark.parametrize("name", ["10.0.0.7", "10.0.0.7:9465", "[2001:db8::1]:9465", "2001:db8::1", "[fe80::1%eth0]"])
def test_an_address_of_the_machine_is_known_where_others_can_connect_to_it(name):
    assert HostNames(is_local=False).refusal(name) is None
    assert HostNames(is_local=True).refusal(name) is not None


@pytest.mark.parametrize(
    "name",
    [
        "evil.example", "evil.example:9465", "127.0.0.1.evil.example", "localhost.evil.example", "localhost@evil.example", "", " ",
        "evil.example:localhost", "[::1].evil.example", "127.1", "0x7f000001", "localhost evil.example", "localhost,evil.example",
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_local", [True, False])
def test_any_other_name_is_refused(name, is_local):
    assert HostNames(["node1", "*.example.org"], is_local=is_local).refusal(name) is not None


def test_names_of_the_configuration_and_patterns_are_known():
    known = HostNames(["Node1", "*.example.org"], is_local=True)
    assert known.refusal("node1:9465") is None
    assert known.refusal("gpu7.EXAMPLE.org.") is None
    assert known.refusal("example.org") is not None
    assert known.refusal("gpu7.example.org.evil.example") is not None


@pytest.mark.parametrize("name", ["gpu1.example.org", "10.0.0.7"])
def test_on_loopback_a_refusal_names_what_is_answered_and_no_address_that_is_not(name):
    reported = HostNames(is_local=True).refusal(f"{name}:9465")
    assert "localhost or 127.0.0.1" in reported
    assert "address of this machine" not in reported
    assert f"--allow-host {name}" in reported
    assert f'allow_hosts = ["{name}"]' in reported
    allowed = load({"allow_hosts": (name,)}, {}).allow_hosts
    assert HostNames(allowed, is_local=True).refusal(f"{name}:9465") is None


def test_where_others_can_connect_a_refusal_leaves_the_address():
    assert "ask for an address of this machine" in HostNames(is_local=False).refusal("gpu1.example.org")


def test_the_machines_own_name_is_known_where_others_can_connect(monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "gethostname", lambda: "Node1.corp.example")
    (tmp_path / "resolv.conf").write_text("nameserver 10.0.0.1\nsearch pods.example corp.example.\n")
    monkeypatch.setattr(host_names, "_RESOLVER", tmp_path / "resolv.conf")
    known = HostNames(is_local=False)
    for name in ("node1", "node1.corp.example:9465", "node1.pods.example"):
        assert known.refusal(name) is None
        assert HostNames(is_local=True).refusal(name) is not None
    assert known.refusal("node1.evil.example") is not None
    assert known.refusal("node2.corp.example") is not None


def test_a_page_whose_name_leads_here_reads_nothing_and_an_operator_learns_what_to_do(serve, caplog):
    url = serve()
    for _ in range(3):
        status, answer = asked(url, "Host: evil.example")
        assert (status, "hello" in answer) == (421, False)
        assert "--allow-host evil.example" in answer
    assert len([one for one in caplog.records if "evil.example" in one.getMessage()]) == 1
    assert asked(url, "Host: localhost")[0] == 200
    assert asked(serve(allow_hosts=["evil.example"]), "Host: evil.example")[0] == 200


def test_neither_a_second_host_nor_an_absolute_uri_hides_the_name(serve):
    url = serve()
    assert asked(url, "Host: localhost", "Host: evil.example")[0] in (400, 421)
    assert asked(url, "Host: localhost", line="GET http://evil.example/ HTTP/1.1")[0] == 421
    assert asked(url, "Host: evil.example", line="GET http://localhost/ HTTP/1.1")[0] == 421
    assert asked(url, "Host: localhost", line="GET http://127.0.0.1/ HTTP/1.1")[0] == 200
    assert asked(url, line="GET / HTTP/1.0")[0] == 200  # no browser


def test_what_stands_in_the_header_reaches_no_log_as_it_is(serve, caplog):
    assert asked(serve(), "Host: evil\x1b[31m.example")[0] in (400, 421)
    assert "\x1b" not in caplog.text
    known = HostNames(is_local=True)
    for n in range(1000):
        known.refusal(f"evil{n}.example")
    assert len([one for one in caplog.records if one.levelno == logging.WARNING]) < 50


def test_where_a_certificate_or_a_password_guards_it_every_name_will_do(serve, tmp_path):
    hashed = bcrypt.hashpw(b"p", bcrypt.gensalt(4)).decode()
    guarded = served.web_config(tmp_path, f"basic_auth_users:\n  p: {hashed}\n")
    assert asked(serve(guarded), "Host: node1.example", "Authorization: Basic cDpw")[0] == 200
    assert asked(serve(guarded), "Host: node1.example")[0] == 401
    served.certificates(tmp_path)
    url = serve(served.web_config(tmp_path, "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"))
    assert asked(url, "Host: node1.example", context=served.client_context(tmp_path))[0] == 200


def test_a_page_of_another_site_may_link_to_it_and_not_load_it(serve):
    url, cross = serve(), "Sec-Fetch-Site: cross-site"
    for mode in ("cors", "no-cors", "same-origin", "websocket"):
        assert asked(url, "Host: localhost", cross, f"Sec-Fetch-Mode: {mode}")[0] == 403
    assert asked(url, "Host: localhost", cross, "Sec-Fetch-Mode: navigate")[0] == 200
    assert asked(url, "Host: localhost", "Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: cors")[0] == 200


def test_names_are_configured_as_everything_else(tmp_path):
    file = tmp_path / "hookd.toml"
    file.write_text('[serve]\nallow_hosts = ["Node1", "*.example.org"]\n')
    assert check(file).allow_hosts == ("node1", "*.example.org")
    assert load({}, {"HOOKD_ALLOW_HOSTS": "a, b.example"}).allow_hosts == ("a", "b.example")
    for wrong in ("http://node1", "node1:9465", "node1/metrics"):
        with pytest.raises(ConfigError, match="without scheme, port and path"):
            load({"allow_hosts": (wrong,)}, {})
