"""ModelConfig: both spellings of transformers, and refusals that name the field."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.v0_1_genesis.model_config import ModelConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def config(folder: Path, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **fields}))
    return ModelConfig(str(folder))


def test_defaults_of_what_a_config_leaves_out(tmp_path: Path) -> None:
    read = config(tmp_path)
    assert (read.head_dim, read.context_len, read.rope_theta) == (8, 512, 10000.0)
    assert read.rope_scaling is None and not read.tie_word_embeddings and not read.attention_bias
    assert read.torch_dtype == "float32"


def test_both_spellings_of_rope_are_the_same(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0}
    old = config(tmp_path, rope_theta=5e5, rope_scaling={"type": "llama3", **scaling}, torch_dtype="bfloat16")
    new = config(tmp_path, rope_parameters={"rope_theta": 5e5, **scaling}, dtype="bfloat16")
    for read in (old, new):
        assert (read.rope_theta, read.torch_dtype) == (5e5, "bfloat16")
        assert read.rope_scaling is not None
        assert (read.rope_scaling["rope_type"], read.rope_scaling["factor"]) == ("llama3", 8.0)


def test_context_is_what_attention_without_a_window_may_see(tmp_path: Path) -> None:
    assert config(tmp_path, sliding_window=128).context_len == 128
    assert config(tmp_path, sliding_window=None).context_len == 512
    assert ModelConfig(str(tmp_path), context_length=64).context_len == 64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "hidden_size .* must be a positive integer"),
        ({"vocab_size": -3}, "vocab_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **fields)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\u00ff"])
def test_a_broken_file_is_one_clear_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelConfig(str(tmp_path))


def test_a_missing_folder_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"can't read .*config\.json"):
        ModelConfig(str(tmp_path / "nowhere"))


def test_ranks_must_divide_the_heads(tmp_path: Path) -> None:
    read = config(tmp_path)
    for tp_size, kv_heads in ((1, 2), (2, 1), (4, 1), (8, 1)):
        read.check_tp_size(tp_size)
        assert read.get_num_kv_heads(tp_size) == kv_heads
    with pytest.raises(ValueError, match="--tp-size 3 must divide the model's num_attention_heads"):
        read.check_tp_size(3)
    with pytest.raises(ValueError, match="num_key_value_heads"):
        config(tmp_path, num_attention_heads=12, num_key_value_heads=3).check_tp_size(4 // 2)


def test_main_may_read_a_config_without_importing_torch() -> None:
    code = (
        "import sys, stages.v0_1_genesis.model_config, stages.v0_1_genesis.models;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
