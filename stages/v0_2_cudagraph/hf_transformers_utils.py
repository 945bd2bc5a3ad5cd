"""What a Hugging Face model folder says about itself: is it servable, its tokenizer, its chat template.

Reads the JSON files with `json` and the tokenizer with `tokenizers`; transformers and torch are never
imported, so that the main process and the detokenizer start fast. A `Tokenizer` lives as long as its process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from .models import SUPPORTED_ARCHITECTURES
from .support.chat_template import ChatTemplate, ChatTemplateError
from .support.token_bytes import TokenBytes

PICKLED_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def check_model_folder(model_path: str, tokenizer_path: str | None = None, load_format: str = "auto") -> None:
    """Raise ``ValueError``, saying what is missing and how to mend it, unless the folder can be served."""
    folder = Path(model_path)
    if not folder.is_dir():
        raise ValueError(f"--model-path {model_path} is not a folder. `strata model fetch` makes one.")
    config = _read_json(folder / "config.json", required=True)
    architectures = config.get("architectures") or ["none named"]
    if not set(architectures) & set(SUPPORTED_ARCHITECTURES):
        raise ValueError(
            f"{folder / 'config.json'} names the architecture {', '.join(map(str, architectures))}, "
            f"which this stage does not have; it has {', '.join(sorted(SUPPORTED_ARCHITECTURES))}."
        )
    tokenizer_file = Path(tokenizer_path or model_path) / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ValueError(f"{tokenizer_file} is missing: save the model's fast tokenizer there.")
    if load_format != "dummy":
        _check_weights(folder)


def _check_weights(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    if any(path for pattern in PICKLED_WEIGHTS for path in folder.glob(pattern)):
        raise ValueError(
            f"{folder} has its weights only as pickles, which can run code when read: convert them "
            "to *.safetensors (save_pretrained of a recent transformers does)."
        )
    raise ValueError(f"{folder} has no *.safetensors; --load-format dummy serves random weights without any.")


def _read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """The JSON object in ``path``; {} where an optional file is missing."""
    if not path.is_file():
        if required:
            raise ValueError(f"{path} is missing: this is not a Hugging Face model folder.")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object.")
    return content


class Tokenizer:
    """A folder's tokenizer.json with its special tokens and chat template."""

    def __init__(self, tokenizer_path: str, model_path: str | None = None) -> None:
        folder, model_folder = Path(tokenizer_path), Path(model_path or tokenizer_path)
        content = _read_json(folder / "tokenizer.json", required=True)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(f"{folder / 'tokenizer.json'} cannot be read: {error}.") from error
        # A folder may ask for padding or truncation in training; a server wants the whole prompt and no more.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._bytes = TokenBytes(self._tokenizer, content.get("decoder"))
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)

        config = _read_json(folder / "tokenizer_config.json")
        self._special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
        self.eos_token_ids = self._find_eos_token_ids(model_folder)
        self._chat_template_source = _chat_template_source(folder, config)
        self._chat_template: ChatTemplate | None = None
        self.longest_token = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)
        """Characters of the longest token: n tokens never hold more than n times as many."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # `encode_batch` lets other threads run meanwhile, `encode` does not.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids`` as a continuation: what an `IncrementalDetokenizer` gives in the end."""
        joined = b"".join([self.token_bytes(token_id, skip_special_tokens) for token_id in ids])
        return joined.decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, special or not; U+FFFD where it has only a part of a character."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """UTF-8 bytes, perhaps only a part of a character, that the token adds to a text."""
        if skip_special_tokens and token_id in self._bytes.special_ids:
            return b""
        return self._bytes[token_id]

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._bytes.special_ids

    def read_chat_template(self, path: str) -> None:
        """Take the Jinja template in the file ``path`` instead of the model's own.

        Raises:
            ValueError: there is no such file of text, or it holds no template.
        """
        try:
            self._chat_template = ChatTemplate(Path(path).read_text(encoding="utf-8"), self._special_tokens)
        except (OSError, ValueError) as error:
            raise ValueError(f"--chat-template {path} cannot be used: {error}") from error

    def render_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The conversation as one prompt text; raises `ChatTemplateError` (a ``ValueError``)."""
        if self._chat_template is None:
            if self._chat_template_source is None:
                raise ChatTemplateError("This model has no chat template; use /v1/completions or /generate.")
            self._chat_template = ChatTemplate(self._chat_template_source, self._special_tokens)
        return self._chat_template.render(messages, add_generation_prompt)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of the conversation. A template writes its own BOS, so none is added here."""
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)

    def _token_id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def _find_eos_token_ids(self, model_folder: Path) -> frozenset[int]:
        """Every id that one of the folder's files says ends a text."""
        found: set[int] = set()
        for file_name in ("generation_config.json", "config.json"):
            named = _read_json(model_folder / file_name).get("eos_token_id")
            found.update(x for x in (named if isinstance(named, list) else [named]) if isinstance(x, int))
        eos = self._token_id(self._special_tokens.get("eos_token"))
        return frozenset(found if eos is None else found | {eos})


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like; a folder writes each as a string or as an object with its content."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _chat_template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """The template from its own file, or from tokenizer_config.json (which may hold several, by name)."""
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def get_tokenizer(tokenizer_path: str, model_path: str | None = None) -> Tokenizer:
    """Load a folder's tokenizer; raises ``ValueError`` naming the file at fault."""
    return Tokenizer(tokenizer_path, model_path)
