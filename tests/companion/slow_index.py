"""A loopback page of wheels that sends half of a file and then nothing, until it is closed."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self


class SlowIndex:
    """``url`` is for pip's find-links; ``half_sent`` is set when a download hangs in its middle."""

    def __init__(self, wheels: Path) -> None:
        self.half_sent = threading.Event()
        self._closed = threading.Event()
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.strip("/")
                if not name:
                    links = "".join(f'<a href="/{path.name}">{path.name}</a>' for path in wheels.iterdir())
                    self._answer("text/html", links.encode(), whole=True)
                else:
                    self._answer("application/octet-stream", (wheels / name).read_bytes(), whole=False)

            def _answer(self, kind: str, body: bytes, *, whole: bool) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body if whole else body[: len(body) // 2])
                if not whole:
                    index.half_sent.set()
                    index._closed.wait(60)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
