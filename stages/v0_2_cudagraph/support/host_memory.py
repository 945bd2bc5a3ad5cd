"""How much memory of this machine is free to use. Read once, when a rank sizes its token pool."""

from __future__ import annotations

import os
from pathlib import Path


def available_host_memory() -> int:
    """Bytes that can be taken without swapping: what Linux estimates, elsewhere half of the machine's."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
