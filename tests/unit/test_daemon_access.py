"""TLS, client certificates and passwords on a real port, and their renewal without a restart."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bcrypt
import pytest
from aiohttp import web

from hookd.errors import ConfigError
from hookd.tool.config import Address
from hookd.tool.daemon.web import passwords, tcp
from hookd.tool.daemon.web.site import _add_headers
from tests.support import served
from tests.support.processes import PATIENCE_S

TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
MTLS = TLS + "  client_auth_type: {}\n  client_ca_file: ca.crt\n"
HASHES = {name: bcrypt.hashpw(name.encode(), bcrypt.gensalt(4)).decode() for name in ("alice", "bob")}
USERS = "basic_auth_users:\n" + "".join(f"  {name}: {value}\n" for name, value in HASHES.items())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return served.certificates(tmp_path_factory.mktemp("web"))


@pytest.fixture
def directory(made, tmp_path):
    for file in made.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / file.name).chmod(0o600)
    return tmp_path


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Certificates that a stranger has made in the same way."""
    return served.certificates(tmp_path_factory.mktemp("other"))


async def hello(request):
    return web.Response(text=f"hello {request.query.get('name', '')}\n")


@pytest.fixture
def serve(stack):
    def start(path=None, limits=None, host="127.0.0.1"):
        app = web.Application()
        app.on_response_prepare.append(_add_headers)
        app.router.add_get("/", hello)
        return stack.enter_context(served.in_thread(lambda: tcp.serving(app, Address(host, 0), path, limits)))

    return start


def basic(name, password=None):
    return "Authorization: Basic " + base64.b64encode(f"{name}:{password or name}".encode()).decode()


def serial(url, directory):
    with served.connected(url, served.client_context(directory)) as connection:
        return connection.getpeercert()["serialNumber"]


def refused(url, context):
    """Return whether no answer comes: with TLS 1.3 a client only learns then that its certificate is not accepted."""
    try:
        return served.get(url, context=context)[0] is None
    except (ssl.SSLError, ConnectionError):
        return True


def test_without_a_web_configuration_everybody_reads_unencrypted(serve):
    url = serve()
    assert url.startswith("http://127.0.0.1:")
    assert served.get(url)[0] == 200


