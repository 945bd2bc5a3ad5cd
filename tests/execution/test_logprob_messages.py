"""How v0.2's log probabilities travel: new ones alone, in messages of bounded size, whatever text there is to show."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stages.v0_2_cudagraph.hf_transformers_utils import get_tokenizer
from stages.v0_2_cudagraph.managers.controller import output_streamer
from stages.v0_2_cudagraph.managers.controller.tp_worker import ModelTpServer
from stages.v0_2_cudagraph.managers.detokenizer_manager import DetokenizerManager
from stages.v0_2_cudagraph.managers.io_struct import (
    BatchStrOut,
    BatchTokenIDOut,
    DetokenizerInput,
    Logprobs,
    TokenizedGenerateReqInput,
)
from stages.v0_2_cudagraph.sampling_params import SamplingParams
from stages.v0_2_cudagraph.server_args import ServerArgs
from tests.models.tiny import tiny_llama


@pytest.fixture(scope="module")
def engine() -> ModelTpServer:
    args = ServerArgs(str(tiny_llama("llama")), device="cpu", max_total_tokens=1000, disable_log_stats=True)
    return ModelTpServer(args)


def request(rid: str, length: int, max_new_tokens: int = 1, **fields: Any) -> TokenizedGenerateReqInput:
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
    stream = fields.pop("stream", False)
    return TokenizedGenerateReqInput(rid, [5 + i for i in range(length)], params, stream, **fields)


def messages(answers: list[DetokenizerInput]) -> list[BatchTokenIDOut]:
    return [answer for answer in answers if isinstance(answer, BatchTokenIDOut)]


def test_a_message_holds_no_more_than_the_limit(
    engine: ModelTpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, in few messages; one request that is over the limit by itself has its own, which main bounds."""
    monkeypatch.setattr(output_streamer, "MAX_LOGPROBS", 20)
    requests = [
        request(f"asks {i}", length, return_logprob=True) for i, length in enumerate((8, 9, 30, 3, 4))
    ]
    requests.insert(1, request("plain", 50))
    out = messages(engine.exposed_step(requests))
    assert [rid for message in out for rid in message.rids] == [each.rid for each in requests]
    assert [len(message.rids) for message in out] == [3, 1, 2]
    for message in out:
        sizes = [logprobs.num_entries for logprobs in message.logprobs if logprobs is not None]
        assert sum(sizes) <= 20 or len(message.rids) == 1


def test_a_stream_hears_what_is_new(engine: ModelTpServer) -> None:
    engine.exposed_step([])
    asks = request("s", 6, max_new_tokens=4, stream=True, return_logprob=True, top_logprobs_num=2)
    news: list[Logprobs] = []
    for inbox in ([asks], [], [], []):
        for message in messages(engine.exposed_step(inbox)):
            news += [logprobs for logprobs in message.logprobs if logprobs is not None]
    assert [len(new.prefill_token_logprobs) for new in news] == [6, 0, 0, 0]
    assert [len(new.decode_token_logprobs) for new in news] == [1, 1, 1, 1]
    assert [new.num_entries for new in news] == [6 + 5 * 2 + 3, 3, 3, 3]


def test_the_detokenizer_passes_them_on_without_text() -> None:
    """Half a character shows nothing, but its token has a log probability."""
    manager = DetokenizerManager(get_tokenizer(str(tiny_llama("llama"))))
    half = next(i for i in range(3, 259) if manager._tokenizer.token_bytes(i) == b"\xe4")
    new = Logprobs(decode_token_logprobs=[(-1.5, half)])
    message = BatchTokenIDOut(
        rids=["asks", "plain"],
        vids=[0, 0],
        decoded_texts=["", ""],
        output_tokens=[[half], [half]],
        stop_strs=[[], []],
        skip_special_tokens=[True, True],
        meta_info=[{}, {}],
        logprobs=[new, None],
        finish_reason=[None, None],
    )
    out = manager.handle(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=BatchTokenIDOut))
    assert isinstance(out, BatchStrOut)
    assert (out.rids, out.output_strs, out.logprobs) == (["asks"], [""], [new])
