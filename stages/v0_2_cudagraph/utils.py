"""Small helpers that belong to no single file of the stage."""

from __future__ import annotations

from .hf_transformers_utils import Tokenizer


def get_int_token_ids(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Ids that ``dtype="int"`` may generate: digits, and the space or newline that ends the number."""
    texts = {
        token_id: tokenizer.decode([token_id]) for token_id in range(min(tokenizer.vocab_size, vocab_size))
    }
    return [i for i, text in texts.items() if text in (" ", "\n") or (text.isascii() and text.isdigit())]
