"""Llama, for inference: Llama 1 to 3, Mistral, SmolLM2.

Built once per rank by ModelRunner. All shapes are flat: ``[tokens, …]``, whatever requests the tokens belong
to; only attention looks at that, through `InputMetadata`. Nothing here reads a tensor on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..layers.activation import SiluAndMul
from ..layers.layernorm import RMSNorm
from ..layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from ..layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from ..layers.parallel_state import get_tensor_model_parallel_world_size
from ..layers.radix_attention import RadixAttention
from ..layers.rotary_embedding import FusedRotation, RotaryEmbedding, Rotation
from ..layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from ..memory_pool import CONTEXT_SLACK
from ..model_config import ModelConfig

if TYPE_CHECKING:
    from ..managers.router.model_runner import InputMetadata

FUSED_LAYERS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""A layer that is several in the checkpoint, and their names there in the order of its shards."""


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = ColumnParallelLinear(hidden_size, [intermediate_size, intermediate_size])
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size)
        self.act_fn = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        tp_size = get_tensor_model_parallel_world_size()
        self.head_dim = config.head_dim
        self.num_heads = config.get_num_attention_heads(tp_size)
        self.num_kv_heads = config.get_num_kv_heads(tp_size)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.attention_bias,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim, config.hidden_size, config.attention_bias
        )
        self.attn = RadixAttention(self.num_heads, self.head_dim, self.num_kv_heads, layer_id)

    def forward(
        self, hidden_states: Tensor, rotation: Rotation | FusedRotation, input_metadata: InputMetadata
    ) -> Tensor:
        qkv = self.qkv_proj(hidden_states).view(len(hidden_states), -1, self.head_dim)
        q, k, v = rotation.split(qkv, self.num_heads, self.num_kv_heads)
        return self.o_proj(self.attn(q, k, v, input_metadata, rotation).flatten(1))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_id)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None,
        rotation: Rotation | FusedRotation,
        input_metadata: InputMetadata,
    ) -> tuple[Tensor, Tensor]:
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states, rotation, input_metadata)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class LlamaModel(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(
            config.head_dim,
            config.context_len + CONTEXT_SLACK,
            config.rope_theta,
            config.rope_scaling,
        )
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, input_metadata: InputMetadata) -> Tensor:
        hidden_states, residual = self.embed_tokens(input_ids), None
        rotation = self.rotary_emb(positions)
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual, rotation, input_metadata)
        return self.norm(hidden_states, residual)[0]


class LlamaForCausalLM(nn.Module):
    """The whole model, built with torch's default dtype and device; weights come from `load_weights`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor()

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, positions: Tensor, input_metadata: InputMetadata
    ) -> LogitsProcessorOutput:
        """``input_ids`` and ``positions`` ``[tokens]`` -> next-token logits of every request."""
        hidden_states = self.model(input_ids, positions, input_metadata)
        return self.logits_processor(input_ids, hidden_states, self.lm_head, input_metadata)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's share of a checkpoint's tensors into the model.

        Raises:
            ValueError: a tensor has no place in the model or does not fit, or a place got no tensor.
        """
        places = self._places()
        for name, tensor in weights:
            if (load := places.pop(name, None)) is not None:
                try:
                    load(tensor)
                except RuntimeError as error:
                    raise ValueError(
                        f"{name} of shape {list(tensor.shape)} contradicts config.json."
                    ) from error
            elif not self._is_redundant(name):
                raise ValueError(f"the checkpoint's tensor {name} has no place in {type(self).__name__}.")
        if places:
            raise ValueError(f"the checkpoint lacks {len(places)} tensors, among them {next(iter(places))}.")

    def _places(self) -> dict[str, Callable[[Tensor], None]]:
        """For each tensor expected of a checkpoint, what copies it into the model."""
        places: dict[str, Callable[[Tensor], None]] = {}
        for name, param in self.named_parameters():
            path, _, kind = name.rpartition(".")
            prefix, dot, layer = path.rpartition(".")
            load_weight: Callable[..., None] = getattr(self.get_submodule(path), "load_weight")  # noqa: B009
            for shard_id, source in enumerate(FUSED_LAYERS.get(layer, (layer,))):
                places[f"{prefix}{dot}{source}.{kind}"] = partial(load_weight, param, shard_id)
        return places

    def _is_redundant(self, name: str) -> bool:
        """Whether a checkpoint holds ``name`` although the model gets it from elsewhere."""
        tied_head = self.config.tie_word_embeddings and name == "lm_head.weight"
        return tied_head or name.endswith("rotary_emb.inv_freq")
