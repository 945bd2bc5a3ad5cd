"""Tokens of a text that continues another, and jumps that are refused, over the kinds of tokenizer there are."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.v0_2_cudagraph.constrained.fsm_cache import FSMCache
from stages.v0_2_cudagraph.constrained.jump_forward import JumpForwardMap
from stages.v0_2_cudagraph.hf_transformers_utils import Tokenizer, get_tokenizer
from stages.v0_2_cudagraph.managers.controller.infer_batch import Req
from stages.v0_2_cudagraph.managers.controller.retokenize import Retokenizer
from stages.v0_2_cudagraph.sampling_params import SamplingParams
from tests.frontend import tiny_tokenizers
from tests.shared.fixtures import model_folder

VOCAB_SIZE = 512
KINDS = {"byte_level": "<|im_end|>", "sentencepiece": "</s>", "word_pieces": "[UNK]"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {kind: load(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


def load(kind: str, folder: Path) -> Tokenizer:
    tiny_tokenizers.write_folder(folder, {"eos_token_id": None}, eos_token=KINDS[kind])
    (folder / "tokenizer.json").write_text(getattr(tiny_tokenizers, kind)().to_str(), encoding="utf-8")
    return get_tokenizer(str(folder))


TEXTS = [
    "the dog",
    " the dog",
    "dog",
    "  dogs ",
    "é中🤗",
    "\nthe",
    "\n\n the",
    "a <plain é> b",
    " ",
    "the\ndog\n",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_tokens_spell_the_text_and_nothing_before(
    tokenizers: dict[str, Tokenizer], kind: str, text: str
) -> None:
    """SentencePiece's space before a text is no part of one that continues another."""
    ids = Retokenizer(tokenizers[kind], VOCAB_SIZE).tokenize(text)
    assert ids is not None and tokenizers[kind].decode(ids) == text


