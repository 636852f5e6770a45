"""A real Prometheus scrapes a daemon over mTLS with a password, by the files of deploy/web, while certificates are renewed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import bcrypt
import pytest

from tests.support import prometheus, served
from tests.support.daemon import tell
from tests.support.deployment import DEPLOY
from tests.support.environment import tool_environment
from tests.support.processes import wait_until
from tests.support.tool import hookd, start_hookd

QUICK = "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"


@pytest.fixture
def directory(tmp_path):
    """deploy/web as a person would install it: certificates, a password, the address of the daemon."""
    made = shutil.copytree(served.WEB, tmp_path / "web")
    served.certificates(made)
    password = "correct horse"
    (made / "password").write_text(password)
    config = made / "web-config.yml"
    (line,) = [line for line in config.read_text().splitlines() if line.startswith("  prometheus: ")]
    hashed = bcrypt.hashpw(password.encode(), bcrypt.gensalt(6)).decode()
    config.write_text(config.read_text().replace(line, f"  prometheus: {hashed}"))
    return made


@pytest.fixture
def daemon(stack, tmp_path, directory):
    """Return the process and the URL of a daemon whose TOML file names the web configuration."""
    settings = tmp_path / "hookd.toml"
    settings.write_text(f'[serve]\nlisten = "127.0.0.1:0"\nweb_config = "{directory}/web-config.yml"\n')
    hookd("config", "check", settings)
    places = ("--state-dir", tmp_path / "state", "--control", tmp_path / "sock")
    process = stack.enter_context(start_hookd("serve", "--config", settings, *places, HOOKD_SCAN_S="0.1"))
    return process, process.expect(r"https://127\.0\.0\.1:[1-9]\d*").group()


def serial(url, directory):
    with served.connected(url, served.client_context(directory, has_certificate=True)) as connection:
        return connection.getpeercert()["serialNumber"]


def test_prometheus_scrapes_over_mtls_with_a_password_and_a_renewal_costs_no_scrape(
    stack, directory, daemon, hold, run
):
    process, url = daemon
    tell(hold(), modules={"count": 2})
    config = (directory / "prometheus.yml").read_text().replace("node1:9465", url.removeprefix("https://"))
    server = prometheus.started(stack, directory, url, QUICK + config)
    subprocess.run(["promtool", "check", "config", directory / "prometheus.yml"], check=True, timeout=60)
    wait_until(lambda: server.value('up{job="hookd"}') == 1, what="the first scrape")
    wait_until(lambda: server.value(f'hookd_target_up{{run="{run}"}}') == 1, what="the target in Prometheus")

    # without certificate, or without password, there is nothing
    assert served.get(url, "/metrics", served.client_context(directory, has_certificate=True))[0] == 401
    assert served.exchange(url, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""

    # when the certificates of both are renewed, then the next connection has the new one, and no scrape has failed
    before, scrapes = serial(url, directory), server.value("count_over_time(up[5m])")
    served.certificates(directory)
    assert serial(url, directory) != before
    wait_until(lambda: server.value("count_over_time(up[5m])") >= scrapes + 2, what="scrapes after the renewal")
    assert server.value("min_over_time(up[5m])") == 1

    # when its user is taken out, then it is locked out, and comes in again with another password
    text = (directory / "web-config.yml").read_text()
    (directory / "web-config.yml").write_text(text.replace("  prometheus: ", "  other: "))
    wait_until(lambda: server.value('up{job="hookd"}') == 0, what="the end of its scrapes")
    (directory / "web-config.yml").write_text(text)
    wait_until(lambda: server.value('up{job="hookd"}') == 1, what="its scrapes again")
    said = "\n".join(process.err)
    assert "Traceback" not in said
    assert "correct horse" not in said
    assert os.fspath(directory / "web-config.yml") in said


def test_the_container_is_healthy_as_long_as_the_daemon_answers_whatever_its_address_asks_for(daemon, tmp_path):
    lines = (DEPLOY / "docker" / "Dockerfile").read_text().partition("HEALTHCHECK ")[2].splitlines()
    python, *words = json.loads(lines[1].partition("CMD ")[2])
    assert python == "python"

    def check():
        environment = tool_environment(HOOKD_CONTROL=tmp_path / "sock")
        return subprocess.run([sys.executable, *words], env=environment, timeout=60, check=False).returncode

    assert check() == 0
    daemon[0].signal(signal.SIGSTOP)
    assert check() == 1
    daemon[0].signal(signal.SIGKILL)
    daemon[0].wait()
    assert check() == 1
