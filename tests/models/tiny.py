"""Tiny seeded models: real Hugging Face folders of a few layers with random weights.

``tiny_llama("llama")`` returns the folder of one, built on first use and kept in the user's cache folder
under a hash of everything that shapes it. Building is atomic, so test processes may race for it. The
reference for each is the same folder in transformers.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.cache import cache_folder

from .tokenizer import CHAT_TEMPLATE, END, END_TURN, VOCAB_SIZE, build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EMBEDDING_STD = 1.0


@dataclass(frozen=True)
class TinyModel:
    """What shapes one tiny model; every field is part of its hash."""

    architecture: str = "Llama"
    hidden_size: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 3
    context_len: int = 2048
    tied: bool = False
    vocab_size: int = VOCAB_SIZE
    """Embedding rows; more than the tokenizer's where a checkpoint is padded."""
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    extra: dict[str, Any] = field(default_factory=dict)
    projection_std: float = 0.3
    """Wide weights keep the best logits well apart, so that a greedy answer does not hang on rounding."""
    dtype: str = "float32"
    """Of the checkpoint."""
    shard_size: str = "5GB"
    old_spelling: bool = False
    """Write config.json and the chat template as transformers 4 did."""
    add_bos: bool = False
    seed: int = 0

    @property
    def capability(self) -> str:
        """What a stage must be able to do to serve it."""
        return f"model.{self.architecture.lower()}"

    @property
    def digest(self) -> str:
        """Changes with the model's shape, this folder's code, and the libraries that draw and save it."""
        code = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
        libraries = [version(name) for name in ("torch", "transformers", "tokenizers")]
        text = json.dumps([asdict(self), code, libraries], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


TINY_MODELS: dict[str, TinyModel] = {
    "llama": TinyModel(),
    # SmolLM2's group of three query heads per KV head, and its tied embeddings; a padded vocabulary.
    "llama-gqa3": TinyModel(hidden_size=96, heads=6, tied=True, vocab_size=400, seed=1),
    # Llama 2: as many KV heads as heads; the weights in several files.
    "llama-mha": TinyModel(kv_heads=4, shard_size="60KB", seed=2),
    # Llama 3's rope scaling, with wavelengths on all three sides of its two borders; biased attention.
    "llama-rope3": TinyModel(
        head_dim=32,
        rope={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        extra={"attention_bias": True},
        seed=3,
    ),
    "mistral": TinyModel(
        architecture="Mistral",
        kv_heads=1,
        extra={"sliding_window": None},
        old_spelling=True,
        add_bos=True,
        seed=4,
    ),
    # Biases on query, key and value alone.
    "qwen2": TinyModel(
        architecture="Qwen2",
        head_dim=32,
        rope={"rope_type": "default", "rope_theta": 1000000.0},
        old_spelling=True,
        seed=8,
    ),
    # Qwen2 0.5B ties its embeddings, and has seven heads for each KV head.
    "qwen2-tied": TinyModel(
        architecture="Qwen2", hidden_size=112, heads=7, kv_heads=1, tied=True, vocab_size=400, seed=9
    ),
    # A vocabulary that two ranks can't halve.
    "llama-odd": TinyModel(vocab_size=401, seed=5),
    # The head sizes that FlashInfer has kernels for, as checkpoints in bfloat16. Weights are as narrow as a
    # trained model's: half precision is far off in wide ones whatever the attention, transformers' too.
    "llama-hd64": TinyModel(
        hidden_size=192,
        heads=6,
        kv_heads=2,
        head_dim=64,
        layers=2,
        projection_std=0.07,
        dtype="bfloat16",
        seed=6,
    ),
    "llama-hd128": TinyModel(
        hidden_size=128,
        heads=4,
        kv_heads=1,
        head_dim=128,
        layers=2,
        projection_std=0.07,
        dtype="bfloat16",
        seed=7,
    ),
}


def tiny_llama(name: str = "llama") -> Path:
    """The folder of a tiny model (a key of ``TINY_MODELS``); builds it when it is not there yet."""
    tiny = TINY_MODELS[name]
    folder = cache_folder() / "tiny-models" / f"{name}-{tiny.digest}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
        try:
            _build(tiny, draft)
            _publish(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def _publish(draft: Path, folder: Path) -> None:
    draft.chmod(0o755)
    try:
        draft.rename(folder)
    except OSError:
        if not folder.exists():  # else another process was faster, with the same bytes
            raise


def _build(tiny: TinyModel, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    model = _random_model(tiny)
    model.save_pretrained(folder, max_shard_size=tiny.shard_size)
    PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(tiny.add_bos),
        bos_token=END,
        eos_token=END_TURN,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    if tiny.old_spelling:
        _respell(folder)


def _random_model(tiny: TinyModel) -> PreTrainedModel:
    import torch
    import transformers

    config = getattr(transformers, f"{tiny.architecture}Config")(
        hidden_size=tiny.hidden_size,
        intermediate_size=tiny.hidden_size * 2,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.kv_heads,
        head_dim=tiny.head_dim,
        num_hidden_layers=tiny.layers,
        vocab_size=tiny.vocab_size,
        max_position_embeddings=tiny.context_len,
        tie_word_embeddings=tiny.tied,
        rope_parameters=tiny.rope,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=None,
        **tiny.extra,
    )
    model: PreTrainedModel = getattr(transformers, f"{tiny.architecture}ForCausalLM")(config).float()
    generator = torch.Generator().manual_seed(tiny.seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "norm" in name:
                weight.copy_(1.0 + 0.2 * torch.randn(weight.shape, generator=generator))
            else:
                std = EMBEDDING_STD if "embed" in name or "lm_head" in name else tiny.projection_std
                weight.copy_(std * torch.randn(weight.shape, generator=generator))
    return model.to(getattr(torch, tiny.dtype))


def _respell(folder: Path) -> None:
    """The same model as transformers 4 would have written it: other keys, the template in the JSON."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    template = folder / "chat_template.jinja"
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer_config["chat_template"] = template.read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    template.unlink()
