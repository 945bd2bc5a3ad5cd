"""Qwen2 and Qwen2.5: a Llama whose query, key and value projections have biases, and nothing else does.

Built once per rank by ModelRunner. The smaller ones tie their output head to the embedding, as their config says.
"""

from __future__ import annotations

from ..model_config import ModelConfig
from .llama2 import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class Qwen2Attention(LlamaAttention):
    def biases(self, config: ModelConfig) -> tuple[bool, bool]:
        """Always the same, and so no field of a config.json says it."""
        return True, False


class Qwen2DecoderLayer(LlamaDecoderLayer):
    attention_class = Qwen2Attention


class Qwen2Model(LlamaModel):
    layer_class = Qwen2DecoderLayer


class Qwen2ForCausalLM(LlamaForCausalLM):
    model_class = Qwen2Model


EntryClass = Qwen2ForCausalLM
