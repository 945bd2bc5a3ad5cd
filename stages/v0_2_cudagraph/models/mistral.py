"""Mistral: a Llama by another name, as far as its context stays within its sliding window.

Built once per rank by ModelRunner. `ModelConfig` keeps the context that short.
"""

from __future__ import annotations

from .llama2 import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    pass


EntryClass = MistralForCausalLM
