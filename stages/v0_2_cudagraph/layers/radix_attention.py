"""Attention of one layer: stores the new tokens' K and V in the pool, then runs the kernel of this step.

Part of the model of each rank. Which of the three sets of kernels serves is ModelRunner's choice, and which
kernel of a set depends on the forward mode; both stand in `InputMetadata`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..managers.controller.infer_batch import ForwardMode
from ..support.paged_decode import paged_decode
from .rotary_embedding import FusedRotation, Rotation
from .torch_attention import extend_attention

if TYPE_CHECKING:
    from ..managers.controller.input_metadata import InputMetadata
if torch.cuda.is_available():
    from .extend_attention import extend_attention_fwd
    from .store_kv import store_kv
    from .token_attention import token_attention_fwd


class RadixAttention(nn.Module):
    """Attention whose K and V live in the token pool, so that requests can share prefixes.

    Args:
        num_heads: query heads of this rank.
        head_dim: size of a head.
        num_kv_heads: KV heads of this rank.
        layer_id: which of the pool's buffers is this layer's.
    """

    def __init__(self, num_heads: int, head_dim: int, num_kv_heads: int, layer_id: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self.layer_id = layer_id

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        input_metadata: InputMetadata,
        rotation: Rotation | FusedRotation | None = None,
    ) -> Tensor:
        """``q`` ``[tokens, heads, head_dim]``, ``k`` and ``v`` ``[tokens, kv_heads, head_dim]`` of the step's
        new tokens, as ``rotation`` has split them; returns q's shape."""
        k_buffer = input_metadata.token_to_kv_pool.get_key_buffer(self.layer_id)
        v_buffer = input_metadata.token_to_kv_pool.get_value_buffer(self.layer_id)
        if isinstance(rotation, FusedRotation):
            rotation.store(q, k, v, k_buffer, v_buffer, input_metadata.out_cache_loc)
        else:
            self.store_kv_cache(k, v, k_buffer, v_buffer, input_metadata)
        if input_metadata.attention == "flashinfer":
            assert input_metadata.flashinfer is not None
            return input_metadata.flashinfer.run(q, k_buffer, v_buffer)
        if input_metadata.attention == "triton":
            return self.forward_triton(q, k, v, k_buffer, v_buffer, input_metadata)
        return self.forward_torch(q, k_buffer, v_buffer, input_metadata)

    def forward_torch(
        self, q: Tensor, k_buffer: Tensor, v_buffer: Tensor, input_metadata: InputMetadata
    ) -> Tensor:
        if input_metadata.forward_mode is ForwardMode.EXTEND:
            return extend_attention(q, k_buffer, v_buffer, input_metadata.extend_plan)
        return paged_decode(q, k_buffer, v_buffer, input_metadata.decode_plan)

    def forward_triton(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_buffer: Tensor,
        v_buffer: Tensor,
        input_metadata: InputMetadata,
    ) -> Tensor:
        o = torch.empty_like(q, memory_format=torch.contiguous_format)
        if input_metadata.forward_mode is ForwardMode.EXTEND:
            extend_attention_fwd(
                q,
                k,
                v,
                o,
                k_buffer,
                v_buffer,
                input_metadata.req_to_token,
                input_metadata.req_pool_indices,
                input_metadata.seq_lens,
                input_metadata.prefix_lens,
                input_metadata.extend_start_loc,
                input_metadata.max_extend_len,
            )
        else:
            token_attention_fwd(
                q,
                k_buffer,
                v_buffer,
                o,
                input_metadata.req_to_token,
                input_metadata.req_pool_indices,
                input_metadata.start_loc,
                input_metadata.seq_lens,
                input_metadata.max_seq_len,
                input_metadata.total_num_tokens,
            )
        return o

    def store_kv_cache(
        self, k: Tensor, v: Tensor, k_buffer: Tensor, v_buffer: Tensor, input_metadata: InputMetadata
    ) -> None:
        """Write the new tokens into their slots."""
        if k.is_cuda:
            store_kv(k, v, k_buffer, v_buffer, input_metadata.out_cache_loc)
        else:
            k_buffer.index_copy_(0, input_metadata.out_cache_loc, k)
            v_buffer.index_copy_(0, input_metadata.out_cache_loc, v)
