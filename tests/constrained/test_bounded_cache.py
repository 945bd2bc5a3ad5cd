"""The cache under everything here: bounds, order, sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.v0_1_genesis.constrained.bounded_cache import BoundedCache


def test_forgets_what_was_used_least_recently() -> None:
    cache: BoundedCache[str, int] = BoundedCache(max_entries=2, max_bytes=100)
    cache.put("a", 1, 1)
    cache.put("b", 2, 1)
    assert cache.get("a") == 1
    cache.put("c", 3, 1)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)


def test_a_value_larger_than_the_bound_is_not_kept() -> None:
    cache: BoundedCache[str, int] = BoundedCache(max_entries=9, max_bytes=10)
    cache.put("a", 1, 11)
    assert cache.get("a") is None and cache.nbytes == 0 and len(cache) == 0


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), max_size=60))
def test_never_exceeds_its_bounds(puts: list[tuple[int, int]]) -> None:
    cache: BoundedCache[int, int] = BoundedCache(max_entries=4, max_bytes=20)
    for key, nbytes in puts:
        cache.put(key, nbytes, nbytes)
        assert len(cache) <= 4 and cache.nbytes <= 20
        assert cache.get(key) == nbytes
        assert cache.nbytes == sum(cache.get(k) or 0 for k in range(7))
