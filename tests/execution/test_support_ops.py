"""Packed linears and the planned decode attention against plain torch."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
import torch.nn.functional as F

from stages.v0_1_genesis.support import packed_linear, paged_decode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 8, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_weight_multiplies_like_a_plain_one(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    if not packed_linear.can_pack(dtype):
        assert packed_linear.pack(torch.ones(2048, 1024, dtype=dtype)).layout == torch.strided
        return
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(2048, 1024, generator=generator).to(dtype) / 32
    bias = torch.randn(2048, generator=generator).to(dtype) if with_bias else None
    x = torch.randn(rows, 1024, generator=generator).to(dtype)
    packed = packed_linear.pack(weight)
    assert packed.is_mkldnn and packed.shape == weight.shape
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(
        packed_linear.linear(x, packed, bias), F.linear(x, weight, bias), atol=tolerance, rtol=tolerance
    )


def test_small_float32_weights_and_what_cannot_be_packed_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    small = torch.randn(64, 32)
    laid_out = packed_linear.pack(small)
    assert torch.equal(laid_out, small) and laid_out.stride() == (1, 64)
    monkeypatch.setattr(packed_linear, "can_pack", lambda dtype: False)
    large = torch.ones(2048, 1024)
    assert packed_linear.pack(large) is large
    assert packed_linear.linear(torch.ones(1, 1024), large)[0, 0] == 1024


def test_a_packed_weight_has_a_plain_copy_for_one_row_where_memory_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.randn(2048, 1024)
    copy = packed_linear.copy_for_one_row(weight)
    assert (copy is not None) == packed_linear.can_pack(torch.float32)
    if copy is not None:
        assert torch.equal(copy, weight) and copy.stride() == (1, 2048)
    for plain in (torch.randn(64, 32), weight.bfloat16(), weight.to("meta")):
        assert packed_linear.copy_for_one_row(plain) is None
    monkeypatch.setattr(packed_linear, "available_host_memory", lambda: packed_linear.FREE_BEYOND_COPIES)
    assert packed_linear.copy_for_one_row(weight) is None


def test_the_copy_multiplies_one_row_alone() -> None:
    weight, copy, bias = torch.zeros(3, 2), torch.ones(3, 2), torch.ones(3)
    rows = (torch.ones(1, 2), torch.ones(2, 2))
    one, two = (packed_linear.linear(x, weight, bias, copy) for x in rows)
    assert one.tolist() == [[3.0] * 3] and two.tolist() == [[1.0] * 3] * 2


def test_probing_survives_a_torch_without_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert packed_linear.can_pack.__wrapped__(torch.float32) is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 1)])
@pytest.mark.parametrize("lengths", [[1], [60, 50, 64], [1, 64, 5, 17, 33], [30] * 11])
def test_paged_decode_is_attention_over_the_rows_slots(
    dtype: torch.dtype, heads: int, kv_heads: int, lengths: list[int]
) -> None:
    generator, bs = torch.Generator().manual_seed(heads), len(lengths)
    table = torch.randperm(bs * 80, generator=generator).view(bs, 80)
    rows = torch.randperm(bs, generator=generator)
    k_buffer, v_buffer = torch.full((2, bs * 80, kv_heads, 16), torch.nan, dtype=dtype)
    for row, length in zip(rows, lengths, strict=True):
        for buffer in (k_buffer, v_buffer):
            values = torch.randn(length, kv_heads, 16, generator=generator)
            buffer[table[row, :length]] = values.to(dtype)
    q = torch.randn(bs, heads, 16, generator=generator).to(dtype)

    step = paged_decode.plan(table, rows, lengths, dtype)
    output = paged_decode.paged_decode(q, k_buffer, v_buffer, step)
    assert output.shape == q.shape and output.dtype == dtype
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        k, v = (b[table[row, :length]].repeat_interleave(heads // kv_heads, 1) for b in (k_buffer, v_buffer))
        scores = torch.einsum("hd,lhd->hl", q[i].float(), k.float()) / 4.0
        expected = torch.einsum("hl,lhd->hd", scores.softmax(-1), v.float())
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(output[i].float(), expected, atol=tolerance, rtol=tolerance)


def test_padding_of_the_plan_stays_inside_the_request() -> None:
    table = torch.arange(20).view(2, 10)
    step = paged_decode.plan(table, torch.tensor([1, 0]), [2, 4], torch.float32)
    assert step.slots.tolist() == [10, 11, 11, 11, 0, 1, 2, 3]
    assert step.mask.tolist() == [0, 0, -torch.inf, -torch.inf, 0, 0, 0, 0]


def test_a_long_request_does_not_pad_the_short_ones() -> None:
    order, groups = paged_decode.group_by_length([10, 4000, 12, 11, 25])
    assert (order, groups) == ([1, 4, 2, 3, 0], [(1, 4000), (1, 25), (3, 12)])
    assert paged_decode.group_by_length([5, 6, 7]) == ([0, 1, 2], [(3, 7)])
    order, groups = paged_decode.group_by_length(list(range(1, 100)))
    assert sum(size for size, _ in groups) == 99
    assert sum(size * longest for size, longest in groups) < 1.2 * sum(range(1, 100))


def test_one_request_whose_slots_follow_each_other_is_read_in_place() -> None:
    table = torch.stack([torch.arange(20, 60), torch.arange(60, 20, -1)])
    steps = [paged_decode.plan(table, torch.tensor([row]), [40], torch.float32) for row in (0, 1)]
    assert [step.groups.tolist() for step in steps] == [[[1, 40, 20]], [[1, 40, -1]]]
    q, k_buffer, v_buffer = torch.randn(1, 9, 16), torch.randn(64, 3, 16), torch.randn(64, 3, 16)
    in_place, gathered = (
        paged_decode.paged_decode(q, k_buffer[perm], v_buffer[perm], step)
        for step, perm in zip(steps, (torch.arange(64), torch.arange(80, 16, -1) % 64), strict=True)
    )
    torch.testing.assert_close(in_place, gathered)


def test_requests_in_order_of_length_are_not_reordered() -> None:
    table = torch.arange(40).view(4, 10)
    rows = torch.arange(4)
    assert paged_decode.plan(table, rows, [10, 9, 3, 2], torch.float32).order.tolist() == []
    step = paged_decode.plan(table, rows, [2, 10, 9, 3], torch.float32)
    assert (step.order.tolist(), step.inverse.tolist()) == ([1, 2, 3, 0], [3, 0, 1, 2])


def test_a_plan_becomes_another_in_place() -> None:
    table = torch.arange(60).view(3, 20)
    static = paged_decode.plan(table, torch.tensor([0, 1, 2]), [1, 1, 1], torch.float32)
    tensors = [static.slots, static.mask, static.order, static.inverse, static.groups]
    other = paged_decode.plan(table, torch.tensor([2, 0, 1]), [3, 20, 9], torch.float32)
    static.replace(other)
    q, pool = torch.randn(3, 2, 8), torch.randn(60, 1, 8)
    outputs = [
        torch.ops.strata.paged_decode(q, pool, pool, *tensors),
        paged_decode.paged_decode(q, pool, pool, other),
    ]
    assert torch.equal(*outputs)


def test_a_second_stage_may_bring_its_copy_of_the_op() -> None:
    spec = importlib.util.spec_from_file_location("second_stage_paged_decode", paged_decode.__file__)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copy  # dataclasses look their module up
    spec.loader.exec_module(copy)
    table = torch.arange(4).view(1, 4)
    step = copy.plan(table, torch.tensor([0]), [4], torch.float32)
    pool = torch.randn(4, 1, 8)
    assert copy.paged_decode(torch.randn(1, 1, 8), pool, pool, step).shape == (1, 1, 8)


def test_the_op_has_a_shape_without_data() -> None:
    q, pool = torch.empty(2, 4, 8, device="meta"), torch.empty(10, 2, 8, device="meta")
    step = [torch.empty(6, dtype=torch.int64, device="meta")] * 5
    assert torch.ops.strata.paged_decode(q, pool, pool, *step).shape == q.shape
