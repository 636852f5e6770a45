"""Which foreground attaches a command believes: those whose pids mean something here."""

from __future__ import annotations

import http.server
import json
import os
import socketserver
import threading

import pytest

from hookd.tool.cli import targets
from hookd.tool.daemon.client import EMBEDDED_SOCKET


@pytest.fixture
def answering(tmp_path, monkeypatch):
    """Answer as a foreground attach that has this pid by its own words."""
    # Root's folder is that of the whole machine, where people may have attached.
    monkeypatch.setattr(
        "hookd.tool.daemon.client.default_control_path", lambda _environ, _uid: tmp_path / "control.sock"
    )
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

    path = tmp_path / EMBEDDED_SOCKET.format("mine")
    with socketserver.ThreadingUnixStreamServer(str(path), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield lambda pid: words.update(pid=pid)
        server.shutdown()
        thread.join()


def test_one_of_another_pid_namespace_is_passed_over(answering):
    answering(os.getpid())
    assert targets.foregrounds() == [{"pid": os.getpid()}]
    answering(os.getpid() + 1)
    assert targets.foregrounds() == []
