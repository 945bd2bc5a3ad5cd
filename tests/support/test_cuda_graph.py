"""The GPU's side of `Graph`: same face and same self-check as the tape's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stages.v0_1_genesis.support.graph_tape import CaptureError, make_graph, make_pool

pytestmark = pytest.mark.cuda


class Inputs:
    def __init__(self) -> None:
        self.device = torch.device("cuda")
        self.x = torch.randn(4, 8, device=self.device)
        self.w = torch.randn(8, 8, device=self.device)
        self.pool = torch.zeros(16, 8, device=self.device)
        self.ids = torch.tensor([3, 1, 4, 15], device=self.device)

    def vary(self) -> None:
        self.x.normal_()
        self.ids.copy_(torch.randperm(16)[:4])

    def run(self) -> tuple[Tensor, Tensor]:
        self.pool.index_copy_(0, self.ids, self.x @ self.w)
        return self.pool.index_select(0, self.ids), self.pool


def test_replays_are_plain_runs() -> None:
    inputs = Inputs()
    inputs.run(), inputs.run()
    graph = make_graph(inputs.device, make_pool(inputs.device))
    rows, pool = graph.capture(inputs.run, inputs.vary)
    assert pool is inputs.pool
    for _ in range(3):
        inputs.vary()
        graph.replay()
        torch.testing.assert_close(rows, inputs.x @ inputs.w, atol=1e-3, rtol=1e-3)


def test_graphs_share_a_pool() -> None:
    inputs = Inputs()
    (inputs.x @ inputs.w).sum()
    pool = make_pool(inputs.device)
    outputs = []
    for rows in (1, 2, 4):
        graph = make_graph(inputs.device, pool)
        run = lambda rows=rows: inputs.x[:rows] @ inputs.w  # noqa: E731
        run()
        outputs.append((graph, rows, graph.capture(run, inputs.vary)))
    for graph, rows, output in outputs:
        inputs.vary()
        graph.replay()
        torch.testing.assert_close(output, inputs.x[:rows] @ inputs.w, atol=1e-3, rtol=1e-3)


def test_a_value_of_the_host_is_found() -> None:
    inputs = Inputs()
    host = [1.0]

    def vary() -> None:
        inputs.vary()
        host[0] += 1.0

    graph = make_graph(inputs.device, make_pool(inputs.device))
    with pytest.raises(CaptureError, match="output 0"):
        graph.capture(lambda: inputs.x * host[0], vary)
