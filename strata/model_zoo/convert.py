"""GGUF to a Hugging Face folder, once: ``python -m strata.model_zoo.convert GGUF_FILE OUT_FOLDER``.

Runs in a child process and alone imports torch and transformers. Prints ``progress FRACTION WHAT`` lines,
which `fetch.py` shows. The fractions are shares of the usual time, about half a minute on two cores.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def report(fraction: float, what: str) -> None:
    print(f"progress {fraction:.2f} {what}", flush=True)


def convert(gguf: Path, out: Path) -> None:
    """Write ``out``: config, generation config, tokenizer with chat template, float32 safetensors."""
    report(0.0, "loading transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, logging

    logging.set_verbosity_error()
    report(0.15, "unpacking the 4-bit weights")
    # Weights left packed cannot be saved again, so they are dequantised here.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    report(0.75, "building the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    report(0.9, "writing safetensors")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    report(1.0, "written")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
