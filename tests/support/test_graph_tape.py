"""The tape by itself: replays do what the function does, and what can't be frozen is refused."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stages.v0_1_genesis.support.graph_tape import CaptureError, Graph, Tape, TapePool, make_graph, make_pool
from stages.v0_1_genesis.support.packed_linear import linear
from stages.v0_1_genesis.support.paged_decode import DecodePlan, paged_decode, plan
from stages.v0_1_genesis.support.tape.program import same_bits

from .decode import packed

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def tape() -> Tape:
    return Tape(TapePool())


class Inputs:
    """Static buffers of one test: ``x`` ``[4, 8]``, ``ids`` four different rows of ``pool`` ``[16, 8]``."""

    def __init__(self) -> None:
        self.x = torch.randn(4, 8)
        self.y = torch.randn(4, 8)
        self.w = torch.randn(8, 8)
        self.ids = torch.tensor([3, 1, 4, 15])
        self.pool = torch.randn(16, 8)

    def vary(self) -> None:
        self.x.normal_()
        self.y.normal_()
        self.ids.copy_(torch.randperm(16)[:4])


def assert_replays(fn: Callable[[], Any], inputs: Inputs, rounds: int = 3) -> Tape:
    """Capture ``fn`` and compare replays on changed inputs with plain runs: outputs, and what is in the pool."""
    graph = tape()
    outputs = graph.capture(fn, inputs.vary)
    for _ in range(rounds):
        inputs.vary()
        start = inputs.pool.clone()
        with torch.inference_mode():
            expected = [x.clone() for x in tensors(fn())]
        expected_pool = inputs.pool.clone()
        inputs.pool.copy_(start)
        graph.replay()
        assert all(map(same_bits, tensors(outputs), expected))
        assert same_bits(inputs.pool, expected_pool)
    return graph


def tensors(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    return [x for x in outputs if isinstance(x, Tensor)]


# -- what a replay does ----------------------------------------------------------------------------------


def test_a_replay_reads_what_the_static_inputs_hold_now() -> None:
    x = torch.zeros(3)
    graph = tape()
    y = graph.capture(lambda: x * 2 + 1, vary=lambda: x.normal_())
    x.copy_(torch.tensor([1.0, 2.0, 3.0]))
    graph.replay()
    assert y.tolist() == [3.0, 5.0, 7.0]


def test_outputs_stay_where_they_are() -> None:
    inputs = Inputs()
    graph = tape()
    a, b = graph.capture(lambda: (inputs.x + 1, inputs.x @ inputs.w), inputs.vary)
    addresses = a.data_ptr(), b.data_ptr()
    for _ in range(3):
        inputs.vary()
        graph.replay()
    assert (a.data_ptr(), b.data_ptr()) == addresses
    a.add_(1)  # an ordinary tensor, also outside of inference mode
    assert not a.is_inference()


def test_kv_is_stored_and_read_in_order() -> None:
    inputs = Inputs()

    def store_and_read() -> Tensor:
        before = inputs.pool.index_select(0, inputs.ids)
        inputs.pool.index_copy_(0, inputs.ids, inputs.x)
        between = inputs.pool.sum(0)
        inputs.pool[3:5] = inputs.y[:2]
        return before.sum(0) + 2 * between + 3 * inputs.pool.sum(0)

    assert_replays(store_and_read, inputs)


def test_writes_through_views_reach_their_base() -> None:
    inputs = Inputs()

    def write() -> tuple[Tensor, Tensor]:
        h = inputs.x @ inputs.w
        left, right = h.chunk(2, dim=-1)
        row = right.unflatten(-1, (2, 2)).transpose(0, 1)[1]
        row.mul_(3)
        left[:, ::2].add_(right[:, ::2])
        inputs.pool.view(4, 4, 8)[2].copy_(h)
        return h, left.t().reshape(-1)

    assert_replays(write, inputs)


def test_views_of_fixed_tensors_cost_nothing_and_those_of_temporaries_one_cut() -> None:
    inputs = Inputs()

    def views() -> Tensor:
        w = inputs.w.t().view(2, 4, 8).flatten(0, 1)[:4, 2:6]
        h = (inputs.x + 1).unflatten(-1, (2, 4)).transpose(0, 1).unsqueeze(0)[:, 1].squeeze(0)
        return h @ w

    graph = assert_replays(views, inputs)
    ops = re.findall(r"(\w+)\(", graph.source)
    assert ops == ["replay", "add", "as_strided", "matmul", "copy_"]


def test_changes_of_shape_in_place_and_of_dtype() -> None:
    inputs = Inputs()

    def reshape() -> tuple[Tensor, ...]:
        h = inputs.x + 1
        h.unsqueeze_(0).transpose_(1, 2)
        bits = h.view(torch.int32)
        bits.bitwise_and_(-2)
        pairs = torch.view_as_complex((inputs.x * 2).view(4, 4, 2))
        return h, bits[0], pairs.conj().real, pairs.conj().imag, inputs.pool.view(torch.int32)[:2]

    assert_replays(reshape, inputs)


def test_opaque_and_packed_ops() -> None:
    inputs = Inputs()
    weight = packed(inputs.w)
    table = torch.arange(16).view(2, 8)
    step = plan(table, torch.tensor([0, 1]), [3, 5], torch.float32)
    k = torch.randn(16, 1, 8)

    def attend() -> Tensor:
        q = linear(inputs.x, weight).view(2, 2, 8)
        return paged_decode(q, k, inputs.pool.view(16, 1, 8), step)

    graph = assert_replays(attend, inputs)
    assert "mkldnn__linear_pointwise" in graph.source or not weight.is_mkldnn
    assert "strata_paged_decode" in graph.source


def test_a_tensor_that_only_opaque_ops_read_may_change_its_shape() -> None:
    """Such as a plan made on the host between replays."""
    inputs = Inputs()
    table = torch.arange(16).view(2, 8)
    q = torch.randn(2, 2, 8)

    def plan_of(lens: list[int]) -> DecodePlan:
        return plan(table, torch.tensor([0, 1]), lens, torch.float32)

    static = plan_of([8, 8])

    def attend(step: DecodePlan = static) -> Tensor:
        return paged_decode(q * 2, inputs.pool.view(16, 1, 8), inputs.pool.view(16, 1, 8), step) + 1

    graph = tape()
    output = graph.capture(attend, vary=lambda: static.replace(plan_of([2, 4])))
    for lens in ([1, 1], [8, 3], [5, 7]):
        static.replace(plan_of(lens))
        graph.replay()
        assert same_bits(output, attend(plan_of(lens)))


@dataclasses.dataclass
class Answer:
    logits: Tensor
    more: Any = None


def test_outputs_may_be_any_structure() -> None:
    inputs = Inputs()
    answer = tape().capture(
        lambda: Answer(inputs.x + 1, {"a": [inputs.x * 2, None, 7], "x": inputs.x, "v": inputs.x[:2]}),
        inputs.vary,
    )
    assert isinstance(answer, Answer)
    assert same_bits(answer.logits, inputs.x + 1)
    assert same_bits(answer.more["a"][0], inputs.x * 2) and answer.more["a"][1:] == [None, 7]
    assert answer.more["x"] is inputs.x
    assert answer.more["v"].data_ptr() == inputs.x.data_ptr()


def test_strided_outputs_keep_their_values() -> None:
    inputs = Inputs()
    graph = tape()
    cut, turned = graph.capture(lambda: ((inputs.x + 1)[:, :5], (inputs.x + 2).t()), inputs.vary)
    inputs.vary()
    graph.replay()
    assert same_bits(cut, inputs.x[:, :5] + 1) and same_bits(turned, (inputs.x + 2).t())


def test_graphs_of_a_pool_share_their_memory() -> None:
    inputs = Inputs()
    pool = make_pool(CPU)
    graphs = [make_graph(CPU, pool) for _ in range(3)]

    def capture(graph: Graph, rows: int) -> Tensor:
        return graph.capture(lambda: inputs.x[:rows] + rows, inputs.vary)

    outputs = [capture(graph, rows) for graph, rows in zip(graphs, (1, 4, 2), strict=True)]
    assert len({output.data_ptr() for output in outputs}) == 1
    assert outputs[0].untyped_storage().nbytes() == 4 * 8 * 4
    for graph, output, rows in zip(graphs, outputs, (1, 4, 2), strict=True):
        graph.replay()
        assert same_bits(output, inputs.x[:rows] + rows)


def test_a_constant_made_inside_is_fresh_in_every_replay() -> None:
    inputs = Inputs()

    def count() -> Tensor:
        total = torch.tensor([1.0, 2.0])
        total.add_(inputs.x[0, :2])
        inputs.pool[1:2] = 5.0
        return total

    assert_replays(count, inputs)


def test_calls_without_use_are_left_out() -> None:
    inputs = Inputs()

    def wasteful() -> Tensor:
        torch.exp(inputs.x)
        values, _ = (inputs.x + 1).max(dim=-1)
        return values

    graph = assert_replays(wasteful, inputs)
    assert "exp" not in graph.source


def test_it_works_with_and_without_inference_mode() -> None:
    inputs = Inputs()
    inputs.w.requires_grad_()
    assert_replays(lambda: F.linear(inputs.x, inputs.w).relu_(), inputs)
    with torch.inference_mode():
        inputs = Inputs()
        assert_replays(lambda: F.linear(inputs.x, inputs.w).relu_(), inputs)


def test_temporaries_are_freed_when_a_plain_run_frees_them() -> None:
    """Peak of the bytes that torch holds: counted by the profiler's memory events."""
    x = torch.randn(1 << 16)

    def chain() -> Tensor:
        for _ in range(20):
            a, b = (x + 1).chunk(2)
            y = torch.cat([a * 2, b * 3])
        return y[:8] * 2

    graph = tape()
    graph.capture(chain, vary=lambda: x.normal_())
    plain, replayed = peak_bytes(chain), peak_bytes(graph.replay)
    assert replayed <= plain * 1.05
    assert plain < 5 * x.nbytes  # the measure sees frees


