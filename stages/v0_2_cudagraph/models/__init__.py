"""The architectures this stage can serve. Read by main before anything starts, and so free of torch."""

from __future__ import annotations

from typing import Final

SUPPORTED_ARCHITECTURES: Final[dict[str, tuple[str, str]]] = {
    "LlamaForCausalLM": (".llama2", "LlamaForCausalLM"),
    "MistralForCausalLM": (".llama2", "LlamaForCausalLM"),
}
"""``architectures`` of a config.json -> (module in this package, class in it)."""
