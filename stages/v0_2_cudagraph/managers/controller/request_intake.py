"""From a message to a request that the scheduler can queue, or to its refusal.

Owned by the ModelTpServer; keeps what every request needs: tokenizer, compiled regexes, limits, seeds.
"""

from __future__ import annotations

import random
from functools import cached_property

import torch
from torch import Tensor

from ...constrained.fsm_cache import FSMCache
from ...constrained.jump_forward import JumpForwardCache
from ...hf_transformers_utils import get_tokenizer
from ...model_config import ModelConfig
from ...server_args import ServerArgs
from ...utils import get_int_token_ids
from ..io_struct import MAX_TOP_LOGPROBS, TokenizedGenerateReqInput
from .infer_batch import FinishReason, Req
from .logprobs import ReqLogprobs


class RequestIntake:
    """Builds each Req. One that can't be served comes out finished; one that wants no tokens warms the cache.

    Main has checked all of it before; what it missed must not end the engine.

    Args:
        max_total_num_token: slots of the token pool.
        device: where masks of allowed tokens live.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig,
        max_total_num_token: int,
        device: torch.device,
    ) -> None:
        self.tokenizer = get_tokenizer(server_args.tokenizer_path, server_args.model_path)
        self.regex_fsm_cache = FSMCache(self.tokenizer, model_config.vocab_size)
        self.jump_forward_cache = JumpForwardCache()
        # A jump is one more prefill; without the tree it would compute the prompt and all of the output again.
        self.jumps_forward = not (server_args.disable_regex_jump_forward or server_args.disable_radix_cache)
        self.vocab_size = model_config.vocab_size
        self.context_len = model_config.context_len
        self.max_total_num_token = max_total_num_token
        self.max_req_input_len = min(self.context_len - 1, max_total_num_token - 2)
        self.device = device
        self._seeds = random.Random(server_args.random_seed)

    def make_req(self, recv_req: TokenizedGenerateReqInput) -> Req:
        """The request of one message."""
        params = recv_req.sampling_params
        req = Req(recv_req.rid, recv_req.input_ids, params, recv_req.stream, self.tokenizer)
        if params.seed is None:
            req.seed = self._seeds.getrandbits(63)
        if recv_req.return_logprob:
            req.logprobs = ReqLogprobs(recv_req.logprob_start_len, recv_req.top_logprobs_num)
        # What can never fit would wait for ever: one request alone must fit into the context and the pool.
        room = min(self.context_len, self.max_total_num_token - 1) - len(req.input_ids)
        req.max_new_tokens = min(params.max_new_tokens, room)
        try:
            self._check(recv_req)
            self._constrain(req, recv_req)
        except ValueError as error:
            req.finish(FinishReason.ABORT, str(error))
        return req

    def _check(self, recv_req: TokenizedGenerateReqInput) -> None:
        """Raise ``ValueError``, naming the limit, if the request can't be served."""
        num_input = len(recv_req.input_ids)
        if not 0 < num_input <= self.max_req_input_len:
            raise ValueError(
                f"the prompt has {num_input} tokens; this server takes 1 to {self.max_req_input_len}."
            )
        if min(recv_req.input_ids) < 0 or max(recv_req.input_ids) >= self.vocab_size:
            raise ValueError(
                f"the prompt holds a token id outside of the vocabulary; ids go from 0 to {self.vocab_size - 1}."
            )
        if not 0 <= recv_req.logprob_start_len < num_input:
            raise ValueError(f"logprob_start_len must be in [0, {num_input - 1}].")
        if not 0 <= recv_req.top_logprobs_num <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs_num must be in [0, {MAX_TOP_LOGPROBS}].")
        recv_req.sampling_params.verify(self.vocab_size)

    def _constrain(self, req: Req, recv_req: TokenizedGenerateReqInput) -> None:
        """Limit the tokens that may be drawn; a regex that no server has compiled before may raise."""
        if recv_req.sampling_params.dtype == "int":
            req.allowed_token_ids = self._int_token_ids
        if (regex := recv_req.sampling_params.regex) is not None:
            req.regex_fsm = self.regex_fsm_cache.get(regex, recv_req.regex_index)
            if self.jumps_forward:
                req.jump_forward_map = self.jump_forward_cache.get(regex, req.regex_fsm.index)

    @cached_property
    def _int_token_ids(self) -> Tensor:
        ids = get_int_token_ids(self.tokenizer, self.vocab_size)
        return torch.tensor(ids, device=self.device)
