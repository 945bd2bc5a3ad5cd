"""Which models a stage serves: what it can't serve is said before a process starts, and what it can't do as well."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from strata.adapters import DIALECTS, Engine, ServerDriver, ServerError

from .fixtures import model_folder


def respelled(target: Path, name: str, **fields: Any) -> Path:
    """A copy of a tiny model with other fields in its config.json."""
    folder = Path(shutil.copytree(model_folder(name), target / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def make_engine(stage: str, folder: Path, **server_args: Any) -> Engine:
    return DIALECTS[stage].make_engine(folder, **{"max_total_tokens": 256, **server_args})


def context_len(stage: str, folder: Path, context_length: int | None = None) -> int:
    module = importlib.import_module(f"{DIALECTS[stage].package}.model_config")
    return module.ModelConfig(str(folder), context_length).context_len


def test_an_architecture_that_is_not_there_is_named_with_those_that_are(stage: str, tmp_path: Path) -> None:
    folder = respelled(tmp_path, "llama", architectures=["GPT2LMHeadModel"])
    with pytest.raises(ServerError) as error:
        ServerDriver(stage, folder, ["--device", "cpu"]).start()
    [line] = [line for line in str(error.value).splitlines() if "GPT2LMHeadModel" in line]
    supported = importlib.import_module(f"{DIALECTS[stage].package}.models").SUPPORTED_ARCHITECTURES
    assert all(architecture in line for architecture in supported)
    assert {"LlamaForCausalLM", "MistralForCausalLM"} <= set(supported)
    assert "Traceback" not in str(error.value) and "loading" not in str(error.value)


def test_a_context_beyond_the_sliding_window_is_refused(stage: str, tmp_path: Path) -> None:
    folder = respelled(tmp_path, "mistral", sliding_window=128)
    assert context_len(stage, folder) == 128
    assert context_len(stage, folder, 128) == 128
    with pytest.raises(ValueError, match="--context-length 129 goes beyond the sliding window of 128 tokens"):
        context_len(stage, folder, 129)
    wide = respelled(tmp_path / "wide", "mistral", sliding_window=4096)
    assert context_len(stage, wide) == 2048
    none = respelled(tmp_path / "none", "mistral", sliding_window=None)
    assert context_len(stage, none, 5000) == 5000


@pytest.mark.needs("model.qwen2")
def test_a_window_that_qwen2_does_not_use_limits_nothing(stage: str, tmp_path: Path) -> None:
    unsaid = respelled(tmp_path, "qwen2", sliding_window=128)
    config = json.loads((unsaid / "config.json").read_text())
    del config["use_sliding_window"]
    (unsaid / "config.json").write_text(json.dumps(config))
    assert context_len(stage, unsaid) == 2048
    unused = respelled(tmp_path / "unused", "qwen2", sliding_window=128, use_sliding_window=False)
    assert context_len(stage, unused, 2048) == 2048
    used = respelled(tmp_path / "used", "qwen2", sliding_window=128, use_sliding_window=True)
    assert context_len(stage, used) == 128
    with pytest.raises(ValueError, match="sliding window of 128"):
        context_len(stage, used, 2048)


@pytest.mark.needs("model.qwen2")
@pytest.mark.parametrize("shard", ["q_proj", "k_proj", "v_proj"])
def test_qwen2_needs_each_bias(stage: str, tmp_path: Path, shard: str) -> None:
    folder = respelled(tmp_path, "qwen2")
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.1.self_attn.{shard}.bias"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"lacks 1 tensors, among them .*\.1\.self_attn\.{shard}\.bias"):
        make_engine(stage, folder)


@pytest.mark.needs("model.qwen2")
def test_qwen2_has_no_other_bias(stage: str, tmp_path: Path) -> None:
    folder = respelled(tmp_path, "qwen2")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.bias"] = torch.zeros(64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"o_proj\.bias has no place in Qwen2ForCausalLM"):
        make_engine(stage, folder)


@pytest.mark.needs("model.qwen2")
def test_a_module_of_a_model_names_its_class_for_main_and_for_the_engine(stage: str) -> None:
    """Main reads the names in the modules' text, the engine imports them: both must find the same."""
    models = importlib.import_module(f"{DIALECTS[stage].package}.models")
    modules = {path.stem for path in Path(str(models.__file__)).parent.glob("*.py")} - {"__init__"}
    assert set(models.SUPPORTED_ARCHITECTURES.values()) == modules
    for architecture, module in models.SUPPORTED_ARCHITECTURES.items():
        entry_class = models.load_model_class(architecture)
        assert entry_class.__name__ == architecture
        assert entry_class is importlib.import_module(f".{module}", models.__name__).EntryClass