def test_with_a_certificate_nothing_is_served_unencrypted(serve, directory):
    url = serve(served.web_config(directory, TLS))
    assert url.startswith("https://")
    assert served.get(url, context=served.client_context(directory))[0] == 200
    assert served.exchange(url, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
    with pytest.raises(ssl.SSLCertVerificationError):
        served.get(url, context=ssl.create_default_context())


def test_old_versions_of_tls_are_refused_and_chosen_ones_hold(serve, directory):
    url = serve(served.web_config(directory, TLS + "  min_version: TLS13\n"))
    context = served.client_context(directory)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        served.get(url, context=context)
    with served.connected(url, served.client_context(directory)) as connection:
        assert connection.version() == "TLSv1.3"


def test_chosen_ciphers_hold_in_tls_1_2(serve, directory):
    name = "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256"
    url = serve(served.web_config(directory, f"{TLS}  max_version: TLS12\n  cipher_suites: [{name}]\n"))
    with served.connected(url, served.client_context(directory)) as connection:
        assert connection.cipher()[0] == "ECDHE-ECDSA-CHACHA20-POLY1305"


@pytest.mark.parametrize(
    ("how", "without"),
    [
        ("RequireAndVerifyClientCert", False),
        ("RequireAnyClientCert", False),  # stricter than Go, which accepts a stranger's
        ("VerifyClientCertIfGiven", True),
    ],
)
def test_who_has_no_certificate_of_the_authority_gets_no_answer(serve, directory, other, how, without):
    url = serve(served.web_config(directory, MTLS.format(how)))
    assert served.get(url, context=served.client_context(directory, has_certificate=True))[0] == 200
    assert refused(url, served.client_context(directory)) is not without
    context = served.client_context(directory)
    context.load_cert_chain(other / "prometheus.crt", other / "prometheus.key")
    assert refused(url, context)


def test_only_certificates_with_an_allowed_name_are_answered(serve, directory):
    text = MTLS.format("RequireAndVerifyClientCert") + "  client_allowed_sans: [{}]\n"
    context = served.client_context(directory, has_certificate=True)
    assert served.get(serve(served.web_config(directory, text.format("prometheus"))), context=context)[0] == 200
    assert refused(serve(served.web_config(directory, text.format("grafana"))), context)


def test_a_name_and_a_password_are_asked_for_and_it_is_not_revealed_which_is_wrong(serve, directory):
    url = serve(served.web_config(directory, USERS))
    status, answer = served.get(url)
    assert status == 401
    assert b"WWW-Authenticate: Basic" in answer
    assert served.get(url, headers=[basic("alice")])[0] == 200
    wrong = [served.get(url, headers=[basic(name, "no")]) for name in ("alice", "nobody")]
    assert [status for status, _ in wrong] == [401, 401]
    assert len({answer.partition(b"\r\n\r\n")[2] for _, answer in wrong}) == 1
    for header in (
        "Basic",
        "Basic !!",
        "Bearer x",
        "Basic " + base64.b64encode(b"\xff\xfe").decode(),
        "Basic YWxpY2U=",
    ):
        assert served.get(url, headers=[f"Authorization: {header}"])[0] == 401
    assert served.get(url, "/other", headers=[basic("alice")])[0] == 404
    assert served.get(url, "/other")[0] == 401, "what there is, only users learn"


def test_a_password_of_any_length_is_no_error(serve, directory):
    url = serve(served.web_config(directory, USERS))
    for password in ("x" * 73, "x" * 4000, "\0", "ü" * 100):
        assert served.get(url, headers=[basic("alice", password)])[0] == 401


def test_a_password_that_was_replaced_is_known_no_longer():
    other = bcrypt.hashpw(b"another", bcrypt.gensalt(4)).decode()

    async def asked():
        known = passwords.Passwords(passwords.GuessLimit())
        try:
            hashes = (HASHES["alice"], other, HASHES["alice"])
            return [await known.check({"alice": one}, "alice", "alice", "127.0.0.1") for one in hashes]
        finally:
            known.close()

    assert asyncio.run(asked()) == [True, False, True]


def test_a_guesser_is_bounded_and_locks_nobody_out_who_is_known(serve, directory):
    url = serve(served.web_config(directory, USERS))
    assert served.get(url, headers=[basic("alice")])[0] == 200
    answers = [served.get(url, headers=[basic("bob", f"guess{n}")])[0] for n in range(2 * passwords.GUESSES)]
    assert answers.count(401) <= passwords.GUESSES + 5
    assert answers[-1] == 429
    assert served.get(url, headers=[basic("alice")])[0] == 200
    assert served.get(url, headers=[basic("bob")])[0] == 429, "even the right one: it would be an oracle"


def test_fifty_scrapers_with_one_password_are_all_let_in(serve, directory):
    url = serve(served.web_config(directory, USERS))
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: served.get(url, headers=[basic("alice")])[0], range(50)))
    assert answers == [200] * 50


def test_a_slow_hash_holds_up_nobody_else(serve, directory, monkeypatch):
    hashed = bcrypt.hashpw(b"slow", bcrypt.gensalt(13)).decode()
    has_come, may_begin, is_hashing, check = *(threading.Event() for _ in range(3)), bcrypt.checkpw

    def checkpw(word, against):
        if against != hashed.encode():
            return check(word, against)
        has_come.set()
        assert may_begin.wait(PATIENCE_S)
        is_hashing.set()
        try:
            return check(word, against)
        finally:
            is_hashing.clear()

    url = serve(served.web_config(directory, f"{USERS}  slow: {hashed}\n"))
    assert served.get(url, headers=[basic("alice")])[0] == 200
    monkeypatch.setattr(bcrypt, "checkpw", checkpw)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.get, url, "/", None, [basic("slow")])
        assert has_come.wait(PATIENCE_S)
        assert served.get(url, headers=[basic("alice")])[0] == 200, "the event loop goes on"
        may_begin.set()
        answers = 0
        while not waiting.done():
            assert served.get(url, headers=[basic("alice")])[0] == 200
            answers += is_hashing.is_set()
        assert waiting.result()[0] == 200
        assert answers >= 2, "the hash does not hold the interpreter's lock"


