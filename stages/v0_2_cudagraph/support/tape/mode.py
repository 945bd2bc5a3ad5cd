"""The base of the tape's dispatch modes. No state."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    """A dispatch mode that leaves torch's compiler alone: only to shield modes from it, torch would import
    all of it at the first call, which takes seconds and slows the process's exit."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
