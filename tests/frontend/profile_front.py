"""`python -m tests.frontend.profile_front`: what main and detokenizer cost per token, around the fake router.

32 streams at once through the real sockets; CPU seconds as the kernel counts them. They share the cores with
the model, so this is time that decoding does not get.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import httpx
import psutil

from . import tiny_tokenizers
from .conftest import FakeServer

STREAMS, TOKENS = 32, 250
PROMPT = {"text": "the quick", "sampling_params": {"max_new_tokens": TOKENS}}
WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/completions, streams": (
        "/v1/completions",
        {"prompt": "the quick", "max_tokens": TOKENS, "stream": True},
    ),
    "/generate, streams": ("/generate", PROMPT | {"stream": True}),
    "/generate, plain": ("/generate", PROMPT),
}


async def post_all(url: str, path: str, body: dict[str, Any]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        await asyncio.gather(*[client.post(path, content=json.dumps(body)) for _ in range(STREAMS)])


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = tiny_tokenizers.write_folder(Path(temporary) / "model")
        (folder / "model.safetensors").touch()
        with FakeServer(folder, FAKE_ROUTER_STEP_S="0.02") as server:
            server.wait_ready()
            processes = {"main": server.tree()[0], "detokenizer": server.child(1)}
            for name, (path, body) in WORKLOADS.items():
                before = {role: cpu_seconds(process) for role, process in processes.items()}
                asyncio.run(post_all(server.url, path, body))
                for role, process in processes.items():
                    spent = cpu_seconds(process) - before[role]
                    per_token, per_step = spent / (STREAMS * TOKENS), spent / TOKENS
                    print(
                        f"{name:26} {role:12} {per_token * 1e6:5.1f} µs/token {per_step * 1e3:6.2f} ms/step"
                    )


if __name__ == "__main__":
    main()