def test_no_name_takes_another_time_than_one_that_there_is(monkeypatch):
    users = [bcrypt.hashpw(b"x", bcrypt.gensalt(cost)).decode() for cost in (9, 5)]
    nobodys = passwords._nobodys(9)
    assert nobodys.split("$")[2] == "09"
    assert bcrypt.checkpw(b"x", nobodys.encode()) is False
    done, check = [], bcrypt.checkpw
    monkeypatch.setattr(
        bcrypt, "checkpw", lambda word, hashed: done.append(hashed.split(b"$")[2]) or check(word, hashed)
    )

    def work(password, hashed):
        done.clear()
        is_right = passwords._is_right(password, hashed, [5, 9])
        return list(done), is_right

    assert [work("guess", hashed) for hashed in ("", *users)] == [([b"05", b"09"], False)] * 3
    assert [work("x", hashed) for hashed in users] == [([b"05", b"09"], True)] * 2


def test_guesses_come_back_with_time_and_an_ipv6_network_is_one_guesser():
    now = [100.0]
    guesses = passwords.GuessLimit(lambda: now[0])
    for n in range(passwords.GUESSES):
        assert guesses.may(f"2001:db8::{n}")
        guesses.count(f"2001:db8::{n}")
    assert not guesses.may("2001:db8::ffff")
    assert guesses.may("2001:db8:1::1")
    assert guesses.may("192.0.2.1")
    now[0] += 1.0
    assert guesses.may("2001:db8::1")
    for n in range(2 * passwords.MAX_ADDRESSES):
        guesses.count(f"192.0.{n >> 8}.{n & 255}")
    assert len(guesses._left) <= passwords.MAX_ADDRESSES


def test_headers_of_the_configuration_win_over_hookds_own(serve, directory):
    text = (
        "http_server_config:\n  headers:\n    X-Frame-Options: sameorigin\n    Strict-Transport-Security: max-age=9\n"
    )
    _, answer = served.get(serve(served.web_config(directory, text)))
    assert b"X-Frame-Options: sameorigin" in answer
    assert b"Strict-Transport-Security: max-age=9" in answer
    assert b"X-Content-Type-Options: nosniff" in answer


def test_a_renewed_certificate_is_used_by_the_next_connection_and_no_other_is_cut(serve, directory):
    path = served.web_config(directory, TLS)
    url = serve(path)
    before = serial(url, directory)
    with served.connected(url, served.client_context(directory)) as kept:
        served.certificates(directory)
        assert serial(url, directory) != before
        kept.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kept.recv(100).startswith(b"HTTP/1.1 200")


def test_a_user_who_is_taken_out_is_locked_out_at_once_even_on_an_open_connection(serve, directory):
    path = served.web_config(directory, USERS)
    url = serve(path)
    ask = f"GET / HTTP/1.1\r\nHost: localhost\r\n{basic('bob')}\r\n\r\n".encode()
    with served.connected(url) as kept:
        kept.sendall(ask)
        assert b" 200 " in kept.recv(4096)
        path.write_text(USERS.replace("  bob:", "  bobby:"))
        kept.sendall(ask)
        assert b" 401 " in kept.recv(4096)