def peak_bytes(fn: Callable[[], Any]) -> int:
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording, torch.inference_mode():
        result = fn()
        del result
    held = peak = 0
    for event in recording.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_a_captured_tape_keeps_no_temporaries() -> None:
    gc.collect()
    x = torch.randn(1 << 10)
    graph = tape()
    graph.capture(lambda: ((x + 1) * 2).sum(), vary=lambda: x.normal_())
    gc.collect()
    alive = [o for o in gc.get_objects() if type(o) is Tensor and o.numel() == x.numel() and o is not x]
    assert alive == []


# -- what is refused where it happens --------------------------------------------------------------------

MASK = torch.tensor([True, False, True, False])

READS: dict[str, Callable[[Inputs], Any]] = {
    "item": lambda i: i.x[0, 0].item(),
    "float": lambda i: float(i.x.sum()),
    "int": lambda i: i.pool[: int(i.ids[0])],
    "bool": lambda i: i.x if (i.x > 0).any() else i.y,
    "tolist": lambda i: i.ids.tolist(),
    "numpy": lambda i: i.ids.numpy(),
    "asarray": lambda i: np.asarray(i.ids),
    "dlpack": lambda i: np.from_dlpack(i.ids),
    "slice": lambda i: i.x[: i.ids[0]],
    "index": lambda i: i.x[i.ids[1]],
    "range": lambda i: list(range(i.ids[0])),
    "equal": lambda i: torch.equal(i.x, i.y),
    "allclose": lambda i: torch.allclose(i.x, i.y),
    "max": lambda i: max(i.ids),
    "mask": lambda i: i.x[MASK],
    "mask store": lambda i: i.pool[:4].__setitem__(MASK, 1.0),
    "masked_select": lambda i: i.x.masked_select(i.x > 0),
    "nonzero": lambda i: i.x.nonzero(),
    "where": lambda i: torch.where(i.x > 0),
    "unique": lambda i: i.ids.unique(),
    "repeat": lambda i: i.ids.repeat_interleave(i.ids),
    "bincount": lambda i: i.ids.bincount(),
    "one_hot": lambda i: F.one_hot(i.ids),
    "rand": lambda i: torch.rand(3),
    "dropout": lambda i: F.dropout(i.x, training=True),
    "in place": lambda i: i.pool.normal_(),
    "multinomial": lambda i: i.x.softmax(-1).multinomial(1),
}


