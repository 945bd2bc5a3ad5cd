"""Shapes of models to bench without any weights: a config and a tokenizer, written to a folder that an engine opens.

A shape also says what one decode step has to read, from which the floors in `floors.py` follow.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model, under the names that `config.json` has for them."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )

    @property
    def step_weights(self) -> int:
        """Weights that a token meets on its way: all but the embedding, of which it reads one row.

        A tied embedding counts, as the output head. It is the number of multiply-adds per token, too.
        """
        heads = self.num_attention_heads + self.num_key_value_heads
        attention = 2 * heads * self.head_dim * self.hidden_size
        layer = attention + 3 * self.intermediate_size * self.hidden_size + 2 * self.hidden_size
        return self.num_hidden_layers * layer + self.hidden_size + self.vocab_size * self.hidden_size

    @property
    def cached_per_token(self) -> int:
        """Elements of K and V that one token leaves in the pool, over all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    @property
    def config(self) -> dict[str, Any]:
        sizes = dict(vars(self))
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"} | sizes


SHAPES = {
    "llama-8b": Shape(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama-0.6b": Shape(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
    "tiny": Shape(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=512,
        max_position_embeddings=4096,
    ),
}
"""Llama-3.1-8B; Qwen3-0.6B's sizes as a Llama; and one that any CPU steps through in a millisecond."""


def write_model_folder(shape: Shape, folder: Path) -> None:
    """All that an engine with ``--load-format dummy`` reads: `config.json`, and 256 bytes as tokenizer."""
    import tokenizers

    (folder / "config.json").write_text(json.dumps(shape.config, indent=1))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: token_id for token_id, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