@pytest.mark.parametrize("text", ["", "basic_auth_users:\n", "nonsense: [", TLS])
def test_a_file_that_is_broken_or_empty_for_a_moment_opens_nothing(serve, directory, caplog, text):
    path = served.web_config(directory, TLS + USERS)
    url, context = serve(path), served.client_context(directory)
    path.write_text(text)
    for _ in range(3):
        assert served.get(url, context=context)[0] == 401
        assert served.get(url, context=context, headers=[basic("alice")])[0] == 200
    assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 1
    path.write_text(TLS + USERS.replace("alice", "carol"))
    assert served.get(url, context=context, headers=[basic("alice")])[0] == 401


@pytest.mark.parametrize("rest", ["", "  client_ca_file: ca.crt\n", "  client_auth_type: RequestClientCert\n"])
def test_a_file_of_which_half_is_there_asks_no_less_of_clients(serve, directory, rest):
    path = served.web_config(directory, MTLS.format("RequireAndVerifyClientCert"))
    url = serve(path)
    path.write_text(TLS + rest)
    for _ in range(2):
        assert refused(url, served.client_context(directory))
    assert served.get(url, context=served.client_context(directory, has_certificate=True))[0] == 200


def test_a_key_that_does_not_fit_yet_leaves_the_old_pair_in_use(serve, directory, other):
    url = serve(served.web_config(directory, TLS))
    before = serial(url, directory)
    (directory / "server.crt").write_bytes((other / "server.crt").read_bytes())
    assert serial(url, directory) == before
    for name in ("server.key", "ca.crt"):
        (directory / name).write_bytes((other / name).read_bytes())
    assert serial(url, directory) != before


def test_a_key_that_others_can_read_is_warned_of(serve, directory, caplog):
    path = served.web_config(directory, TLS)
    (directory / "server.key").chmod(0o644)
    serve(path)
    assert "others can read the key" in caplog.text
    caplog.clear()
    (directory / "server.key").chmod(0o640)
    serve(path)
    assert "others" not in caplog.text


def test_password_hashes_that_others_can_read_are_warned_of(serve, directory, caplog):
    path = served.web_config(directory, USERS)
    path.chmod(0o644)
    serve(path)
    assert f"others can read the password hashes in {path}" in caplog.text
    assert f"chmod go= {path}" in caplog.text
    caplog.clear()
    path.chmod(0o600)
    serve(path)
    assert "others" not in caplog.text


def test_a_web_configuration_that_others_can_write_is_refused_and_opens_nothing_later(serve, directory, caplog):
    path = served.web_config(directory, USERS)
    url = serve(path)
    path.chmod(0o666)
    path.write_text("basic_auth_users: {}\n")
    assert served.get(url)[0] == 401
    assert "other users can write" in caplog.text
    with pytest.raises(ConfigError, match="other users can write"):
        serve(path)


def test_an_open_port_without_a_web_configuration_is_warned_of(serve, directory, caplog):
    serve()
    serve(host="::1") if has_ipv6() else None
    assert "everybody" not in caplog.text
    serve(host="0.0.0.0")
    assert "everybody who reaches 0.0.0.0 may read" in caplog.text
    caplog.clear()
    serve(served.web_config(directory, USERS), host="0.0.0.0")
    assert "passwords come to 0.0.0.0 without encryption" in caplog.text
    caplog.clear()
    path = served.web_config(directory, TLS + USERS)
    path.chmod(0o600)
    serve(path, host="0.0.0.0")
    assert not caplog.text


def has_ipv6():
    return "00000001" in Path("/proc/net/if_inet6").read_text() if Path("/proc/net/if_inet6").exists() else False


def test_a_wrong_configuration_is_refused_before_anything_is_served(directory):
    path = served.web_config(directory, "nonsense: 1\n")
    with (
        pytest.raises(ConfigError),
        served.in_thread(lambda: tcp.serving(web.Application(), Address("127.0.0.1", 0), path)),
    ):
        pass


def test_a_name_with_several_addresses_has_one_port(serve):
    url = serve(host="localhost")
    assert served.get(url)[0] == 200
    with contextlib.suppress(ConnectionRefusedError):  # without IPv6 there is only one address
        assert served.get(url.replace("[::1]", "127.0.0.1"))[0] == 200
