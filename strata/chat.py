"""A conversation with one stage on the terminal, or from piped lines."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field

from .client import ChatClient, Message, Refused
from .serve import running_server
from .stages import find_stage

HELP = "/reset forgets the conversation, /exit ends (Ctrl-D too), Ctrl-C stops an answer."


@dataclass(frozen=True)
class ChatOptions:
    """What `strata chat` was asked for, beside the server."""

    model_path: str | None
    api_key: str | None
    system: str | None
    max_tokens: int
    temperature: float


@dataclass
class Conversation:
    """The messages so far. An answer that was stopped stays, as far as it came: the user saw it."""

    system: str | None
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})


def run_chat(stage: str, url: str | None, options: ChatOptions) -> None:
    """Chat until end of input or /exit, with the server at ``url`` or a new one of ``stage``."""
    with ExitStack() as stack:
        if url is None:
            say(f"Starting {find_stage(stage).key} …")
            url = stack.enter_context(running_server(stage, options.model_path)).base_url
        client = ChatClient(url, options.api_key, options.max_tokens, options.temperature)
        stack.callback(client.close)
        model = client.model_name()
        say(f"Talking to {model} at {url}. {HELP}")
        _talk(client, model, Conversation(options.system))


def _talk(client: ChatClient, model: str, conversation: Conversation) -> None:
    while (line := _read_line()) is not None:
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                conversation.reset()
                say("Starting over.")
            case command if command.startswith("/"):
                say(HELP)
            case question:
                _ask(client, model, conversation, question)


def _ask(client: ChatClient, model: str, conversation: Conversation, question: str) -> None:
    conversation.add("user", question)
    pieces = list[str]()
    try:
        for piece in client.stream(model, conversation.messages):
            pieces.append(piece)
            print(piece, end="", flush=True)
    except Refused as error:
        say(str(error))
        conversation.messages.pop()
        return
    except KeyboardInterrupt:
        print(" …", end="")
    print(flush=True)
    conversation.add("assistant", "".join(pieces))


def _read_line() -> str | None:
    """The next line, or None at the end of input; Ctrl-C at the prompt drops the line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            say("(/exit or Ctrl-D ends)")


def say(text: str) -> None:
    """Our own words, on stderr: stdout carries answers alone, so that they can be piped on."""
    print(text, file=sys.stderr, flush=True)


if sys.stdin is not None and sys.stdin.isatty() and os.name == "posix":
    # Importing it is what gives `input` line editing and history.
    import readline  # noqa: F401
