"""Contract of the two pools: nothing is lost, nothing is given twice, buffers start as zeros."""

from __future__ import annotations

from typing import Any, Protocol

from hypothesis import given, settings
from hypothesis import strategies as st


class SlotPool(Protocol):
    """What the contract needs of a stage's pool; slots are plain ints here."""

    usable: frozenset[int]
    """Every slot that a request can get."""

    def alloc(self, count: int) -> list[int] | None: ...
    def free(self, slots: list[int]) -> None: ...
    def available(self) -> int: ...
    def clear(self) -> None: ...


class SlotPoolContract:
    """Subclass with ``make_pool(size)``: for token slots and for request rows alike."""

    @staticmethod
    def make_pool(size: int) -> SlotPool:
        raise NotImplementedError

    def test_like_a_set(self) -> None:
        @settings(max_examples=80)
        @given(data=st.data())
        def check(data: st.DataObject) -> None:
            pool, held = self.make_pool(16), list[int]()
            for _ in range(data.draw(st.integers(1, 25))):
                free = len(pool.usable) - len(held)
                assert pool.available() == free
                if data.draw(st.booleans()):
                    count = data.draw(st.integers(0, 20))
                    slots = pool.alloc(count)
                    if count > free:
                        assert slots is None
                    else:
                        assert slots is not None and len(set(slots)) == count
                        assert set(slots) <= pool.usable - set(held)
                        held += slots
                elif held:
                    back = data.draw(st.lists(st.sampled_from(held), unique=True))
                    pool.free(back)
                    held = [slot for slot in held if slot not in back]

        check()

    def test_gives_all_and_takes_all_back(self) -> None:
        pool = self.make_pool(8)
        everything = pool.alloc(len(pool.usable))
        assert everything is not None and set(everything) == pool.usable
        assert pool.alloc(1) is None
        assert pool.alloc(0) == []
        pool.free(everything)
        assert pool.available() == len(pool.usable)

    def test_clear(self) -> None:
        pool = self.make_pool(8)
        pool.alloc(5)
        pool.clear()
        assert pool.available() == len(pool.usable)


class BufferContract:
    """Subclass with ``make_buffers``: K and V per layer, ``[slots, kv_heads, head_dim]``, zeros, flat."""

    @staticmethod
    def make_buffers(size: int, heads: int, dim: int, layers: int) -> tuple[list[Any], list[Any]]:
        raise NotImplementedError

    def test_buffers(self) -> None:
        keys, values = self.make_buffers(10, 2, 8, 3)
        assert len(keys) == len(values) == 3
        for buffer in (*keys, *values):
            assert tuple(buffer.shape)[1:] == (2, 8) and buffer.shape[0] >= 10
            assert buffer.is_contiguous()
            assert buffer.abs().sum() == 0, "INV-NAN: a pool must start as zeros"
        storages = {buffer.data_ptr() for buffer in (*keys, *values)}
        assert len(storages) == 6


class RefCountContract:
    """v0.1 alone: counts per slot, and contiguous ranges. Subclass with ``make_counted(size)``."""

    @staticmethod
    def make_counted(size: int) -> Any:
        raise NotImplementedError

    def test_a_slot_comes_back_with_its_last_holder(self) -> None:
        pool = self.make_counted(8)
        slots = pool.alloc(3)
        pool.add_refs(slots[:2])
        assert pool.free(slots) == 1
        assert pool.available_size() == 6
        assert pool.free(slots[:2]) == 2
        assert pool.available_size() == 8

    def test_contiguous_exactly_when_there_is_a_run(self) -> None:
        @settings(max_examples=80)
        @given(taken=st.sets(st.integers(0, 15)), count=st.integers(1, 17))
        def check(taken: set[int], count: int) -> None:
            pool = self.make_counted(16)
            everything = pool.alloc(16)
            pool.free(everything[[slot for slot in range(16) if slot not in taken]])
            runs = [s for s in range(17 - count) if not taken & set(range(s, s + count))]
            found = pool.alloc_contiguous(count)
            if not runs:
                assert found is None
                assert pool.available_size() == 16 - len(taken)
                return
            slots, start, end = found
            assert start in runs and end == start + count
            assert slots.tolist() == list(range(start, end))
            assert pool.available_size() == 16 - len(taken) - count

        check()
