"""The byte-level tokenizer of the tiny models: 256 bytes, merges learned from a fixed text, special tokens.

Any text goes in and comes out again byte for byte; a random model's output is full of broken characters,
which is what the detokenizer tests want. Tests only; built once per tiny model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END, START_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END, START_TURN, END_TURN]
"""Ids 0, 1 and 2. The model ends its answers with 2, as SmolLM2 does."""

VOCAB_SIZE = 384

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "There once was a ship that put to sea; the name of the ship was the Billy of Tea.",
    "In the beginning there were tokens, and the tokens were without form and void.",
    "Counting: one two three four five six seven eight nine ten, and then again from one.",
    "naïve café, 中文字符, 🤗 emoji, नमस्ते, and some more of the same: 中文 🤗 café.",
]


def build_tokenizer(add_bos: bool = False) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly ``VOCAB_SIZE`` ids; ``add_bos`` puts id 0 before a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 2, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{END} $A", special_tokens=[(END, tokenizer.token_to_id(END))]
        )
    return tokenizer
