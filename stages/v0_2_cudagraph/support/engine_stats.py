"""What an engine has done since it started: the counters behind `/get_internal_state`.

Owned by the class that owns the step, and as long-lived.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class EngineStats:
    """Counters that only grow. A step is one forward pass: one prefill or one decode."""

    forward_steps: int = 0
    decode_steps: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed; those found in the cache are in ``cached_tokens``."""
    cached_tokens: int = 0
    generated_tokens: int = 0
    retractions: int = 0
    graph_replays: int = 0
    started_at: float = field(default_factory=time.monotonic)

    def as_dict(self) -> dict[str, int | float]:
        counters = {name: value for name, value in vars(self).items() if name != "started_at"}
        return counters | {"uptime_s": round(time.monotonic() - self.started_at, 3)}
