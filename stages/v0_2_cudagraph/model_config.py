"""The sizes of a model, read from its folder's ``config.json``.

Used by main (limits of a request) and by each rank (shapes of the model), and so free of torch. One object
lives as long as its process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")


class ModelConfig:
    """What the engine needs to know of a model, in the spellings of transformers 4 and 5 alike.

    Args:
        path: folder of a Hugging Face model.
        context_length: longest prompt plus output; by default what the model was trained for.

    Raises:
        ValueError: the folder's config lacks a size or asks for something that this stage does not do.
    """

    def __init__(self, path: str, context_length: int | None = None) -> None:
        self.path = path
        self.hf_config = read_config(path)
        self.architectures: list[str] = self.hf_config.get("architectures") or []
        self.hidden_size = self._size("hidden_size")
        self.num_attention_heads = self._size("num_attention_heads")
        self.num_key_value_heads = self._size("num_key_value_heads", self.num_attention_heads)
        self.head_dim = self._size("head_dim", self.hidden_size // self.num_attention_heads)
        self.num_hidden_layers = self._size("num_hidden_layers")
        self.intermediate_size = self._size("intermediate_size")
        self.vocab_size = self._size("vocab_size")
        self.rms_norm_eps = float(self.hf_config.get("rms_norm_eps", 1e-6))
        self.tie_word_embeddings = bool(self.hf_config.get("tie_word_embeddings", False))
        self.attention_bias = bool(self.hf_config.get("attention_bias", False))
        self.torch_dtype: str = self.hf_config.get("dtype") or self.hf_config.get("torch_dtype") or "float32"
        self._read_rope()
        self._refuse_what_is_missing()
        self.context_len = context_length or self._trained_length()
        self._check_window()

    def get_num_attention_heads(self, tp_size: int) -> int:
        """Query heads of one rank."""
        return self.num_attention_heads // tp_size

    def get_num_kv_heads(self, tp_size: int) -> int:
        """KV heads of one rank: with more ranks than heads, several ranks hold the same head."""
        return max(1, self.num_key_value_heads // tp_size)

    def check_tp_size(self, tp_size: int) -> None:
        """Raise ``ValueError`` if the model can't be split over ``tp_size`` ranks."""
        for name in ("num_attention_heads", "intermediate_size"):
            if getattr(self, name) % tp_size:
                raise ValueError(
                    f"--tp-size {tp_size} must divide the model's {name} ({getattr(self, name)})."
                )
        larger, smaller = sorted((self.num_key_value_heads, tp_size), reverse=True)
        if larger % smaller:
            raise ValueError(
                f"--tp-size {tp_size} must divide the model's num_key_value_heads "
                f"({self.num_key_value_heads}) or be a multiple of it."
            )

    def _size(self, name: str, default: int | None = None) -> int:
        value = self.hf_config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} in {self.path}/config.json must be a positive integer, got {value!r}.")
        return value

    def _read_rope(self) -> None:
        """transformers 5 keeps everything in ``rope_parameters``, 4 in ``rope_theta`` and ``rope_scaling``."""
        parameters = self.hf_config.get("rope_parameters") or self.hf_config.get("rope_scaling") or {}
        theta = parameters.get("rope_theta") or self.hf_config.get("rope_theta") or 10000.0
        self.rope_theta = float(theta)
        rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
        self.rope_scaling: dict[str, Any] | None = None
        if rope_type != "default":
            self.rope_scaling = {**parameters, "rope_type": rope_type}

    def _trained_length(self) -> int:
        length = self._size("max_position_embeddings", 2048)
        return min(length, self._sliding_window() or length)

    def _sliding_window(self) -> int | None:
        """How many tokens attention sees at most, None if all. Qwen2's configs name one that they may not use."""
        used = self.hf_config.get("use_sliding_window", "Qwen2ForCausalLM" not in self.architectures)
        return self._size("sliding_window") if used and self.hf_config.get("sliding_window") else None

    def _check_window(self) -> None:
        """Attention here sees the whole context, which equals a sliding window only up to the window's length."""
        window = self._sliding_window()
        if window is not None and self.context_len > window:
            raise ValueError(
                f"--context-length {self.context_len} goes beyond the sliding window of {window} tokens that "
                f"{self.path}/config.json asks for, which is not supported: at most {window} can be served."
            )

    def _refuse_what_is_missing(self) -> None:
        if self.rope_scaling is not None and self.rope_scaling["rope_type"] not in SUPPORTED_ROPE_TYPES:
            raise ValueError(
                f"rope_scaling type {self.rope_scaling['rope_type']!r} in {self.path}/config.json is not "
                f"supported; supported are {', '.join(SUPPORTED_ROPE_TYPES)}."
            )
        if self.hf_config.get("hidden_act", "silu") != "silu":
            raise ValueError(
                f"hidden_act {self.hf_config['hidden_act']!r} in {self.path}/config.json is not supported; "
                "supported is silu."
            )
        if self.hf_config.get("mlp_bias"):
            raise ValueError(f"mlp_bias in {self.path}/config.json is not supported.")
        if self.hf_config.get("quantization_config"):
            raise ValueError(
                f"{self.path} holds a quantised checkpoint, which is not supported: use the original weights."
            )


def read_config(path: str) -> dict[str, Any]:
    """The contents of ``path/config.json``; ``ValueError`` if there is no such file or no object in it."""
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"can't read {file}: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object.")
    return config
