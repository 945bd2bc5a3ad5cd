"""Seeded requests: the same ids for the same seed, on every machine and for every contender."""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_ID = 1000
"""Lower ids are special tokens and single bytes in the vocabularies we bench with."""


@dataclass(frozen=True)
class BenchRequest:
    """A prompt, and how many tokens follow it: always exactly so many, whatever they are."""

    ids: tuple[int, ...]
    new_tokens: int


def random_ids(rng: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(min(FIRST_ID, vocab_size // 2), vocab_size) for _ in range(length))


def equal_requests(
    seed: int | str, count: int, length: int, new_tokens: int, vocab_size: int
) -> list[BenchRequest]:
    """``count`` requests of one shape; their prompts differ."""
    rng = random.Random(f"equal/{seed}/{count}")
    return [BenchRequest(random_ids(rng, length, vocab_size), new_tokens) for _ in range(count)]


def mixed_requests(
    seed: int, count: int, lengths: range, new_tokens: range, vocab_size: int
) -> list[BenchRequest]:
    """``count`` requests with both lengths drawn evenly; the extremes of ``new_tokens`` are among them."""
    rng = random.Random(f"mixed/{seed}/{count}")
    wanted = [new_tokens[0], new_tokens[-1], *(rng.choice(new_tokens) for _ in range(count - 2))]
    rng.shuffle(wanted)
    return [BenchRequest(random_ids(rng, rng.choice(lengths), vocab_size), number) for number in wanted]


def mix_requests(seed: int, count: int, shortest: int, longest: int, vocab_size: int) -> list[BenchRequest]:
    """``count`` requests with both lengths drawn evenly from ``shortest`` to ``longest``, ends included.

    Drawn in nano-vllm's order, so that results compare with its: each prompt's length and then its ids, and
    after all prompts the answers' lengths. 256 requests of 100 to 1,024 are 142,827 tokens in, 133,966 out.
    """
    rng = random.Random(seed)
    prompts = [
        tuple(rng.randint(0, 10_000) % vocab_size for _ in range(rng.randint(shortest, longest)))
        for _ in range(count)
    ]
    return [BenchRequest(prompt, rng.randint(shortest, longest)) for prompt in prompts]
