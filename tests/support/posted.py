"""A small HTTP server that keeps the bodies of POST requests."""

from __future__ import annotations

import http.server
import threading


class Server:
    """Answers each POST with the next of `answers`, 200 after them; "hang" waits for the end. `posts` is what came."""

    def __init__(self):
        self.posts, self.answers, self.over = [], [], threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):  # noqa: N802  http.server's own name
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.posts.append((self.path, self.headers, body))
                answer = outer.answers.pop(0) if outer.answers else 200
                if answer == "hang":
                    outer.over.wait(600)
                    return
                self.send_response(answer)
                if 300 <= answer < 400:
                    self.send_header("Location", f"{outer.url}/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self):  # noqa: N802  http.server's own name; where a redirect leads
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.server.shutdown()
        self.thread.join(60)
        self.server.server_close()
