"""Two ranks, as processes joined by gloo, give the logits of one: prefill, extend and decode."""

from __future__ import annotations

import json
import multiprocessing
import socket
from multiprocessing.connection import Connection

import pytest
import torch

from stages.v0_1_genesis.managers.router.infer_batch import ForwardMode
from stages.v0_1_genesis.managers.router.model_runner import ModelRunner
from tests.models.tiny import tiny_llama

from .batches import forward, new_runner, prefill, prompts, runner, strewn_rows

pytestmark = pytest.mark.slow

# Two KV heads; one that both ranks hold; a vocabulary that two can't halve; tied embeddings; biases.
MODELS = ["llama", "mistral", "llama-odd", "llama-gqa3", "llama-rope3"]
LENGTHS = [1, 9, 40]


def all_modes(model_runner: ModelRunner) -> list[list[list[float]]]:
    """Next-token logits of a prefill, of an extend over part of it, and of a decode."""
    ids, rows = prompts(*LENGTHS), strewn_rows([length + 1 for length in LENGTHS])
    outputs = [
        prefill(model_runner, ids, rows),
        forward(model_runner, ForwardMode.EXTEND, ids, [0, 5, 32], rows),
        forward(model_runner, ForwardMode.DECODE, [[*seq, 7] for seq in ids], LENGTHS, rows),
    ]
    return [output.next_token_logits.tolist() for output in outputs]


def run_rank(folders: list[str], tp_rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    results = [all_modes(new_runner(folder, tp_rank, port, tp_size=2)) for folder in folders]
    pipe.send_bytes(json.dumps(results).encode())


@pytest.fixture(scope="module")
def two_ranks() -> list[list[list[list[list[float]]]]]:
    """What each of two ranks computed: rank, model, mode, request, logit."""
    folders = [str(tiny_llama(model)) for model in MODELS]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes, ranks = [], []
    for tp_rank in range(2):
        ours, theirs = context.Pipe(duplex=False)
        pipes.append(ours)
        ranks.append(context.Process(target=run_rank, args=(folders, tp_rank, port, theirs), daemon=True))
        ranks[-1].start()
        theirs.close()
    try:
        return [json.loads(pipe.recv_bytes()) if pipe.poll(120) else [] for pipe in pipes]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_give_the_logits_of_one(two_ranks: list[list[list[list[list[float]]]]], model: str) -> None:
    first, second = (torch.tensor(rank[MODELS.index(model)]) for rank in two_ranks)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, torch.tensor(all_modes(runner(model))), atol=5e-4, rtol=0.0)
