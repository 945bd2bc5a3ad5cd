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
    small = torch.ones(64, 64)
    assert packed_linear.pack(small) is small
    monkeypatch.setattr(packed_linear, "can_pack", lambda dtype: False)
    large = torch.ones(2048, 1024)
    assert packed_linear.pack(large) is large
    assert packed_linear.linear(torch.ones(1, 1024), large)[0, 0] == 1024


def test_probing_survives_a_torch_without_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert packed_linear.can_pack.__wrapped__(torch.float32) is False


LENGTHS = [1, 5, 17, 64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 1)])
def test_paged_decode_is_attention_over_the_rows_slots(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    table = torch.randperm(4 * 80, generator=generator).view(4, 80)
    rows, seq_lens = torch.tensor([2, 0, 3, 1]), torch.tensor(LENGTHS)
    k_buffer, v_buffer = torch.full((2, 4 * 80, kv_heads, 16), torch.nan, dtype=dtype)
    for row, length in zip(rows, LENGTHS, strict=True):
        for buffer in (k_buffer, v_buffer):
            values = torch.randn(length, kv_heads, 16, generator=generator)
            buffer[table[row, :length]] = values.to(dtype)
    q = torch.randn(4, heads, 16, generator=generator).to(dtype)

    step_plan = paged_decode.plan(table, rows, seq_lens, max(LENGTHS), dtype)
    output = paged_decode.paged_decode(q, k_buffer, v_buffer, step_plan)
    assert output.shape == q.shape and output.dtype == dtype
    for i, (row, length) in enumerate(zip(rows, LENGTHS, strict=True)):
        k, v = (b[table[row, :length]].repeat_interleave(heads // kv_heads, 1) for b in (k_buffer, v_buffer))
        scores = torch.einsum("hd,lhd->hl", q[i].float(), k.float()) / 4.0
        expected = torch.einsum("hl,lhd->hd", scores.softmax(-1), v.float())
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(output[i].float(), expected, atol=tolerance, rtol=tolerance)


def test_padding_of_the_plan_stays_inside_the_request() -> None:
    table = torch.arange(20).view(2, 10)
    step_plan = paged_decode.plan(table, torch.tensor([1, 0]), torch.tensor([2, 4]), 4, torch.float32)
    assert step_plan.slots.tolist() == [10, 11, 11, 11, 0, 1, 2, 3]
    assert step_plan.mask.flatten(1).tolist() == [[0, 0, -torch.inf, -torch.inf], [0, 0, 0, 0]]


def test_a_second_stage_may_bring_its_copy_of_the_op() -> None:
    spec = importlib.util.spec_from_file_location("second_stage_paged_decode", paged_decode.__file__)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copy  # dataclasses look their module up
    spec.loader.exec_module(copy)
    table = torch.arange(4).view(1, 4)
    step_plan = copy.plan(table, torch.tensor([0]), torch.tensor([4]), 4, torch.float32)
    pool = torch.randn(4, 1, 8)
    assert copy.paged_decode(torch.randn(1, 1, 8), pool, pool, step_plan).shape == (1, 1, 8)


def test_the_op_has_a_shape_without_data() -> None:
    q, pool = torch.empty(2, 4, 8, device="meta"), torch.empty(10, 2, 8, device="meta")
    slots, mask = torch.empty(6, dtype=torch.int64, device="meta"), torch.empty(2, 1, 1, 3, device="meta")
    assert torch.ops.strata.paged_decode(q, pool, pool, slots, mask).shape == q.shape
