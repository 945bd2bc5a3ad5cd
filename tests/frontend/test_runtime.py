"""`Runtime` around the real engine on a tiny model: the front end to end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from stages.v0_1_genesis.server import Runtime
from tests.models.tiny import tiny_llama

pytestmark = pytest.mark.slow  # each test starts servers of its own

KEY = "sk-rüntime"
GREEDY = {"temperature": 0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    folder = str(tiny_llama("llama"))
    with Runtime(folder, device="cpu", max_total_tokens=2048, api_key=KEY, model_mode=["torch"]) as runtime:
        yield runtime


def test_generate_takes_one_prompt_or_a_list(runtime: Runtime) -> None:
    one = runtime.generate("the quick", GREEDY)
    assert one["meta_info"]["completion_tokens"] == 8
    two = runtime.generate(["the quick", "a"], [GREEDY, {"max_new_tokens": 3}])
    assert two[0]["text"] == one["text"]
    assert two[1]["meta_info"]["completion_tokens"] == 3
    assert runtime.generate("a")["meta_info"]["completion_tokens"] == 16


def test_a_refusal_raises_with_the_servers_words(runtime: Runtime) -> None:
    with pytest.raises(RuntimeError, match="temperature must be"):
        runtime.generate("a", {"temperature": -1})


def test_it_may_be_used_from_many_threads(runtime: Runtime) -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: runtime.generate("the quick", GREEDY)["text"], range(16)))
    assert len(set(texts)) == 1


def test_main_and_detokenizer_of_the_real_server_never_load_torch(runtime: Runtime) -> None:
    main = psutil.Process(runtime._process.pid)
    assert not [region.path for region in main.memory_maps() if "torch" in Path(region.path).name]
    children = [p for p in main.children() if "spawn_main" in " ".join(p.cmdline())]
    with_torch = [any("libtorch" in region.path for region in p.memory_maps()) for p in children]
    assert sorted(with_torch) == [False, True]


def test_shutdown_leaves_nothing_and_may_be_called_twice() -> None:
    runtime = Runtime(str(tiny_llama("llama")), device="cpu", max_total_tokens=512)
    processes = [main := psutil.Process(runtime._process.pid), *main.children(recursive=True)]
    runtime.shutdown()
    runtime.shutdown()
    _, alive = psutil.wait_procs(processes, 5)
    assert not alive
    with pytest.raises(httpx.TransportError):
        httpx.get(runtime.url + "/health", trust_env=False)
