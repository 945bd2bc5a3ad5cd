"""`strata chat` against a loopback stand-in: the conversation, its commands, Ctrl-C, and every error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.companion.fake_chat_server import FakeChatServer
from tests.companion.strata_command import strata

pytestmark = pytest.mark.slow


@pytest.fixture
def server() -> Iterator[FakeChatServer]:
    with FakeChatServer() as running:
        yield running


def test_answers_alone_go_to_stdout_and_the_conversation_grows(server: FakeChatServer) -> None:
    ran = strata("chat", "--url", server.url, "--system", "Be brief.", stdin="first\n\nsecond\n")
    assert (ran.code, ran.out) == (0, "You said: first \nYou said: second \n"), ran.err
    roles = [[message["role"] for message in body["messages"]] for body in server.bodies]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert server.bodies[1]["messages"][2]["content"] == "You said: first "


def test_reset_forgets_all_but_the_system_message_and_exit_ends(server: FakeChatServer) -> None:
    ran = strata("chat", "--url", server.url, stdin="one\n/reset\ntwo\n/exit\nthree\n")
    assert ran.out == "You said: one \nYou said: two \n"
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["two"]


def test_sampling_options_reach_the_server(server: FakeChatServer) -> None:
    strata("chat", "--url", f"{server.url}/v1/", "--max-tokens", "7", "--temperature", "0.5", stdin="hi\n")
    assert (server.bodies[0]["max_tokens"], server.bodies[0]["temperature"]) == (7, 0.5)


def test_ctrl_c_stops_the_answer_and_not_the_program(server: FakeChatServer) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "strata", "chat", "--url", server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("slowly now\n")
    assert child.stdout.read(len("You said: slowly")) == "You said: slowly"
    child.send_signal(signal.SIGINT)
    assert server.hung_up.wait(20)
    out, err = child.communicate("quick\n", timeout=30)
    assert child.returncode == 0, err
    assert out.endswith("You said: quick \n")
    assert "Traceback" not in err
    # The part that was shown stays in the conversation.
    assert server.bodies[1]["messages"][1]["content"].startswith("You said: slowly")


def test_a_refused_question_is_said_and_the_chat_goes_on(server: FakeChatServer) -> None:
    ran = strata("chat", "--url", server.url, stdin="too long\nshort\n")
    assert ran.code == 0
    assert "the limit is 8" in ran.err
    assert ran.out.strip() == "You said: short"
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["short"]


def test_a_key_is_asked_for_and_sent() -> None:
    with FakeChatServer(api_key="sécret") as server:
        refused = strata("chat", "--url", server.url, stdin="hi\n")
        assert refused.is_one_line_error() and "--api-key" in refused.err
        assert strata("chat", "--url", server.url, stdin="hi\n", STRATA_API_KEY="sécret").code == 0


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "not a url", "http://[::1", "ftp://127.0.0.1"])
def test_no_server_is_one_line(url: str) -> None:
    ran = strata("chat", "--url", url, stdin="hi\n")
    assert ran.is_one_line_error() and "strata serve" in ran.err, ran.err
