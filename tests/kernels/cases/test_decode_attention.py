"""``token_attention_fwd`` against float64 torch: one split, many splits, ragged batches, a huge pool."""

from __future__ import annotations

import pytest
import torch

from stages.v0_1_genesis.layers.token_attention import DecodeBlocks, choose_split_len, token_attention_fwd

from .reference import attend, paged_batch
from .setting import CUDA, DEVICE, DTYPES, MARKS, assert_close, index, poisoned, randn, running_sum, sizes

pytestmark = MARKS
SHORT_SPLITS = DecodeBlocks(block_n=16, num_warps=4, num_stages=3, programs_per_sm=1000, min_split_len=32)
RAGGED = [1, 31, 32, 33, 100]


def check_decode(
    seq_lens: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    blocks: DecodeBlocks | None,
    index_dtype: torch.dtype = torch.int64,
    frozen_at: tuple[int, int] | None = None,
) -> None:
    batch = paged_batch(seq_lens, kv_heads, dim, dtype, index_dtype)
    q = randn(len(seq_lens), heads, dim, dtype=dtype)
    o = poisoned(len(seq_lens), heads, dim, dtype=dtype)
    max_seq_len, total = frozen_at or (max(seq_lens), sum(seq_lens))
    token_attention_fwd(
        q,
        batch.k_buffer,
        batch.v_buffer,
        o,
        batch.req_to_token,
        batch.req_pool_indices,
        index(running_sum(seq_lens), index_dtype),
        index(seq_lens, index_dtype),
        max_seq_len,
        total,
        blocks,
    )
    newest = [q[i : i + 1] for i in range(len(seq_lens))]
    assert_close(o, torch.cat([attend(*x) for x in zip(newest, batch.k, batch.v, strict=True)]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    sizes(
        [(2, 2, 16), (3, 1, 80)],
        [(8, 2, 64), (9, 3, 96), (32, 8, 128), (64, 1, 128), (4, 2, 256)],
    ),
)
@pytest.mark.parametrize(
    ("seq_lens", "blocks"),
    sizes(
        [(RAGGED, SHORT_SPLITS), ([1, 40], None)],
        [([1, 255, 256, 257, 5000], None), ([8192], None), ([1000] * 32, None), ([300] * 200, None)],
    ),
)
def test_decode_over_scattered_slots(
    seq_lens: list[int],
    blocks: DecodeBlocks | None,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
) -> None:
    check_decode(seq_lens, heads, kv_heads, dim, dtype, blocks)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_decode_takes_both_index_types(index_dtype: torch.dtype) -> None:
    check_decode(RAGGED, 4, 2, 64, torch.float32, SHORT_SPLITS, index_dtype)


def test_more_splits_than_stage_two_loads_at_once() -> None:
    check_decode([600, 1], 2, 1, 16, torch.float32, SHORT_SPLITS)


def test_lengths_frozen_at_their_largest_as_a_graph_would_freeze_them() -> None:
    check_decode([70, 1, 33], 2, 1, 16, torch.float32, SHORT_SPLITS, frozen_at=(128, 3 * 128))


@pytest.mark.parametrize("lens", [[1], [256] * 32, [1, 7, 8192], [8192] * 64])
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_no_two_splits_share_a_scratch_row(lens: list[int], kv_heads: int) -> None:
    split_len = choose_split_len(sum(lens), kv_heads, DEVICE, SHORT_SPLITS)
    assert split_len % SHORT_SPLITS.block_n == 0
    rows = [
        start // split_len + request + split
        for request, (start, length) in enumerate(zip(running_sum(lens), lens, strict=True))
        for split in range(-(-length // split_len))
    ]
    assert len(set(rows)) == len(rows)
    assert max(rows) < sum(lens) // split_len + len(lens)


if CUDA:

    def test_slots_past_two_to_the_31_elements() -> None:
        kv_heads, dim, length = 8, 128, 300
        slots = 2**31 // (kv_heads * dim) + 1000
        pool = torch.full((slots, kv_heads, dim), float("nan"), device=DEVICE, dtype=torch.bfloat16)
        owned = slots - 1 - torch.randperm(900, device=DEVICE)[:length]
        k = randn(length, kv_heads, dim, dtype=torch.bfloat16)
        pool[owned] = k
        q = randn(1, 32, dim, dtype=torch.bfloat16)
        o = poisoned(1, 32, dim, dtype=torch.bfloat16)
        row = owned.to(torch.int32)[None]
        token_attention_fwd(q, pool, pool, o, row, index([0]), index([0]), index([length]), length, length)
        assert_close(o, attend(q, k, k), torch.bfloat16)
