"""Session-scoped engines and servers, one per (stage, model, arguments); a plugin of `tests/conftest.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from strata.adapters import DIALECTS, Engine, ServerDriver
from tests.models.tiny import tiny_llama

EngineFactory = Callable[..., Engine]
ServerFactory = Callable[..., ServerDriver]


def model_folder(name: str) -> Path:
    """A tiny model's folder, or the embedded model's, fetched when it is missing."""
    if name != "smollm2":
        return tiny_llama(name)
    from strata.model_zoo import fetch

    return fetch()


@pytest.fixture(scope="session")
def engines() -> EngineFactory:
    """``engines(stage, "llama", max_total_tokens=512)``: an idle engine with an empty tree, shared."""
    import torch

    torch.set_num_threads(min(2, torch.get_num_threads()))

    @cache
    def build(stage: str, model: str, server_args: tuple[tuple[str, Any], ...]) -> Engine:
        return DIALECTS[stage].make_engine(model_folder(model), **dict(server_args))

    def get(stage: str, model: str = "llama", **server_args: Any) -> Engine:
        frozen = {k: tuple(v) if isinstance(v, list) else v for k, v in server_args.items()}
        engine = build(stage, model, tuple(sorted(frozen.items())))
        reset(engine)
        return engine

    return get


def reset(engine: Engine) -> None:
    """Abort what an earlier test left, and empty the tree."""
    state = engine.state()
    for rid in (*state.running, *state.waiting):
        engine.abort(rid)
    engine.step()
    engine.flush()
    engine.step()
    state = engine.state()
    assert not state.running and not state.waiting and state.free == state.size, "engine can't be reset"


@pytest.fixture(scope="session")
def servers() -> Iterator[ServerFactory]:
    """``servers(stage, "llama", "--max-total-tokens", "512")``: a running server, shared by the session."""
    running: dict[tuple[str, ...], ServerDriver] = {}

    def get(stage: str, model: str = "llama", *flags: str) -> ServerDriver:
        key = (stage, model, *flags)
        if key not in running:
            running[key] = ServerDriver(stage, model_folder(model), ["--device", "cpu", *flags])
            running[key].start()
        return running[key]

    yield get
    for driver in running.values():
        driver.stop()
