"""An HTTP server on loopback that answers what the Weave client needs and keeps nothing.

Run as a program, it prints its port and serves until it is killed. The client's cost hardly depends
on what the server does, as long as it answers at once.
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_VIEWER = {"username": "bench", "defaultEntity": {"name": "bench"}}
_GRAPHQL = {"data": {"viewer": _VIEWER, "project": {"name": "bench"}}}
_SERVER_INFO = {"min_required_weave_python_version": "0.0.1", "trace_server_version": "999.0.0"}
_STORED = {"digest": "0" * 43}


class DiscardingHandler(BaseHTTPRequestHandler):
    """Answers every request at once."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Only `/server_info` is asked for."""
        self._answer(_SERVER_INFO)

    def do_POST(self) -> None:
        """Read the body and forget it; objects and files get a digest."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(_GRAPHQL if self.path == "/graphql" else _STORED)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), DiscardingHandler)
    print(server.server_port, flush=True)
    server.serve_forever()
