"""Weights on disk -> (name, tensor) pairs, and random ones where there is nothing on disk.

Used once by each rank while it loads the model. Only safetensors: pickled checkpoints can run code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

INDEX_FILE = "model.safetensors.index.json"


def safetensors_files(folder: str) -> list[Path]:
    """The checkpoint's files: those its index names, else every ``*.safetensors`` in the folder.

    Raises:
        ValueError: there is none, or one that the index names is missing.
    """
    index = Path(folder) / INDEX_FILE
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [Path(folder) / name for name in names]
        if missing := [file.name for file in files if not file.exists()]:
            raise ValueError(f"{folder} lacks {missing[0]}, which {INDEX_FILE} names: fetch the model again.")
        return files
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors file (--load-format dummy needs none).")
    return files


def safetensors_weights_iterator(folder: str) -> Iterator[tuple[str, Tensor]]:
    """Every (name, tensor) of the checkpoint; the tensors are memory-mapped, read when they are copied."""
    for file in safetensors_files(folder):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (no mapping, it only has keys())
                yield name, weights.get_tensor(name)


def initialize_dummy_weights(model: nn.Module, seed: int) -> None:
    """Fill the model with seeded normal numbers of standard deviation 0.02, norms with ones."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, param in model.named_parameters():
        if "norm" in name:
            param.data.fill_(1.0)
        else:
            param.data.normal_(std=0.02, generator=generator)
