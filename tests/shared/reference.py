"""The reference: transformers in float32, teacher-forced (DESIGN §5, INV-SAME).

One forward over prompt and output shows whether every emitted token was within a tolerance of the best: far
cheaper than generating, and sound at near ties. Verdicts that were good are kept in the cache folder under a
hash of everything they depend on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from strata.cache import cache_folder

TOKEN_TOLERANCE = 1e-3
LOGIT_TOLERANCE = 5e-4
CUDA_LOGIT_TOLERANCE = 1e-3


class Reference:
    """transformers' model of one folder; ``reference(folder)`` returns the session's one."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], last: int = 0) -> Tensor:
        """Float32 logits ``[len(ids), vocab]``, or of the ``last`` positions alone."""
        return self.model(torch.tensor([list(ids)]), logits_to_keep=last).logits[0]

    def assert_greedy(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Every output token is within 1e-3 of the best logit at its place."""
        if not output_ids:
            return
        verdict = cache_folder() / "greedy-verdicts" / self._key(prompt_ids, output_ids)
        if verdict.exists():
            return
        logits = self.logits([*prompt_ids, *output_ids], last=len(output_ids) + 1)[:-1]
        chosen = logits.gather(1, torch.tensor(output_ids).unsqueeze(1)).squeeze(1)
        short = logits.max(dim=-1).values - chosen
        wrong = torch.nonzero(short > TOKEN_TOLERANCE).flatten().tolist()
        assert not wrong, (
            f"INV-SAME: {len(prompt_ids)} prompt tokens, {len(output_ids)} output tokens; output token "
            f"{wrong[0]} is {output_ids[wrong[0]]}, {short[wrong[0]]:.4f} below the best, "
            f"{int(logits[wrong[0]].argmax())}; {len(wrong)} are wrong"
        )
        verdict.parent.mkdir(parents=True, exist_ok=True)
        verdict.touch()

    def _key(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> str:
        parts = [
            *(_fingerprint(self.folder), version("torch"), version("transformers"), TOKEN_TOLERANCE),
            *(list(prompt_ids), list(output_ids)),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@cache
def reference(folder: Path) -> Reference:
    return Reference(folder)


@cache
def _fingerprint(folder: Path) -> str:
    """A hash of the folder's configuration and weight files."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
