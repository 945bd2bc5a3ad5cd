"""What the load generator asks: seeded prompts, the same for the same arguments on every machine.

Prompts are token ids, so that their lengths are exact; what chat must have as text is decoded from them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..hf_transformers_utils import Tokenizer

LOW_IDS = 1000
"""Lower ids are special tokens and single bytes in most vocabularies; avoided where no tokenizer tells."""

MIN_SHAREGPT_TOKENS = 4
MAX_SHAREGPT_PROMPT = 1024
MAX_SHAREGPT_TOTAL = 2048
"""History's bounds of a conversation that takes part: no stubs, and nothing beyond a small context."""


@dataclass(frozen=True)
class BenchRequest:
    """A prompt, and how many tokens are to follow it."""

    prompt_ids: list[int]
    output_len: int


@dataclass(frozen=True)
class Lengths:
    """Lengths drawn evenly from ``longest`` times ``range_ratio`` (at least 1) to ``longest``."""

    longest: int
    range_ratio: float

    def draw(self, rng: random.Random) -> int:
        return rng.randint(max(1, int(self.longest * self.range_ratio)), self.longest)


def ordinary_ids(vocab_size: int, tokenizer: Tokenizer | None) -> Sequence[int]:
    """The ids that random prompts are made of: no special tokens."""
    if tokenizer is None:
        return range(min(LOW_IDS, vocab_size // 2), vocab_size)
    special = tokenizer.special_token_ids
    return [i for i in range(min(vocab_size, tokenizer.vocab_size)) if i not in special]


def random_requests(
    rng: random.Random, count: int, ids: Sequence[int], inputs: Lengths, outputs: Lengths
) -> list[BenchRequest]:
    """Prompts that have nothing in common."""
    return [BenchRequest(rng.choices(ids, k=inputs.draw(rng)), outputs.draw(rng)) for _ in range(count)]


def shared_prefix_requests(
    rng: random.Random,
    count: int,
    ids: Sequence[int],
    inputs: Lengths,
    outputs: Lengths,
    groups: int,
    prefix_len: int,
) -> list[BenchRequest]:
    """Random prompts behind one of ``groups`` prefixes of ``prefix_len`` tokens, as many behind each, shuffled."""
    prefixes = [rng.choices(ids, k=prefix_len) for _ in range(groups)]
    requests = [
        BenchRequest(prefixes[number % groups] + request.prompt_ids, request.output_len)
        for number, request in enumerate(random_requests(rng, count, ids, inputs, outputs))
    ]
    rng.shuffle(requests)
    return requests


def sharegpt_requests(
    rng: random.Random, count: int, path: Path, tokenizer: Tokenizer, output_len: int | None
) -> list[BenchRequest]:
    """The first turns of ``count`` conversations: one is the prompt, the length of the other is what follows it.

    ``output_len`` replaces that length. Raises ``ValueError`` if the file is no such file or holds too few.
    """
    conversations = _read_conversations(path)
    rng.shuffle(conversations)
    requests: list[BenchRequest] = []
    for question, answer in conversations:
        if len(requests) == count:
            break
        prompt_ids = tokenizer.encode(question)
        wanted = len(tokenizer.encode(answer, add_special_tokens=False)) if output_len is None else output_len
        if min(len(prompt_ids), wanted) < MIN_SHAREGPT_TOKENS:
            continue
        if len(prompt_ids) > MAX_SHAREGPT_PROMPT or len(prompt_ids) + wanted > MAX_SHAREGPT_TOTAL:
            continue
        requests.append(BenchRequest(prompt_ids, wanted))
    if len(requests) < count:
        raise ValueError(
            f"--num-prompts {count}: {path} has {len(requests)} conversations of a fitting length; lower it."
        )
    return requests


def _read_conversations(path: Path) -> list[tuple[str, str]]:
    """(first turn, second turn) of every conversation that has both."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--dataset-path {path} can't be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"--dataset-path {path} is no JSON: {error}.") from error
    if not isinstance(content, list):
        raise ValueError(f"--dataset-path {path} must hold a list of conversations.")
    pairs = [_first_turns(entry) for entry in content]
    return [pair for pair in pairs if pair is not None]


def _first_turns(entry: Any) -> tuple[str, str] | None:
    match entry:
        case {"conversations": [{"value": str(question)}, {"value": str(answer)}, *_]}:
            return question, answer
    return None
