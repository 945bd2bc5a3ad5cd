"""Loading: several files, fused layers, packed layers; and checkpoints that don't fit are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.v0_1_genesis.layers.weight_utils import safetensors_files
from stages.v0_1_genesis.support import packed_linear
from tests.models.tiny import tiny_llama

from .batches import new_runner, prefill, prompts, reference_logits, strewn_rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a tiny model that a test may spoil."""
    return Path(shutil.copytree(tiny_llama("llama"), tmp_path / "model"))


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors (dots in names written as two underscores); None removes one."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, file)


def test_an_index_decides_which_files_count() -> None:
    folder = tiny_llama("llama-mha")
    assert len(safetensors_files(str(folder))) > 1


def test_a_missing_file_of_an_index_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    with pytest.raises(ValueError, match=r"lacks a\.safetensors"):
        safetensors_files(str(tmp_path))


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit(folder, model__layers__1__self_attn__k_proj__weight=None)
    with pytest.raises(ValueError, match=r"lacks 1 tensors, among them model\.layers\.1\.self_attn\.k_proj"):
        new_runner(str(folder))


def test_a_tensor_without_a_place_is_named(folder: Path) -> None:
    edit(folder, model__layers__7__mlp__up_proj__weight=torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"model\.layers\.7\.mlp\.up_proj\.weight has no place"):
        new_runner(str(folder))


def test_a_tensor_of_a_wrong_shape_is_named(folder: Path) -> None:
    edit(folder, model__norm__weight=torch.ones(3))
    with pytest.raises(ValueError, match=r"model\.norm\.weight of shape \[3\]"):
        new_runner(str(folder))


def test_leftovers_of_old_checkpoints_are_passed_over(folder: Path) -> None:
    edit(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    new_runner(str(folder))


def test_dummy_weights_need_no_file_and_depend_on_the_seed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="--load-format dummy"):
        new_runner(str(folder))
    ids, rows = prompts(9), strewn_rows([9])
    first, again, other = (
        prefill(new_runner(str(folder), load_format="dummy", random_seed=seed), ids, rows).next_token_logits
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert torch.isfinite(first).all()


@pytest.mark.parametrize("model", ["llama", "llama-gqa3"])
def test_packing_every_layer_changes_no_logits(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Tied embeddings included: the lookup keeps the plain weight, the head gets a packed one."""
    monkeypatch.setattr(packed_linear, "MIN_FLOAT32_ELEMENTS", 0)
    runner = new_runner(str(tiny_llama(model)))
    packed = [module.weight.is_mkldnn for module in runner.model.modules() if hasattr(module, "weight")]
    assert any(packed) == packed_linear.can_pack(torch.float32)
    assert not runner.model.model.embed_tokens.weight.is_mkldnn
    ids = prompts(20, 3)
    logits = prefill(runner, ids, strewn_rows([20, 3])).next_token_logits
    for row, seq in zip(logits, ids, strict=True):
        expected = reference_logits(str(tiny_llama(model)), seq)[-1]
        torch.testing.assert_close(row, expected, atol=5e-4, rtol=0.0)
