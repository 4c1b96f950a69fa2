"""What a test takes for ``dockerd``: answers what ``engine()`` asks, and ends on SIGTERM as the real one does."""

from __future__ import annotations

import json
import os
import signal
import socketserver
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

ANSWERS = {"version": {"ApiVersion": "1.41"}, "json": [], "prune": {}}


class Handler(BaseHTTPRequestHandler):
    """Tells requests by the last part of their path."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:  # http.server's name
        """Answer."""
        path = self.path.partition("?")[0]
        body = b"OK" if path.endswith("/_ping") else json.dumps(ANSWERS[path.rpartition("/")[2]]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815  # http.server's name

    def log_message(self, *_arguments: object) -> None:
        """Nothing."""


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """One thread per connection."""

    daemon_threads = True


def main() -> None:
    """``dockerd --host unix://… --data-root DIR --pidfile FILE …``"""
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    pid_file = Path(options["--pidfile"])
    if os.environ.get("FAKE_DOCKERD_FAILS"):
        sys.exit("there is no cgroup to be had")
    Path(options["--data-root"]).mkdir(parents=True, exist_ok=True)

    def end(_number: int, _frame: object) -> None:
        pid_file.unlink()
        time.sleep(float(os.environ.get("FAKE_DOCKERD_LINGERS_S", "0")))  # as the real one does, which has much to end
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    pid_file.write_text(str(os.getpid()))
    path = options["--host"].removeprefix("unix://")
    Path(path).unlink(missing_ok=True)
    Server(path, Handler).serve_forever()


if __name__ == "__main__":
    main()
