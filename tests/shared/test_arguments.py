"""Command lines that can't be served: one clear line that names the flag, before anything is loaded."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from strata.adapters import DIALECTS, ServerDriver, ServerError

from .fixtures import model_folder


def arguments(stage: str, **fields: Any) -> Any:
    module = importlib.import_module(f"{DIALECTS[stage].package}.server_args")
    return module.ServerArgs(model_path="folder", **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_total_tokens": 2}, "--max-total-tokens must be at least 3, got 2"),
        ({"context_length": 1}, "--context-length must be at least 2, got 1"),
        ({"random_seed": 2**63}, f"--random-seed must be a 64-bit integer, got {2**63}"),
        ({"host": "a..b", "allow_remote_without_key": True}, "--host must be an address .* got 'a..b'"),
        ({"host": "a" * 64 + ".example", "allow_remote_without_key": True}, "--host must be an address"),
        ({"host": "", "allow_remote_without_key": True}, "--host must be an address"),
        *(({"api_key": key}, "--api-key must have") for key in ("", " ", "key ", "\tkey", "a\nb", "a\0b")),
    ],
)
def test_what_can_not_be_is_said(stage: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        arguments(stage, **fields).check()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_hosts_and_keys_that_can_be(stage: str, host: str) -> None:
    arguments(stage, host=host, api_key="sk a key, öäü", max_total_tokens=3, context_length=2).check()


@pytest.mark.needs("admission.new_token_ratio")
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_conservativeness_is_a_number_above_0(stage: str, value: float) -> None:
    """Infinity, for one, could not be told to another node."""
    with pytest.raises(ValueError, match="--schedule-conservativeness must be a finite number above 0"):
        arguments(stage, schedule_conservativeness=value).check()


@pytest.mark.needs("admission.new_token_ratio")
def test_a_forced_retraction_has_an_interval_or_none(stage: str) -> None:
    arguments(stage, debug_retract_every=0).check()
    with pytest.raises(ValueError, match=r"--debug-retract-every must be at least 0, got -1"):
        arguments(stage, debug_retract_every=-1).check()


@pytest.mark.parametrize("name", ["max_total_tokens", "context_length"])
def test_more_than_the_memory_that_is_free_is_refused_by_flag(stage: str, name: str) -> None:
    """Before anything is allocated, since memory is given out on credit and missed only when it is written."""
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ValueError, match=rf"{flag} {10**12} needs .* GiB and .* GiB are free: lower it"):
        DIALECTS[stage].make_engine(model_folder("llama"), **{name: 10**12})


@pytest.mark.slow
def test_a_pool_too_large_ends_a_server_without_a_traceback(stage: str) -> None:
    flags = ["--device", "cpu", "--max-total-tokens", str(10**12)]
    with pytest.raises(ServerError, match="ended with code 1") as error:
        ServerDriver(stage, model_folder("llama"), flags).start()
    assert f"--max-total-tokens {10**12} needs" in str(error.value).splitlines()[-1]
    assert "Traceback" not in str(error.value)


def test_the_smallest_pool_and_context_serve(stage: str) -> None:
    engine = DIALECTS[stage].make_engine(model_folder("llama"), max_total_tokens=3, context_length=2)
    rid = engine.add([5], {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True})
    [event] = engine.step()
    assert (event.rid, len(event.new_ids)) == (rid, 1)
    assert event.finish == {"type": "length", "length": 1}
