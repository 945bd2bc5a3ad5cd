"""Two ranks: the collectives in a captured function, over gloo, are waited for in replays too."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor

from stages.v0_1_genesis.layers.parallel_state import (
    destroy_model_parallel,
    initialize_model_parallel,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from stages.v0_1_genesis.support.graph_tape import make_graph, make_pool
from stages.v0_1_genesis.support.tape.program import same_bits
from strata.adapters.server_driver import free_port

CPU = torch.device("cpu")


def _rank(rank: int, port: int, answer: Connection) -> None:
    torch.set_num_threads(1)
    initialize_model_parallel(2, rank, port, CPU)
    x = torch.zeros(3, 4)
    generator = torch.Generator().manual_seed(rank)

    def partial_sums() -> tuple[Tensor, Tensor]:
        return tensor_model_parallel_all_reduce(x * 2), tensor_model_parallel_all_gather(x + rank)

    graph = make_graph(CPU, make_pool(CPU))
    outputs = graph.capture(partial_sums, vary=lambda: x.normal_(generator=generator))
    equal = []
    for _ in range(20):
        x.normal_(generator=generator)
        graph.replay()
        with torch.inference_mode():
            equal.append(all(map(same_bits, outputs, partial_sums())))
    answer.send_bytes(bytes(equal))
    destroy_model_parallel()


@pytest.mark.slow
def test_collectives_in_a_tape() -> None:
    context = multiprocessing.get_context("spawn")
    port = free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [context.Process(target=_rank, args=(i, port, pipes[i][1]), daemon=True) for i in range(2)]
    for rank in ranks:
        rank.start()
    for receiver, _ in pipes:
        assert receiver.poll(100), "a rank gave no answer"
        assert receiver.recv_bytes() == bytes([True] * 20)
    for rank in ranks:
        rank.join(20)
        assert rank.exitcode == 0
