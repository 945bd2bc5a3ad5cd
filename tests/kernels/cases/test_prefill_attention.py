"""``context_attention_fwd`` and ``extend_attention_fwd`` against float64 torch."""

from __future__ import annotations

import pytest
import torch

from stages.v0_1_genesis.layers.context_flashattention_nopad import context_attention_fwd
from stages.v0_1_genesis.layers.extend_attention import extend_attention_fwd
from stages.v0_1_genesis.layers.flash_attention import Blocks

from .reference import attend, paged_batch
from .setting import DTYPES, MARKS, assert_close, index, poisoned, randn, running_sum, sizes

pytestmark = MARKS
SMALL = Blocks(16, 16, 4, 1)
WIDE = Blocks(32, 16, 4, 2)  # the diagonal crosses two key blocks
TALL = Blocks(16, 32, 4, 2)  # a key block holds the diagonals of two row blocks

HEADS = sizes([(2, 2, 16), (3, 1, 80)], [(8, 2, 64), (9, 3, 96), (32, 8, 128), (4, 2, 256)])
LENS = sizes([[1, 16, 35]], [[1, 127, 128, 129, 1000], [4097]])


def check_context(
    lens: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, blocks: Blocks | None
) -> None:
    tokens = sum(lens)
    # As the model has them: three slices of one fused projection, rows apart.
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    q, k, v = (
        part.view(tokens, -1, dim) for part in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    )
    o = poisoned(tokens, heads, dim, dtype=dtype)
    starts = running_sum(lens)
    context_attention_fwd(q, k, v, o, index(starts), index(lens), max(lens), blocks)
    pieces = [slice(start, start + length) for start, length in zip(starts, lens, strict=True)]
    assert_close(o, torch.cat([attend(q[piece], k[piece], v[piece]) for piece in pieces]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("lens", LENS)
def test_context_of_ragged_requests(
    lens: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    check_context(lens, heads, kv_heads, dim, dtype, SMALL if max(lens) < 100 else None)


@pytest.mark.parametrize("blocks", [WIDE, TALL])
def test_context_with_unequal_blocks(blocks: Blocks) -> None:
    check_context([33, 64], 2, 1, 16, torch.float32, blocks)


def check_extend(
    prefix_lens: list[int],
    new_lens: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    blocks: Blocks | None,
    index_dtype: torch.dtype = torch.int64,
) -> None:
    seq_lens = [prefix + new for prefix, new in zip(prefix_lens, new_lens, strict=True)]
    batch = paged_batch(seq_lens, kv_heads, dim, dtype, index_dtype)
    tokens = sum(new_lens)
    q = randn(tokens, heads, dim, dtype=dtype)
    k = torch.cat([keys[prefix:] for keys, prefix in zip(batch.k, prefix_lens, strict=True)])
    v = torch.cat([values[prefix:] for values, prefix in zip(batch.v, prefix_lens, strict=True)])
    o = poisoned(tokens, heads, dim, dtype=dtype)
    starts = running_sum(new_lens)
    extend_attention_fwd(
        q,
        k,
        v,
        o,
        batch.k_buffer,
        batch.v_buffer,
        batch.req_to_token,
        batch.req_pool_indices,
        index(seq_lens, index_dtype),
        index(prefix_lens, index_dtype),
        index(starts, index_dtype),
        max(new_lens),
        blocks,
    )
    pieces = [q[start : start + new] for start, new in zip(starts, new_lens, strict=True)]
    assert_close(o, torch.cat([attend(*x) for x in zip(pieces, batch.k, batch.v, strict=True)]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize(
    ("prefix_lens", "new_lens"),
    sizes(
        [([0, 33, 5, 16], [17, 1, 20, 16])],
        [([0, 1000, 127, 1], [300, 1, 129, 128]), ([4095], [513])],
    ),
)
def test_extend_over_scattered_prefixes(
    prefix_lens: list[int], new_lens: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    check_extend(prefix_lens, new_lens, heads, kv_heads, dim, dtype, SMALL if max(new_lens) < 100 else None)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_extend_takes_both_index_types_and_the_default_blocks(index_dtype: torch.dtype) -> None:
    check_extend([0, 40], [37, 3], 4, 2, 64, torch.float32, None, index_dtype)


def test_a_head_dim_beyond_256_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="head_dim 512"):
        check_context([1], 1, 1, 512, torch.float32, SMALL)


def test_rows_that_are_not_contiguous_are_refused_by_name() -> None:
    q = randn(4, 16, 2, dtype=torch.float32).transpose(1, 2)
    k = randn(4, 2, 16, dtype=torch.float32)
    with pytest.raises(ValueError, match="q: want"):
        context_attention_fwd(q, k, k, k.clone(), index([0]), index([4]), 4)
