"""Token embedding and output head, their vocabularies split over the ranks.

Part of the model of each rank. The vocabulary is padded to a multiple of the ranks with rows of zeros; the
padding's logits are cut off after gathering.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..support.packed_linear import copy_for_one_row, linear, pack
from .parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)


class VocabParallelEmbedding(nn.Module):
    """This rank's rows of the embedding: ``weight`` ``[padded_vocab / tp, hidden_size]``."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.tp_size = get_tensor_model_parallel_world_size()
        self.rows = -(-vocab_size // self.tp_size)
        self.first_row = get_tensor_model_parallel_rank() * self.rows
        self.weight = nn.Parameter(torch.empty(self.rows, hidden_size), requires_grad=False)

    def load_weight(self, param: nn.Parameter, shard_id: int, loaded: Tensor) -> None:
        """Copy this rank's rows of the checkpoint's whole tensor ``[vocab_size, hidden_size]``."""
        mine = loaded[self.first_row : self.first_row + self.rows]
        param[: len(mine)].copy_(mine)
        param[len(mine) :].zero_()

    def forward(self, input_ids: Tensor) -> Tensor:
        """``[tokens]`` ids -> ``[tokens, hidden_size]``, equal on every rank."""
        if self.tp_size == 1:
            return F.embedding(input_ids, self.weight)
        local_ids = input_ids - self.first_row
        elsewhere = (local_ids < 0) | (local_ids >= self.rows)
        rows = F.embedding(local_ids.masked_fill(elsewhere, 0), self.weight)
        return tensor_model_parallel_all_reduce(rows.masked_fill_(elsewhere.unsqueeze(1), 0.0))


class ParallelLMHead(VocabParallelEmbedding):
    """The output head: hidden states times the rows of ``weight``. May share them with the embedding."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__(vocab_size, hidden_size)
        self.one_row: Tensor | None = None

    def tie_weights(self, embedding: VocabParallelEmbedding) -> None:
        self.weight = embedding.weight

    def process_weights_after_loading(self) -> None:
        """Swap the weight for its packed form (CPU). A tied embedding keeps the plain one for lookups."""
        self.one_row = copy_for_one_row(self.weight)
        self.weight = nn.Parameter(pack(self.weight), requires_grad=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[tokens, hidden_size]`` -> logits ``[tokens, vocab_size]``, equal on every rank."""
        logits = tensor_model_parallel_all_gather(linear(hidden_states, self.weight, one_row=self.one_row))
        return logits[:, : self.vocab_size]
