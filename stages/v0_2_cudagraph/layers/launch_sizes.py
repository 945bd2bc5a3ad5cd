"""The arithmetic of launches, as plain Python functions. No state.

Triton has both, but made for use in kernels: called on the host they take 2.3 µs each where these take 0.1.
A decoder layer needs a dozen, and what the host spends per layer is what an eager decode step is bound by.
"""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """How many pieces of size ``b`` cover ``a``."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` (1 or more): the lengths that ``tl.arange`` takes."""
    return 1 << (n - 1).bit_length()
