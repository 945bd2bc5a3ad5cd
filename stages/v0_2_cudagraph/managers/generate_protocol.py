"""The native `/generate` request, and what answers it. Objects live as long as their HTTP request."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ..sampling_params import SamplingParams
from ..support.http_errors import bad_request
from .call import ReqState
from .logprob_lists import TextOf, logprob_lists
from .request_parsing import convert, parse_object, refuse_later_parameters
from .request_tokenizer import GenerateItem

MAX_PROMPTS = 1024
MAX_RID_LENGTH = 256

ValueT = TypeVar("ValueT")


class GenerateReqInput(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/generate`: ``text`` or ``input_ids``, one prompt or a list; the rest for all or one each."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = 0
    top_logprobs_num: int | list[int] = 0
    return_text_in_logprobs: bool = False
    image_data: Any = None

    @property
    def is_single(self) -> bool:
        """Whether the prompt is one rather than a list; so is the answer then, unless n asks for several."""
        if self.input_ids is not None:
            return not any(isinstance(item, list) for item in self.input_ids)
        return isinstance(self.text, str)

    def to_items(self) -> list[GenerateItem]:
        """One item per prompt; raises `ApiError` 400 where fields do not fit together."""
        if (self.text is None) == (self.input_ids is None):
            raise bad_request("Give text or input_ids, and not both.", "text")
        if self.image_data is not None:
            raise bad_request("image_data: this model takes no images.", "image_data")
        param = "text" if self.text is not None else "input_ids"
        prompts = split_prompts(self.text if self.text is not None else self.input_ids, param)
        count = len(prompts)
        params = _one_each(self.sampling_params or SamplingParams(), count, "sampling_params")
        rids = [None] * count if self.rid is None else self._rids(count)
        wants = _one_each(self.return_logprob, count, "return_logprob")
        starts = _one_each(self.logprob_start_len, count, "logprob_start_len")
        nums = _one_each(self.top_logprobs_num, count, "top_logprobs_num")
        return [
            GenerateItem(
                prompt,
                params[i],
                param,
                rid=rids[i],
                return_logprob=wants[i],
                logprob_start_len=starts[i],
                top_logprobs_num=nums[i],
            )
            for i, prompt in enumerate(prompts)
        ]

    def _rids(self, count: int) -> list[str]:
        if isinstance(self.rid, str) and not self.is_single:
            raise bad_request("rid must be a list, one for each prompt.", "rid")
        rids: list[str] = _one_each(self.rid, count, "rid")
        for rid in rids:
            if not 0 < len(rid) <= MAX_RID_LENGTH:
                raise bad_request(f"rid must have 1 to {MAX_RID_LENGTH} characters, got {len(rid)}.", "rid")
        return rids


def split_prompts(given: Any, param: str) -> list[str | list[int]]:
    """The prompts in a string, a list of strings, a list of token ids, or a list of such lists."""
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if not kinds:
        raise bad_request(f"{param} must not be empty.", param)
    if len(kinds) > 1:
        raise bad_request(
            f"{param} must hold prompts of one kind: strings, token ids, or lists of token ids.", param
        )
    if kinds == {int}:
        return [given]
    if len(given) > MAX_PROMPTS:
        raise bad_request(f"{param} takes at most {MAX_PROMPTS} prompts, got {len(given)}.", param)
    return given


def _one_each(value: Any, count: int, param: str) -> list[Any]:
    """A list of ``count`` values: the given one, or one value for all."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise bad_request(
            f"{param} must have one entry for each of the {count} prompts, got {len(value)}.", param
        )
    return value


def parse_generate(body: bytes) -> GenerateReqInput:
    """Decode and check a body; raises `ApiError` 400."""
    content = parse_object(body)
    refuse_later_parameters(content)
    params = content.get("sampling_params")
    for entry in params if isinstance(params, list) else [params]:
        if isinstance(entry, dict):
            refuse_later_parameters(entry, "sampling_params.")
    return convert(content, GenerateReqInput)


def generate_output(state: ReqState, text_of: TextOf | None = None) -> dict[str, Any]:
    """The answer for one prompt so far; ``text`` is all of it, not the latest piece.

    ``cached_tokens`` are those that the call found: not the prompt that its own first prefill left for n answers.
    """
    meta_info = {"id": state.rid} | (state.meta_info or {}) | {"finish_reason": state.finish_reason}
    meta_info["cached_tokens"] = (state.prefill.meta_info or {}).get("cached_tokens", 0)
    return {"text": state.text, "meta_info": meta_info | logprob_lists(state, text_of)}