@pytest.mark.parametrize("name", READS)
def test_what_cannot_be_frozen_is_refused_with_its_line(name: str) -> None:
    inputs = Inputs()
    with pytest.raises(CaptureError) as refusal:
        tape().capture(lambda: (READS[name](inputs), inputs.x + 1), inputs.vary)
    line = READS[name].__code__.co_firstlineno
    assert f"{__file__}:{line}, in <lambda>" in str(refusal.value)


def test_harmless_relatives_are_not_refused() -> None:
    inputs = Inputs()

    def harmless() -> tuple[Any, ...]:
        q = inputs.x.view(1, 1, 4, 8)
        return (
            torch.where(inputs.x > 0, inputs.x, inputs.y),
            F.dropout(inputs.x, training=False),
            inputs.x[torch.tensor([1, 0])],
            inputs.x.repeat_interleave(torch.tensor([1, 2, 0, 1]), dim=0, output_size=4),
            inputs.pool[inputs.ids],
            F.scaled_dot_product_attention(q, q, q),
            inputs.x.masked_fill(MASK.unsqueeze(1), 1.0),
            F.layer_norm(inputs.x, (8,)),
            inputs.x.masked_fill(inputs.x > 0, float("nan")),
            inputs.x.masked_fill(inputs.x > 0, -torch.inf),
            *(row + 1 for row in inputs.x),
        )

    assert_replays(harmless, inputs)


