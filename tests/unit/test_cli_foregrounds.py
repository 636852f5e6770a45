"""Which foreground attaches a command believes: those whose pids mean something here."""

from __future__ import annotations

import http.server
import json
import os
import secrets
import socketserver
import threading

import pytest

from hookd.tool.cli import targets
from hookd.tool.config import default_control_path
from hookd.tool.daemon.client import EMBEDDED_SOCKET


@pytest.fixture
def answering(tmp_path, monkeypatch):
    """Answer as a foreground attach that has this pid by its own words."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = default_control_path(os.environ, os.geteuid()).parent
    folder.mkdir(parents=True, exist_ok=True)
    words = {}

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(words).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def address_string(self):
            return "here"

        def log_message(self, *_):
            pass

    path = folder / EMBEDDED_SOCKET.format(secrets.token_hex(4))  # root's folder is that of the whole machine
    with socketserver.ThreadingUnixStreamServer(str(path), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield lambda pid: words.update(pid=pid)
        server.shutdown()
        thread.join()
    path.unlink(missing_ok=True)  # a daemon that begins beside this removes what does not answer


def test_one_of_another_pid_namespace_is_passed_over(answering):
    answering(os.getpid())
    assert targets.foregrounds() == [{"pid": os.getpid()}]
    answering(os.getpid() + 1)
    assert targets.foregrounds() == []
