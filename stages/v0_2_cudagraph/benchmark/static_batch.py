"""One batch in an engine of this process, stepped by hand: its times, or its texts.

The engine belongs to the caller and is idle between two batches.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from ..managers.controller.tp_worker import ModelTpServer
from ..managers.io_struct import BatchTokenIDOut, DetokenizerInput, TokenizedGenerateReqInput
from ..sampling_params import SamplingParams


@dataclass(frozen=True)
class BatchLatency:
    """One batch: the time of its prefill, which gives the first tokens, and of each decode step."""

    batch_size: int
    input_len: int
    output_len: int
    prefill_s: float
    decode_s: list[float]

    @property
    def prefill_throughput(self) -> float:
        """Prompt tokens a second."""
        return self.batch_size * self.input_len / self.prefill_s

    @property
    def decode_median_s(self) -> float | None:
        """None where the prefill's tokens were all that was asked for."""
        return statistics.median(self.decode_s) if self.decode_s else None

    @property
    def decode_throughput(self) -> float | None:
        """New tokens a second, at the median step."""
        return None if self.decode_median_s is None else self.batch_size / self.decode_median_s

    @property
    def total_throughput(self) -> float:
        """Prompt and new tokens a second, over the whole batch."""
        tokens = self.batch_size * (self.input_len + self.output_len)
        return tokens / (self.prefill_s + sum(self.decode_s))

    def as_dict(self) -> dict[str, object]:
        derived = ("prefill_throughput", "decode_median_s", "decode_throughput", "total_throughput")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def start(server: ModelTpServer, prompts: Sequence[Sequence[int]], output_len: int) -> list[DetokenizerInput]:
    """Step a server that is idle and has nothing cached once, with these prompts: one prefill of them all."""
    params = SamplingParams(max_new_tokens=output_len, temperature=0.0, ignore_eos=True)
    reqs = [TokenizedGenerateReqInput(str(i), list(ids), params, False) for i, ids in enumerate(prompts)]
    sent = server.exposed_step(reqs)
    assert not server.forward_queue, "the batch was prefilled in parts"
    return sent


def decode(server: ModelTpServer) -> Iterator[list[DetokenizerInput]]:
    """Step until every request has ended; what each step sends on."""
    while not server.running_batch.is_empty():
        yield server.exposed_step([])


def measure(server: ModelTpServer, prompts: Sequence[Sequence[int]], output_len: int) -> BatchLatency:
    """Time one batch, cold. A step ends with its tokens on the host, and so with the device's work."""
    server.flush_cache()
    times = [time.perf_counter()]
    start(server, prompts, output_len)
    times.append(time.perf_counter())
    for _ in decode(server):
        times.append(time.perf_counter())
    prefill_s, *decode_s = (after - before for before, after in itertools.pairwise(times))
    return BatchLatency(len(prompts), len(prompts[0]), output_len, prefill_s, decode_s)


def greedy_texts(server: ModelTpServer, prompts: Sequence[str], output_len: int) -> list[str]:
    """What the model says after each prompt, all of them in one batch."""
    tokenizer = server.intake.tokenizer
    server.flush_cache()
    sent = start(server, [tokenizer.encode(prompt) for prompt in prompts], output_len)
    for more in decode(server):
        sent += more
    outputs: dict[str, list[int]] = {}
    for message in sent:
        if isinstance(message, BatchTokenIDOut):
            for rid, tokens in zip(message.rids, message.output_tokens, strict=True):
                outputs.setdefault(rid, []).extend(tokens)
    return [tokenizer.decode(outputs[str(i)]) for i in range(len(prompts))]
