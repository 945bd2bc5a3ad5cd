"""A model's chat template, rendered in Jinja's sandbox; owned by the main process, lives as long as it.

A template is a program that comes with a model folder: it may loop and format, but it reaches no Python
object beyond the values given to it.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARACTERS = 8 << 20


class ChatTemplateError(ValueError):
    """The template cannot be used, or it refused the messages; the text says which and why."""


class ChatTemplate:
    """One compiled template, with the names that Hugging Face templates expect.

    ``special_tokens`` are names such as ``bos_token`` with their text.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"The model's chat template does not compile: {error}.") from error

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The conversation as one prompt; raises `ChatTemplateError` if the template does not take it."""
        pieces, length = [], 0
        try:
            for piece in self._template.generate(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            ):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_RENDERED_CHARACTERS:
                    raise ChatTemplateError(
                        f"The chat template made over {MAX_RENDERED_CHARACTERS} characters."
                    )
        except ChatTemplateError:
            raise
        # A template can raise whatever its expressions raise: TypeError, ZeroDivisionError, SecurityError …
        except Exception as error:
            raise ChatTemplateError(f"The model's chat template refused these messages: {error}") from error
        return "".join(pieces)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """As in Python, without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(date_format: str) -> str:
    return datetime.now().strftime(date_format)
