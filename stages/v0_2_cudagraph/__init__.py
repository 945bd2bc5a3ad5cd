"""Strata v0.2, *cudagraph*: the serving runtime of version 0.2.0, 25 July 2024, written anew.

Main, the controller (which is rank 0 of the model) and the detokenizer stand in a ring; further ranks follow the
controller. A slot of the pool has one owner, prompts are shared right after their prefill, decoding replays
captured graphs, and admission expects of running requests what a ratio says that falls while memory lasts.

Where this stage departs from history, on purpose:

- no pickle on any socket, nor between ranks;
- ``finish_reason`` is an object, where history had a string;
- what history took and ignored (penalties, ``response_format``) is refused, and so is a prompt that is too long,
  which history cut;
- a retracted request gives its row back (#811), an idle engine counts rows as well as slots (#842), and no prefix
  is trimmed after its node was found (#948);
- the ratio of an idle engine is never below its floor; ``lof`` can be chosen on the command line;
- a batch of exactly the largest captured size is replayed too, padding is written anew for each replay (#1094), and
  no captured size exceeds the request rows (#1469);
- FlashInfer computes every extension with its paged wrapper, where history split that of long batches in two;
- the Triton decode kernel splits long sequences and merges the parts, where history's first stage wrote all
  scores to memory and its second read them back;
- regexes compile with outlines-core in processes that may be killed, where history used Outlines;
- a text ends with any end token that the model's files name (#2475), ``skip_special_tokens`` holds for its own
  request (#16698), and the detokenizer forgets a request that has ended;
- a client that disconnects aborts its request at once;
- ``sampling_params.seed`` makes one request's sampling repeatable, and there is a logit bias;
- log probabilities are read from the logits that a replay leaves (#775); a request that asks for them takes no jump;
- streams take lists and n > 1, told apart by ``index``; a seeded sample i draws as seed + i does;
- completions echo lists too (#791), usage counts a prompt once for all its answers (#928), ``text_offset`` is a
  token's place where history had -1, and ``top_logprobs`` hold the token itself too;
- chats have OpenAI's defaults, temperature 1 and no limit but the context (#766), one BOS (#888), and a Jinja file
  as ``--chat-template``, where history had conversation templates of its own; an API key is a bearer token;
- `bench_serving` speaks Strata's and OpenAI's routes alone, and fetches no data set;
- a forced path ends where the text may end (#1084), a jump that is refused changes nothing, and one that is taken
  frees the K and V of replaced tokens, comes before the memory check, and waits at the queue's front;
- no jump without the prefix tree: it would compute the whole prompt again;
- with several replicas their output passes through the controller, which so knows what each has in flight;
- the nodes of one server first meet over plain TCP, check that they were started alike, and end together
  (``--dist-timeout`` is ours);
- an idle controller waits for a message instead of looping, and the warm-up precedes HTTP;
- a torch attention path makes the CPU a device like any other, with recorded tapes in place of CUDA graphs;
  ``/get_internal_state`` shows the engine.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

STAGE: Final = "v0.2"
NAME: Final = "cudagraph"

CAPABILITIES: Final[frozenset[str]] = frozenset(
    {
        "forward_mode.extend",
        "forward_mode.decode",
        "admission.new_token_ratio",
        "retraction",
        "radix_cache",
        "radix_cache.shared_while_running",
        "allocation.padding_slot",
        "cuda_graph",
        "attention.triton",
        "attention.flashinfer",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.top_k",
        "sampling.logit_bias",
        "sampling.seed",
        "sampling.n",
        "sampling.stop_strings",
        "regex",
        "jump_forward",
        "model.llama",
        "model.mistral",
        "model.qwen2",
        "logprob.normalized_prompt",
        "logprob.tokens",
        "parallel.tensor",
        "parallel.nodes",
        "parallel.data",
        "openai.completions",
        "openai.chat",
        "openai.stream",
        "openai.usage",
        "openai.n",
        "openai.echo",
        "openai.logprobs",
    }
)
"""What this stage can do; tests skip only through it (``book/data/capabilities.toml`` has the matrix)."""


class LaterParameter(NamedTuple):
    """A request parameter that a later stage adds: harmless at a neutral value, refused at any other."""

    neutral: tuple[Any, ...]
    added_in: str


LATER_PARAMETERS: Final[dict[str, LaterParameter]] = {
    "best_of": LaterParameter((None, 1), "no stage"),
    "top_logprobs": LaterParameter((None, 0), "v0.3"),
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

LATER_CHAT_PARAMETERS: Final[dict[str, LaterParameter]] = {
    "logprobs": LaterParameter((None, False), "v0.3"),
    "echo": LaterParameter((None, False), "no stage"),
}
"""The same for parameters that completions have and chats have not."""
