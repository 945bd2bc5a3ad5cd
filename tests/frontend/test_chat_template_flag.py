"""v0.2's --chat-template: a file's template takes the place of the model's own; a wrong one ends the start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stages.v0_2_cudagraph.hf_transformers_utils import get_tokenizer
from strata.adapters import ServerDriver
from tests.models.tiny import tiny_llama

HI = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}{{ eos_token }}"
)


def test_the_file_replaces_the_models_own(tmp_path: Path) -> None:
    tokenizer = get_tokenizer(str(tiny_llama("llama")))
    assert tokenizer.render_chat(HI).startswith("<|im_start|>user")
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    tokenizer.read_chat_template(str(tmp_path / "mine.jinja"))
    assert tokenizer.render_chat(HI) == "[user] hi<|im_end|>"


@pytest.mark.parametrize(
    "content", [None, b"\xff\xfe", b"{% for %}"], ids=["missing", "no text", "no template"]
)
def test_a_wrong_file_is_named_at_once(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_bytes(content)
    command = [sys.executable, "-m", "stages.v0_2_cudagraph.launch_server"]
    command += ["--model-path", str(tiny_llama("llama")), "--chat-template", str(path), "--port", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2 and "Traceback" not in run.stderr + run.stdout
    assert f"--chat-template {path}" in run.stderr + run.stdout


@pytest.mark.slow
def test_a_chat_is_rendered_by_it(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    flags = ["--device", "cpu", "--chat-template", str(tmp_path / "mine.jinja")]
    with ServerDriver("v0.2", tiny_llama("llama"), flags) as server:
        body = {"messages": HI, "max_tokens": 6, "temperature": 0}
        chat = server.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"][
            "content"
        ]
        params = {"max_new_tokens": 6, "temperature": 0}
        plain = server.client.post(
            "/generate", json={"text": "[user] hi<|im_end|>", "sampling_params": params}
        )
        assert chat == plain.json()["text"]
