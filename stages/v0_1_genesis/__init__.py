"""Strata v0.1, *genesis*: the serving runtime as it stood on 8 January 2024, written anew.

Three kinds of process stand in a ring: main (HTTP and tokenizing), the router (scheduling and, with one
rank, the model itself) and the detokenizer. A token pool with reference counts feeds a radix tree of
finished prompts; each step either fills new requests or decodes the running ones ten times.

Where this stage departs from history, on purpose:

- no rpyc: ``ModelRpcClient`` calls its rank processes over ZMQ; and no pickle on any socket;
- streams are server-sent events, and ``finish_reason`` is an object;
- running out of memory while decoding retracts requests, where history ended the process (#36);
- a decode run ends early when a stream has something to say (#117);
- a client that disconnects aborts its request (#457);
- ``max_new_tokens`` is clamped to what the pool can ever hold, so that no request starves;
- the tree splits where a key diverges inside an edge (#7), and a disabled cache frees rightly (#451);
- a batch in which nothing is cached runs in PREFILL mode, which history kept for its tests;
- the server also takes ``input_ids``, chat completions, a logit bias, ``/health`` and ``/flush_cache``;
- the normalised prompt logprob is the mean of the exact log softmax, not of log(softmax + 1e-6), and 0 where
  nothing follows the start position;
- ``sampling_params.seed`` makes one request's sampling repeatable;
- regexes compile with outlines-core instead of the January code;
- the Triton decode kernel splits long sequences and merges the parts, where history's first stage wrote all
  scores to memory and its second read them back;
- a torch attention path makes the CPU a device like any other; ``/get_internal_state`` shows the engine.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

STAGE: Final = "v0.1"
NAME: Final = "genesis"

CAPABILITIES: Final[frozenset[str]] = frozenset(
    {
        "forward_mode.prefill",
        "forward_mode.extend",
        "forward_mode.decode",
        "retraction",
        "radix_cache",
        "attention.triton",
        "attention.flashinfer",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.top_k",
        "sampling.logit_bias",
        "sampling.seed",
        "sampling.stop_strings",
        "regex",
        "model.llama",
        "model.mistral",
        "logprob.normalized_prompt",
        "parallel.tensor",
        "openai.completions",
        "openai.chat",
        "openai.stream",
        "openai.usage",
    }
)
"""What this stage can do; tests skip only through it (``book/data/capabilities.toml`` has the matrix)."""


class LaterParameter(NamedTuple):
    """A request parameter that a later stage adds: harmless at a neutral value, refused at any other."""

    neutral: tuple[Any, ...]
    added_in: str


LATER_PARAMETERS: Final[dict[str, LaterParameter]] = {
    "n": LaterParameter((None, 1), "v0.2"),
    "best_of": LaterParameter((None, 1), "no stage"),
    "echo": LaterParameter((None, False), "v0.2"),
    "logprobs": LaterParameter((None, False), "v0.2"),
    "top_logprobs": LaterParameter((None, 0), "v0.3"),
    "return_logprob": LaterParameter((None, False), "v0.2"),
    "top_logprobs_num": LaterParameter((None, 0), "v0.2"),
    "frequency_penalty": LaterParameter((None, 0), "v0.3"),
    "presence_penalty": LaterParameter((None, 0), "v0.3"),
    "repetition_penalty": LaterParameter((None, 1), "v0.3"),
    "min_p": LaterParameter((None, 0), "v0.3"),
    "min_tokens": LaterParameter((None, 0), "v0.3"),
    "min_new_tokens": LaterParameter((None, 0), "v0.3"),
    "stop_token_ids": LaterParameter((None, []), "v0.3"),
    "json_schema": LaterParameter((None,), "v0.3"),
    "response_format": LaterParameter((None, {"type": "text"}), "v0.3"),
    "stream_options": LaterParameter((None, {}, {"include_usage": False}), "v0.3"),
    "suffix": LaterParameter((None, ""), "no stage"),
    "tools": LaterParameter((None, []), "no stage"),
    "tool_choice": LaterParameter((None, "none", "auto"), "no stage"),
    "functions": LaterParameter((None, []), "no stage"),
    "function_call": LaterParameter((None, "none", "auto"), "no stage"),
}
"""Request parameters of later stages. Validators read this table; none of them spells a name itself."""
