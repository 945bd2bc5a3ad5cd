"""Session-scoped engines and servers, one per (stage, model, arguments); a plugin of `tests/conftest.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.adapters import DIALECTS, Engine, ServerDriver
from tests.models.tiny import TINY_MODELS, tiny_llama

POOL_SIZE = 4096
"""Slots of an engine's pool where a test does not say: small, since a snapshot lists them all."""

EngineFactory = Callable[..., Engine]
ServerFactory = Callable[..., ServerDriver]


EVERY_TINY_MODEL = [
    pytest.param(name, marks=pytest.mark.needs(model.capability)) for name, model in TINY_MODELS.items()
]
"""Parameters for a test of every tiny model that its stage can serve."""


def model_folder(name: str) -> Path:
    """A tiny model's folder, or the embedded model's, fetched when it is missing."""
    if name != "smollm2":
        return tiny_llama(name)
    from strata.model_zoo import fetch

    return fetch()


RUNNING_SERVERS: dict[tuple[str, ...], ServerDriver] = {}
"""The session's servers, by stage, model and flags; a failed test's report shows their logs."""


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest) -> EngineFactory:
    """``engines(stage, "llama", max_total_tokens=512)``: an idle engine with an empty tree, shared.

    On the CPU, or on a CUDA device with the attention path that is the fixture's parameter (`tests/gpu_run.py`).
    """
    attention: str | None = getattr(request, "param", None)
    built: dict[tuple[Any, ...], Engine] = {}

    def get(stage: str, model: str = "llama", **server_args: Any) -> Engine:
        server_args = {"max_total_tokens": POOL_SIZE, **server_args}
        if attention is not None:
            server_args["device"] = "cuda"
            for name, value in DIALECTS[stage].attention_args[attention].items():
                server_args[name] = value + server_args.get(name, type(value)())
        key = (stage, model, repr(sorted(server_args.items())))
        # One that a failed test broke is made anew, so that one bug is one failure.
        if key not in built or not reset(built[key]):
            built[key] = DIALECTS[stage].make_engine(model_folder(model), **server_args)
        return built[key]

    return get


def reset(engine: Engine) -> bool:
    """Abort what an earlier test left, and empty the tree; whether all is free then."""
    state = engine.state()
    for rid in (*state.running, *state.waiting):
        engine.abort(rid)
    engine.step()
    engine.flush()
    engine.step()
    state = engine.state()
    return not state.running and not state.waiting and state.free == state.size


@pytest.fixture(scope="session")
def servers() -> Iterator[ServerFactory]:
    """``servers(stage, "llama", "--max-total-tokens", "512")``: a running server, shared by the session."""
    running = RUNNING_SERVERS

    def get(stage: str, model: str = "llama", *flags: str) -> ServerDriver:
        key = (stage, model, *flags)
        if key in running and running[key].process.poll() is not None:
            running.pop(key).stop()  # an earlier test's failure ended it
        if key not in running:
            driver = ServerDriver(stage, model_folder(model), ["--device", "cpu", *flags])
            driver.start()
            running[key] = driver
        return running[key]

    yield get
    for driver in running.values():
        driver.stop()
