"""INV-TEXT: only whole characters, nothing taken back, nothing lost (probes B01, B02); unit and server."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from tokenizers import Tokenizer

from stages.v0_1_genesis.hf_transformers_utils import get_tokenizer as genesis_tokenizer
from stages.v0_1_genesis.support import text_stream as genesis_text
from strata.adapters import ServerDriver

from .driving import prompt
from .fixtures import ServerFactory, model_folder
from .speaking import generate, probe, stream

TEXTS = ["é", "中文", "🤗", "👩‍👩‍👧", "नमस्ते", "plain", "a\u0301", "x🤗y中z", " lead", "two  spaces\n\n"]
SEEDS = 50


class DetokenizerContract:
    """Subclass with ``pieces``: what the stage's incremental detokenizer gives for ids pushed in groups."""

    @staticmethod
    def pieces(model: str, groups: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        """One piece for each group, and the flushed rest at the end."""
        raise NotImplementedError

    @pytest.mark.parametrize("text", TEXTS)
    def test_one_id_at_a_time(self, text: str) -> None:
        """Probe B01."""
        ids = Tokenizer.from_file(str(model_folder("llama") / "tokenizer.json")).encode(text).ids
        pieces = self.pieces("llama", [[i] for i in ids])
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
        for end in range(len(ids)):
            shown = "".join(self.pieces("llama", [[i] for i in ids[:end]])[:-1])
            assert text.startswith(shown), "a piece was not a whole character"

    def test_random_ids_in_random_groups(self) -> None:
        """Joined pieces are the tokenizer's own decoding, however the ids are cut, broken bytes included."""
        tokenizer = Tokenizer.from_file(str(model_folder("llama") / "tokenizer.json"))
        rng = random.Random(0)
        for case in range(100):
            ids = [rng.randrange(384) for _ in range(rng.randrange(1, 30))]
            skip = case % 2 == 0
            cuts = sorted(rng.sample(range(len(ids) + 1), min(3, len(ids))))
            groups = [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]
            joined = "".join(self.pieces("llama", groups, skip))
            assert joined == tokenizer.decode(ids, skip_special_tokens=skip)

    @pytest.mark.slow
    def test_smollm2(self) -> None:
        tokenizer = Tokenizer.from_file(str(model_folder("smollm2") / "tokenizer.json"))
        for text in [*TEXTS, "Once upon a time, 中文 and 🤗 met नमस्ते."]:
            assert "".join(self.pieces("smollm2", [[i] for i in tokenizer.encode(text).ids])) == text


class TestGenesisDetokenizer(DetokenizerContract):
    stage = "v0.1"

    @staticmethod
    def pieces(model: str, groups: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        tokenizer = genesis_tokenizer(str(model_folder(model)))
        decoder = genesis_text.IncrementalDetokenizer(tokenizer, skip_special_tokens)
        return [*(decoder.push(group) for group in groups), decoder.flush()]


@pytest.fixture
def server(servers: ServerFactory, stage: str) -> ServerDriver:
    return servers(stage)


def joined(chunks: list[dict[str, Any]]) -> str:
    """The text of a `/generate` stream; every chunk must continue the one before."""
    texts = ["", *(chunk["text"] for chunk in chunks)]
    for earlier, later in itertools.pairwise(texts):
        assert later.startswith(earlier), f"INV-TEXT: {later!r} does not continue {earlier!r}"
    return texts[-1]


@pytest.mark.slow
@pytest.mark.needs("sampling.seed")
def test_streams_equal_answers(server: ServerDriver) -> None:
    """Probe B01: random bytes at temperature 1, ended anywhere; stream and answer say the same."""
    params = [
        {
            "temperature": 1,
            "seed": seed,
            "max_new_tokens": 1 + seed % 32,
            "skip_special_tokens": seed % 2 == 0,
        }
        for seed in range(SEEDS)
    ]
    with probe(server):
        answers = generate(server, text=["中文 🤗"] * SEEDS, sampling_params=params)
        for answer, param in zip(answers, params, strict=True):
            chunks = stream(server, "/generate", {"text": "中文 🤗", "sampling_params": param})
            assert joined(chunks) == answer["text"]
            assert chunks[-1]["meta_info"]["finish_reason"] == answer["meta_info"]["finish_reason"]


def test_a_stream_of_many_prompts(server: ServerDriver) -> None:
    """Each prompt's chunks carry its index, and join to its answer."""
    body: dict[str, Any] = {
        "input_ids": [prompt(length, seed=50) for length in (4, 30, 1, 12)],
        "sampling_params": [{"temperature": 0, "max_new_tokens": limit} for limit in (20, 5, 33, 0)],
    }
    whole = generate(server, **body)
    chunks = stream(server, "/generate", body)
    for index in range(4):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert joined(mine) == whole[index]["text"]
        assert [bool(c["meta_info"]["finish_reason"]) for c in mine] == [False] * (len(mine) - 1) + [True]


TEXT_40 = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 40}


def stop_cases(text: str) -> list[str]:
    """Substrings of 2 to 8 characters, broken characters left out (a client can't know them)."""
    cuts = {text[i : i + n] for n in range(2, 9) for i in range(len(text) - n + 1)}
    return sorted(cut for cut in cuts if "\ufffd" not in cut)


@pytest.mark.slow
@pytest.mark.needs("sampling.stop_strings")
def test_every_stop_string(server: ServerDriver) -> None:
    """Probe B02: the text ends before the first occurrence, whichever tokens the stop string crosses."""
    text = generate(server, text="There once", sampling_params=TEXT_40)["text"]
    stops = stop_cases(text)
    assert len(stops) > 50
    with probe(server):
        for start in range(0, len(stops), 64):
            group = stops[start : start + 64]
            answers = generate(
                server,
                text=["There once"] * len(group),
                sampling_params=[{**TEXT_40, "stop": stop} for stop in group],
            )
            for stop, answer in zip(group, answers, strict=True):
                assert answer["text"] == text[: text.index(stop)], repr(stop)
                assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        for stop in stops[::9]:
            params = {**TEXT_40, "stop": stop}
            chunks = stream(server, "/generate", {"text": "There once", "sampling_params": params})
            assert joined(chunks) == text[: text.index(stop)], repr(stop)
            assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


@pytest.mark.needs("sampling.stop_strings")
def test_stops_that_never_complete_lose_nothing(server: ServerDriver) -> None:
    """Probe B02: what was held back comes out at the end."""
    text = generate(server, text="There once", sampling_params=TEXT_40)["text"]
    for stop in (text[-3:] + "\u0001", text[-1:] + "\u0001", text + "\u0001"):
        body: dict[str, Any] = {"text": "There once", "sampling_params": {**TEXT_40, "stop": stop}}
        assert generate(server, **body)["text"] == text
        chunks = stream(server, "/generate", body)
        assert joined(chunks) == text
        assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
    # Who asks for no tokens hears of none, nor of a stop string in one.
    params = {**TEXT_40, "stop": text[0], "max_new_tokens": 0}
    nothing = generate(server, text="There once", sampling_params=params)
    assert nothing["text"] == ""
    assert nothing["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


@pytest.mark.needs("sampling.stop_strings")
def test_stop_strings_that_overlap(server: ServerDriver) -> None:
    """Probe B02: one a prefix of the other; one that begins earlier but ends later; one of the prompt."""
    text = generate(server, text="There once", sampling_params=TEXT_40)["text"]
    start = next(i for i in range(8, len(text) - 6) if "\ufffd" not in text[i : i + 6])
    long, short, inner = text[start : start + 6], text[start : start + 3], text[start + 2 : start + 4]
    for stops in ([long, short], [short, long], [long, inner], [inner, long], [short + "\u0001", short]):
        answer = generate(server, text="There once", sampling_params={**TEXT_40, "stop": stops})
        first = min(text.find(stop) for stop in stops if stop in text)
        assert answer["text"] == text[:first], stops
    # The prompt is no part of the text that stops are looked for in.
    answer = generate(server, text="There once", sampling_params={**TEXT_40, "stop": ["There once"]})
    assert answer["text"] == text
