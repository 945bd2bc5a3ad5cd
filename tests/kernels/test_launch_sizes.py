"""The launches' own arithmetic equals Triton's."""

from __future__ import annotations

import triton

from stages.v0_1_genesis.layers.launch_sizes import cdiv, next_power_of_2


def test_both_are_tritons() -> None:
    for n in range(1, 300):
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        assert cdiv(n, 7) == triton.cdiv(n, 7)