def test_a_tensor_that_gets_other_memory_is_refused() -> None:
    inputs = Inputs()
    with pytest.raises(CaptureError, match="other memory"):
        tape().capture(lambda: (inputs.x + 1).resize_(100), inputs.vary)


def test_an_error_of_the_function_comes_through() -> None:
    inputs = Inputs()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        tape().capture(lambda: inputs.x @ inputs.pool, inputs.vary)


# -- what the self-check finds ---------------------------------------------------------------------------


class Planted:
    """Host reads that no dispatcher sees: through numpy views taken before the capture."""

    def __init__(self) -> None:
        self.inputs = Inputs()
        self.ids = self.inputs.ids.numpy()
        self.x = self.inputs.x.numpy()
        self.cache: Any = None

    def scalar(self) -> Tensor:
        return self.inputs.x * float(self.x[0, 0])

    def shape(self) -> Tensor:
        return self.inputs.pool[: int(self.ids[0]) + 1].sum(0) + self.inputs.x

    def path(self) -> Tensor:
        y = self.inputs.x + 1
        return y * 2 if self.ids[0] == 3 else y - 2

    def more_calls(self) -> Tensor:
        y = self.inputs.x + 1
        return y if self.ids[0] == 3 else y * 2

    def host_tensor(self) -> Tensor:
        return self.inputs.x + torch.from_numpy(self.x * 2)

    def list_index(self) -> Tensor:
        return self.inputs.pool[list(self.ids)] + self.inputs.x

    def kept_temporary(self) -> Tensor:
        if self.cache is None:
            self.cache = self.inputs.x * 2
        return self.cache + self.inputs.x

    def remade_buffer(self) -> Tensor:
        """A buffer that is new in each run and filled unseen."""
        self.cache = torch.Tensor._make_subclass(Tensor, torch.from_numpy(self.x + 1))
        return self.cache + self.inputs.x

    def host_write(self) -> Tensor:
        """Nothing in the program shows it."""
        self.x[0] = self.ids[0]
        return self.inputs.x + 1

    def output_value(self) -> tuple[Tensor, int]:
        return self.inputs.x + 1, int(self.ids[0])


EXPLANATIONS = {
    "scalar": r"aten\.mul\.Tensor .* passes",
    "shape": r"aten\.sum.* passes|aten\.sum.* not there",
    "path": r"aten\.mul\.Tensor .* calls aten\.sub",
    "more_calls": r"calls aten\.mul\.Tensor .* not nothing more",
    "host_tensor": r"host data",
    "list_index": r"host data",
    "kept_temporary": r"aten\.mul\.Tensor .* calls aten\.add",
    "remade_buffer": r"host data|not there in the first run",
    "host_write": r"does not see writes a tensor of shape \[4, 8\]",
    "output_value": r"returns \d+; a replay would return 3",
}


@pytest.mark.parametrize("name", EXPLANATIONS)
def test_the_self_check_finds_planted_reads(name: str) -> None:
    planted = Planted()

    def vary() -> None:
        planted.inputs.vary()
        planted.inputs.ids[0] = (
            (planted.inputs.ids[0] + 1) % 16 if planted.inputs.ids[0] == 3 else planted.inputs.ids[0]
        )

    with pytest.raises(CaptureError, match=EXPLANATIONS[name]):
        tape().capture(getattr(planted, name), vary)


def test_the_self_check_wants_changed_inputs() -> None:
    inputs = Inputs()
    with pytest.raises(CaptureError, match="prove nothing"):
        tape().capture(lambda: inputs.x + 1, vary=lambda: None)


def test_the_self_check_undoes_its_writes() -> None:
    inputs = Inputs()
    recorded: list[Tensor] = []

    def vary() -> None:
        recorded.append(inputs.pool.clone())
        inputs.vary()

    def write() -> Tensor:
        inputs.pool.index_copy_(0, inputs.ids, inputs.x)
        inputs.pool[inputs.ids] *= 2
        inputs.pool[1].add_(1)
        return inputs.pool.sum(0)

    tape().capture(write, vary)
    assert same_bits(inputs.pool, recorded[0])
