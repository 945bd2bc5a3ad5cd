"""Who is measured: each stage's engine in this process, and transformers' ``generate``. As long as one run."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Protocol

from ..adapters import DIALECTS, Engine
from .requests import BenchRequest
from .setup import BenchSetup

Outputs = list[list[int]]
"""New ids per request, in the order of the requests."""


class Contender(Protocol):
    """Answers requests greedily, exactly as many tokens as asked, and says how long it took."""

    name: str

    def decode(self, requests: Sequence[BenchRequest]) -> tuple[float, Outputs]:
        """Seconds for all steps after the first token; the requests want equally many tokens."""
        ...

    def answer(self, requests: Sequence[BenchRequest]) -> float:
        """Seconds from handing over all requests to the last token of the last one."""
        ...

    def first_token(self, ids: Sequence[int]) -> float:
        """Seconds from handing over one prompt to its first token. What is cached stays cached."""
        ...

    def forget(self) -> None:
        """Drop what was cached."""
        ...


class StageContender:
    """A stage's engine without sockets or HTTP, stepped one forward at a time."""

    def __init__(self, stage: str, setup: BenchSetup) -> None:
        self.name = stage
        arguments = {
            "device": setup.device,
            "dtype": setup.dtype,
            "load_format": setup.load_format,
            "max_running_requests": setup.max_running_requests,
        }
        self.engine: Engine = DIALECTS[stage].make_engine(
            setup.model_path, **arguments, **dict(setup.server_args)
        )

    def decode(self, requests: Sequence[BenchRequest]) -> tuple[float, Outputs]:
        steps, outputs = self._run(requests)
        return sum(steps[1 - requests[0].new_tokens :]), outputs

    def answer(self, requests: Sequence[BenchRequest]) -> float:
        return sum(self._run(requests)[0])

    def first_token(self, ids: Sequence[int]) -> float:
        return sum(self._run([BenchRequest(tuple(ids), 1)])[0])

    def forget(self) -> None:
        self.engine.flush()
        self.engine.step()

    def _run(self, requests: Sequence[BenchRequest]) -> tuple[list[float], Outputs]:
        """Seconds of each step until all requests are done. The engine must be idle."""
        for index, request in enumerate(requests):
            params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": request.new_tokens}
            self.engine.add(request.ids, params, rid=str(index))
        outputs: Outputs = [[] for _ in requests]
        steps = list[float]()
        unfinished = len(requests)
        while unfinished:
            started = time.perf_counter()
            events = self.engine.step()
            steps.append(time.perf_counter() - started)
            for event in events:
                outputs[int(event.rid)] += event.new_ids
                unfinished -= event.finish is not None
        return steps, outputs


class TransformersContender:
    """``generate`` of the same model folder: one static, left-padded batch; nothing is cached between calls."""

    name = "transformers"

    def __init__(self, setup: BenchSetup) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        self._torch = torch
        self._device = setup.device
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            setup.model_path, dtype=getattr(torch, setup.dtype)
        )
        self._model = model.to(setup.device)
        self._model.eval()
        # No end token: every answer has its full length, as with ignore_eos.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def decode(self, requests: Sequence[BenchRequest]) -> tuple[float, Outputs]:
        marks, outputs = self._generate(requests)
        return marks[-1] - marks[1], outputs

    def answer(self, requests: Sequence[BenchRequest]) -> float:
        marks, _ = self._generate(requests)
        return marks[-1] - marks[0]

    def first_token(self, ids: Sequence[int]) -> float:
        marks, _ = self._generate([BenchRequest(tuple(ids), 1)])
        return marks[-1] - marks[0]

    def forget(self) -> None:
        pass

    def _generate(self, requests: Sequence[BenchRequest]) -> tuple[list[float], Outputs]:
        """Times of the start and of each step's logits; the new ids, cut to what each request wants."""
        torch = self._torch
        longest = max(len(request.ids) for request in requests)
        padding = [longest - len(request.ids) for request in requests]
        ids = [[0] * pad + list(request.ids) for pad, request in zip(padding, requests, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        marks = [time.perf_counter()]

        def mark(_: object, scores: Any) -> Any:
            if self._device != "cpu":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
            return scores

        with torch.inference_mode():
            generated = self._model.generate(
                input_ids=torch.tensor(ids, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                max_new_tokens=max(request.new_tokens for request in requests),
                do_sample=False,
                logits_processor=[mark],
            )
        new = generated[:, longest:].tolist()
        return marks, [row[: request.new_tokens] for row, request in zip(new, requests, strict=True)]


def vocab_size(setup: BenchSetup) -> int:
    """The model's vocabulary, from its config."""
    return json.loads((setup.model_path / "config.json").read_text())["vocab_size"]


def make_contenders(setup: BenchSetup) -> list[Contender]:
    """Every stage asked for, and transformers where there are weights to load."""
    contenders: list[Contender] = [StageContender(stage, setup) for stage in setup.stages]
    if setup.load_format != "dummy":
        contenders.append(TransformersContender(setup))
    return contenders
