"""v0.2's `Runtime` passes on what `/generate` learned since genesis: log probabilities, and n answers."""

from __future__ import annotations

import pytest

from stages.v0_2_cudagraph.server import Runtime
from tests.models.tiny import tiny_llama


@pytest.mark.slow
def test_runtime_asks_for_log_probabilities_and_samples() -> None:
    with Runtime(str(tiny_llama("llama")), device="cpu", max_total_tokens=1000) as runtime:
        params = {"temperature": 1.0, "seed": 1, "max_new_tokens": 4, "ignore_eos": True}
        one = runtime.generate(
            "the quick", params, return_logprob=True, logprob_start_len=1, top_logprobs_num=2
        )
        meta = one["meta_info"]
        assert len(meta["prefill_token_logprobs"]) == meta["prompt_tokens"] - 2
        assert [len(top) for top in meta["decode_top_logprobs"]] == [2] * 4
        samples = runtime.generate("the quick", {**params, "n": 2})
        assert samples[0]["text"] == one["text"] != samples[1]["text"]
        assert "decode_token_logprobs" not in samples[0]["meta_info"]
