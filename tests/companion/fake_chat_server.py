"""A loopback server that answers chat completions by a rule, so that `strata chat` is tested without an engine.

The answer to a question repeats it, piece by piece; "slowly …" never ends by itself. Every request body is kept.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


class FakeChatServer:
    def __init__(self, api_key: str | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.hung_up = threading.Event()
        """Set when a client leaves in the middle of an answer."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self._may_pass():
                    self._json(200, {"data": [{"id": "fake"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.bodies.append(body)
                question = body["messages"][-1]["content"]
                if question == "too long":
                    self._json(400, {"error": {"message": "prompt: 9 tokens, the limit is 8."}})
                else:
                    self._stream(question)

            def _may_pass(self) -> bool:
                sent = self.headers.get("Authorization", "").encode("latin-1")  # as it came
                allowed = api_key is None or sent == f"Bearer {api_key}".encode()
                if not allowed:
                    self._json(401, {"error": {"message": "wrong key"}})
                return allowed

            def _stream(self, question: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                try:
                    for word in ["You said:", *question.split()]:
                        self._event({"choices": [{"delta": {"content": f"{word} "}}]})
                    while question.startswith("slowly"):
                        self._event({"choices": [{"delta": {"content": ". "}}]})
                        threading.Event().wait(0.05)
                    self.wfile.write(b"data: [DONE]\n\n")
                except OSError:
                    server.hung_up.set()

            def _event(self, chunk: dict[str, Any]) -> None:
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                self.wfile.flush()

            def _json(self, status: int, body: dict[str, Any]) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
