"""One workload on every rank of a tensor-parallel engine, in processes without sockets or HTTP.

``python -m tests.shared.rank_pair STAGE DEVICE TP_SIZE RANK PORT`` plays the workload as one rank and prints
what its engine did, as one line of JSON. Ranks take no orders from each other: given the same messages they
must do the same, so what they print must be equal, and equal to what one rank alone does. Every invariant that
a snapshot shows is checked after every step, on every rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from strata.adapters import DIALECTS, Engine, free_port
from tests.models.tiny import TINY_MODELS

from .driving import Answer, collect, greedy, prompt, run
from .fixtures import model_folder

MODELS = {
    "llama": "the usual case: two KV heads, one for each rank",
    "mistral": "one KV head, which both ranks hold",
    "llama-odd": "a vocabulary that two ranks can't halve",
    "llama-gqa3": "tied embeddings, three heads for each KV head",
    "qwen2": "biases on the fused projection of query, key and value",
}
TIMEOUT_S = 200.0

MakeEngine = Callable[..., Engine]
Answers = dict[str, Answer]


def models_of(stage: str) -> list[str]:
    """Those of ``MODELS`` that the stage can serve."""
    return [model for model in MODELS if TINY_MODELS[model].capability in DIALECTS[stage].capabilities]


def workload(stage: str, make: MakeEngine) -> dict[str, Any]:
    """All that an engine can be asked; what it answered, and in which modes it ran."""
    modes: set[str] = set()
    record: dict[str, Any] = {}
    wanted, _ = DIALECTS[stage].prompt_logprob_fields
    for model in models_of(stage):
        record[model] = _mixed_batches(_observed(make(model), modes), wanted)
    tight = make("llama", max_total_tokens=160)
    record["retraction"] = _retraction(tight)
    record["retractions"] = tight.counters["retractions"]
    record["sampling"] = _sampling(make("llama-odd"))
    record["ends"] = _abort_stop_flush(make("llama"))
    record["modes"] = sorted(modes)
    return record


def _observed(engine: Engine, modes: set[str]) -> Engine:
    forward = engine.runner.forward

    def observed(batch: Any, forward_mode: Any) -> Any:
        modes.add(forward_mode.name)
        return forward(batch, forward_mode)

    engine.runner.forward = observed
    return engine


def _ids(answers: Answers) -> dict[str, Any]:
    return {rid: [answer.ids, answer.finish] for rid, answer in sorted(answers.items())}


def _mixed_batches(engine: Engine, wanted: str) -> dict[str, Any]:
    """Prompts of several lengths together; then longer ones that find the first in the cache."""
    answers: Answers = {}
    for wave, tail in enumerate((0, 5)):
        for length in (1, 7, 33, 64):
            ids = prompt(length, seed=90) + prompt(tail, seed=91)
            fields = {wanted: length == 33}
            engine.add(ids, greedy(12), rid=f"{wave}/{length}", fields=fields)
        run(engine, answers)
    return _ids(answers)


def _retraction(engine: Engine) -> dict[str, Any]:
    """More than the pool holds, so that some have to give way, and one more that is forced out."""
    answers: Answers = {}
    for seed in range(5):
        engine.add(prompt(10, seed=92 + seed), greedy(50), rid=f"tight/{seed}", stream=seed % 2 == 0)
    for _ in range(4):
        collect(engine.step(), answers)
    engine.force("retract")
    return _ids(run(engine, answers))


def _sampling(engine: Engine) -> dict[str, Any]:
    """Draws with and without a seed; all ranks must draw the same."""
    for seed in range(4):
        params = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}
        engine.add(prompt(9), {**params, "seed": seed}, rid=f"seeded/{seed}")
        engine.add(prompt(9), {**params, "top_p": 0.8}, rid=f"top-p/{seed}")
        engine.add(prompt(9), {**params, "top_k": 20}, rid=f"top-k/{seed}")
    return _ids(run(engine))


def _abort_stop_flush(engine: Engine) -> dict[str, Any]:
    answers: Answers = {}
    engine.add(prompt(20, seed=98), greedy(40), rid="aborted")
    engine.add(prompt(21, seed=98), greedy(40), rid="stays")
    engine.add(prompt(22, seed=98), greedy(40, stop=["e", "\u00e9", " "]), rid="stopped")
    for _ in range(5):
        collect(engine.step(), answers)
    engine.abort("aborted")
    run(engine, answers)
    engine.flush()
    engine.step()
    assert engine.state().free == engine.state().size
    engine.add(prompt(20, seed=98), greedy(40), rid="cold")
    run(engine, answers)
    assert answers["cold"].meta["cached_tokens"] == 0
    return _ids(answers)


def engine_maker(stage: str, **ranks: Any) -> MakeEngine:
    """``make(model, **server_args)`` for one rank in this process; without ``ranks``, for the whole engine."""

    def make(model: str, **server_args: Any) -> Engine:
        return DIALECTS[stage].make_engine(
            model_folder(model), **{"max_total_tokens": 2048, "random_seed": 42, **server_args}, **ranks
        )

    return make


def run_ranks(stage: str, device: str, tp_size: int = 2) -> list[dict[str, Any]]:
    """The workload's record from each rank."""
    for model in models_of(stage):
        model_folder(model)  # made here: in a process group transformers saves on rank 0 alone
    port = str(free_port())
    command = [sys.executable, "-m", __name__, stage, device, str(tp_size)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(tp_size)
    ]
    try:
        outputs = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    errors = "\n".join(f"rank {number}:\n{err[-3000:]}" for number, (_, err) in enumerate(outputs))
    assert all(rank.returncode == 0 for rank in ranks), errors
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def main(stage: str, device: str, tp_size: str, rank: str, port: str) -> None:
    import torch

    torch.set_num_threads(1)
    make = engine_maker(stage, device=device, tp_size=int(tp_size), tp_rank=int(rank), nccl_port=int(port))
    record = workload(stage, make)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    print(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])
