"""A mapping that forgets what was used least recently, bounded in entries and in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """Holds at most ``max_entries`` values of ``max_bytes`` together; a value that is larger by itself is not kept."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._items: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: Key) -> Value | None:
        item = self._items.get(key)
        if item is None:
            return None
        self._items.move_to_end(key)
        return item[0]

    def put(self, key: Key, value: Value, nbytes: int) -> None:
        self.discard(key)
        self._items[key] = (value, nbytes)
        self.nbytes += nbytes
        while len(self._items) > self._max_entries or self.nbytes > self._max_bytes:
            _, (_, freed) = self._items.popitem(last=False)
            self.nbytes -= freed

    def discard(self, key: Key) -> None:
        _, freed = self._items.pop(key, (None, 0))
        self.nbytes -= freed
