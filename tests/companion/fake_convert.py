"""Stands in for `strata/model_zoo/convert.py`: copies the bytes, or fails, or hangs half-way, as told."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    gguf, out = Path(sys.argv[1]), Path(sys.argv[2])
    mode = os.environ.get("FAKE_CONVERT", "")
    with Path(os.environ["FAKE_CONVERT_LOG"]).open("a") as log:
        log.write(f"{os.getpid()}\n")
    out.mkdir()
    content = gguf.read_bytes()
    print("progress 0.5 half of it", flush=True)
    if mode == "fail":
        raise RuntimeError("the weights make no sense")
    if mode == "hang":
        (out / "model.safetensors").write_bytes(content[: len(content) // 2])
        time.sleep(120)
    if mode == "slow":
        time.sleep(1)
    (out / "config.json").write_text("{}")
    (out / "model.safetensors").write_bytes(content)
