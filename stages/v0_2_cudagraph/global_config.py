"""The runtime's constants that history gathered in one place: how admission, decoding and retraction behave.

One object per process, read where it is used; tests and benches may change it before a server is built.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GlobalConfig:
    """Values are those of July 2024."""

    init_new_token_ratio: float = 0.7
    """What share of their remaining tokens requests are expected to generate, when the server is idle."""
    base_min_new_token_ratio: float = 0.2
    """The share below which the estimate never falls, times --schedule-conservativeness."""
    new_token_ratio_decay: float = 0.001
    """What the estimate loses with every decode step that did not run out of memory."""
    retract_decode_steps: int = 20
    """A retraction frees room for this many further steps of the requests that stay."""
    num_continue_decode_steps: int = 10
    """Decode steps in a row before new requests are looked at again."""
    max_prefill_tokens: int = 16384
    """New tokens of one prefill batch, by default."""


global_config = GlobalConfig()
