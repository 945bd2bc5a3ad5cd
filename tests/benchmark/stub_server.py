"""A loopback server that answers `/generate` as badly as it is told to, one way after the other.

``StubServer(["whole", "cut"])`` answers the first request well and cuts the second one's stream, and so on in turn.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

PAUSE_S = 0.05
LINE_BREAKS = "a\u2028b\u0085c\x0bd"
"""Characters that break lines in Unicode, and not in server-sent events."""


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a run may open all its connections at once


class StubServer:
    """``together`` is how many requests "together" waits for before it answers the first of them."""

    def __init__(
        self, ways: Sequence[str], api_key: str | None = None, is_strata: bool = True, together: int = 1
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.most_at_once = 0
        self.hung_up = threading.Event()
        """Set when a client leaves in the middle of an answer."""
        self._at_once = 0
        self._lock = threading.Lock()
        self._released = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                sent = self.headers.get("Authorization", "").encode("latin-1")  # as it came
                if api_key is not None and sent != f"Bearer {api_key}".encode():
                    self._whole(401, b'{"error": {"message": "wrong key"}}')
                elif self.path == "/v1/models":
                    self._whole(200, b'{"data": [{"id": "stub"}]}')
                elif is_strata and self.path == "/get_model_info":
                    self._whole(200, b'{"vocab_size": 500}')
                else:
                    self._whole(404, b"nothing here")

            def do_POST(self) -> None:
                with stub._lock:
                    way = ways[len(stub.bodies) % len(ways)]
                    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                    stub.bodies.append(body)
                    stub._at_once += 1
                    stub.most_at_once = max(stub.most_at_once, stub._at_once)
                try:
                    self._answer(way, body["sampling_params"]["max_new_tokens"])
                except OSError:
                    stub.hung_up.set()
                finally:
                    with stub._lock:
                        stub._at_once -= 1

            def _answer(self, way: str, count: int) -> None:
                match way:
                    case "500":
                        self._whole(500, b'{"error": {"message": "out of luck"}}')
                    case "html":
                        self._whole(502, b"<html>bad gateway</html>")
                    case "silent":
                        stub._released.wait(20)
                    case "short":  # promises more than it sends
                        self._head("Content-Length", "100000")
                        self._token(1)
                    case "together":
                        while stub.most_at_once < together and not stub._released.wait(PAUSE_S):
                            pass
                        self._head("Connection", "close")
                        self._stream(way, count)
                    case _:
                        self._head("Connection", "close")
                        self._stream(way, count)

            def _stream(self, way: str, count: int) -> None:
                if way == "burst":
                    self._token(count)
                elif way == "endless":
                    for number in range(1, 1000):
                        self._token(number)
                        time.sleep(PAUSE_S)
                elif way == "slow":
                    for number in range(1, count + 1):
                        time.sleep(PAUSE_S)
                        self._token(number)
                else:
                    for number in range(1, count + 1):
                        self._token(number)
                if way == "garbage":
                    self._event("{no json")
                elif way == "stranger":
                    self._event('{"choices": []}')
                elif way == "error":
                    self._event('{"error": {"message": "a process died"}}')
                elif way == "abort":
                    self._token(count, {"type": "abort", "message": "the pool is full"})
                if way != "cut":
                    self._event("[DONE]")

            def _token(self, number: int, finish_reason: dict[str, str] | None = None) -> None:
                meta = {"prompt_tokens": 7, "completion_tokens": number, "cached_tokens": 3}
                event = {"text": LINE_BREAKS * number, "meta_info": meta | {"finish_reason": finish_reason}}
                self._event(json.dumps(event, ensure_ascii=False))

            def _event(self, data: str) -> None:
                self.wfile.write(f"data: {data}\n\n".encode())
                self.wfile.flush()

            def _head(self, name: str, value: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header(name, value)
                self.end_headers()

            def _whole(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = _Listener(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