@given(text=st.text(alphabet="the dogsé中🤗\n<|im_end|></s>▁\ufffd\x00", min_size=1, max_size=12))
def test_exactly_or_not_at_all(tokenizers: dict[str, Tokenizer], text: str) -> None:
    for tokenizer in tokenizers.values():
        ids = Retokenizer(tokenizer, VOCAB_SIZE).tokenize(text)
        assert ids is None or tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("byte_level", "a<|im_end|>"),
        ("sentencepiece", "a</s>"),
        ("word_pieces", "hello, world"),
        ("sentencepiece", "a▁b"),
    ],
)
def test_no_tokens_spell_it(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    """A special token's text would become that token, unknown words and SentencePiece's sign something else."""
    assert Retokenizer(tokenizers[kind], VOCAB_SIZE).tokenize(text) is None


def test_a_model_with_fewer_rows_than_the_tokenizer_has_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    assert Retokenizer(tokenizer, VOCAB_SIZE).tokenize("<plain é>") == [tokenizer.vocab_size - 1]
    assert Retokenizer(tokenizer, tokenizer.vocab_size - 1).tokenize("<plain é>") is None


# -- jumps -------------------------------------------------------------------------------------------------------


def request(regex: str, output: str, **params: Any) -> tuple[Req, Retokenizer]:
    """A request that has generated ``output``, in the tokens of the tiny models' tokenizer."""
    tokenizer = get_tokenizer(str(model_folder("llama")))
    req = Req("r", [5, 6], SamplingParams(regex=regex, **params), True, tokenizer)
    req.regex_fsm = FSMCache(tokenizer, VOCAB_SIZE).get(regex)
    req.jump_forward_map = JumpForwardMap(req.regex_fsm.index)
    for byte in output.encode():
        [token_id] = tokenizer.encode(chr(byte)) if byte < 128 else []
        req.append_token(token_id)
    return req, Retokenizer(tokenizer, VOCAB_SIZE)


def test_tokens_are_those_of_the_whole_text() -> None:
    req, retokenizer = request("(the|tie) quick", "t", max_new_tokens=50)
    assert retokenizer.find_jump(req) is None, "two ways to go on"
    req, retokenizer = request("(the|tie) quick", "th", max_new_tokens=50)
    jump = retokenizer.find_jump(req)
    assert jump is not None
    assert jump.forced_text == "e quick" and jump.output_text == "the quick"
    assert jump.output_ids == retokenizer.tokenizer.encode("the quick")
    assert jump.output_ids[:2] != req.output_ids
    assert jump.num_new_tokens == len(jump.output_ids) - 2
    req.jump_forward(jump)
    assert req.output_ids == jump.output_ids and req.regex_fsm is not None
    assert req.regex_fsm.is_final(req.regex_fsm_state)


@pytest.mark.parametrize(
    ("regex", "output", "params"),
    [
        ("a[bc]", "a", {}),
        ("a*", "aa", {}),
        ("ab", "a", {}),
        ("a the", "a", {}),
        ("abc<[|]im_end[|]>d", "a", {}),
        ("abcdefghi", "a", {"max_new_tokens": 8}),
        ("abcdefghi", "a", {"stop": ["def"]}),
        ("abcdefghi", "ab", {"stop": ["zz", "bc"]}),
    ],
    ids=[
        "choice",
        "end",
        "one byte",
        "one token",
        "special token",
        "limit",
        "stop string",
        "stop string begun",
    ],
)
def test_a_refused_jump_changes_nothing(regex: str, output: str, params: dict[str, Any]) -> None:
    """History put the forced tokens behind the output first, and left them there when it then refused."""
    req, retokenizer = request(regex, output, **{"max_new_tokens": 50, **params})
    before = {name: copy.deepcopy(vars(req)[name]) for name in ("output_ids", "regex_fsm_state", "vid")}
    held = copy.deepcopy(vars(req._stop_filter)) if req._stop_filter else None
    assert retokenizer.find_jump(req) is None
    assert {name: vars(req)[name] for name in before} == before
    assert req._stop_filter is None or vars(req._stop_filter) == held


def test_a_refused_jump_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused again behind every token of the forced text that is generated instead."""
    req, retokenizer = request("abcdefghijkl", "a", max_new_tokens=6)
    seen: list[str] = []
    encode = Tokenizer.encode

    def counting(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        seen.append(text)
        return encode(self, text, add_special_tokens)

    letters = [retokenizer.tokenizer.encode(letter)[0] for letter in "bcde"]
    monkeypatch.setattr(Tokenizer, "encode", counting)
    for letter in letters:
        assert retokenizer.find_jump(req) is None
        req.append_token(letter)
    assert seen == ["abcdefghijkl"]


def test_tokens_that_were_handed_out_are_not_shared() -> None:
    """A request's output grows behind its jump; the next one to the same text must not find that there."""
    req, retokenizer = request("abcdefghi", "a", max_new_tokens=50)
    jump = retokenizer.find_jump(req)
    assert jump is not None
    req.jump_forward(jump)
    req.append_token(2)
    again, _ = request("abcdefghi", "a", max_new_tokens=50)
    repeated = retokenizer.find_jump(again)
    assert repeated is not None and retokenizer.tokenizer.decode(repeated.output_ids) == "abcdefghi"
    assert repeated.num_new_tokens == jump.num_new_tokens


def test_the_same_jump_with_room_is_taken() -> None:
    for params in ({"max_new_tokens": 9}, {"stop": ["xyz", "hij"]}):
        req, retokenizer = request("abcdefghi", "a", **{"max_new_tokens": 50, **params})
        assert retokenizer.find_jump(req) is not None


def test_a_stop_string_may_begin_in_forced_text_and_end_behind() -> None:
    req, retokenizer = request("abcdef[xy]z", "a", max_new_tokens=50, stop=["efxz"])
    jump = retokenizer.find_jump(req)
    assert jump is not None
    req.jump_forward(jump)
    for letter in "xz":
        req.append_token(*retokenizer.tokenizer.encode(letter))
    assert req.finish_reason_object() == {"type": "stop", "matched": "efxz"}


def test_a_stop_string_is_found_behind_a_character_that_was_begun() -> None:
    """Its bytes are in the forced text, and must not come again before the next token's."""
    req, retokenizer = request("ab🎉cd[xy]z", "ab", max_new_tokens=50, stop=["dxz"])
    req.append_token(retokenizer.tokenizer.encode("🎉")[0])
    jump = retokenizer.find_jump(req)
    assert jump is not None
    req.jump_forward(jump)
    for letter in "xz":
        req.append_token(*retokenizer.tokenizer.encode(letter))
    assert req.finish_reason_object() == {"type": "stop", "matched": "dxz"}


def test_what_was_sent_is_continued() -> None:
    """Whole characters of the tokens sent stand; the next message has the text since, then tokens."""
    tokenizer = get_tokenizer(str(model_folder("llama")))
    req, retokenizer = request("ab🎉cd(x|y)efg", "ab", max_new_tokens=50)
    first_half = tokenizer.encode("🎉")[:2]
    req.append_token(first_half[0])
    assert req.take_unsent_tokens() == [*req.output_ids[:2], first_half[0]] and req.take_unsent_text() == ""
    req.append_token(first_half[1])
    jump = retokenizer.find_jump(req)
    assert jump is not None
    req.jump_forward(jump)
    for letter in "x":
        req.append_token(*tokenizer.encode(letter))
    jump = retokenizer.find_jump(req)
    assert jump is not None
    req.jump_forward(jump)
    assert req.vid == 2
    assert req.take_unsent_text() == "🎉cdxefg" and req.take_unsent_tokens() == []
    assert req.take_unsent_text() == ""
    assert req.num_completion_tokens_wo_jump_forward == 5 < req.num_completion_tokens
