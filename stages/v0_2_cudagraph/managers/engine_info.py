"""What main knows of its engine; fixed from the handshake on."""

from __future__ import annotations

import msgspec


class EngineInfo(msgspec.Struct):
    """What the engine says of itself when it is ready."""

    max_total_num_token: int
    max_req_input_len: int
    context_len: int
    vocab_size: int
    device: str = ""
    dtype: str = ""
    attention: str = ""

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt: it and one more token must fit into the context and into the pool."""
        return min(self.context_len - 1, self.max_total_num_token - 2)

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """Most tokens that a prompt of this length can be followed by."""
        return min(self.context_len, self.max_total_num_token - 1) - num_prompt_tokens

    @property
    def limits(self) -> str:
        """Both limits of a prompt, for error messages."""
        return (
            f"at most {self.context_len - 1} tokens for its context length of {self.context_len} "
            f"and at most {self.max_total_num_token - 2} for its pool of {self.max_total_num_token} tokens"
        )
