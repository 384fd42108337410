"""What the command's options must be, checked before a model is loaded: its minutes are not to be lost to a typo."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from centroidkv.errors import CentroidKVError, CommandError, ModelError
from centroidkv.integrations.process import one_line
from centroidkv.integrations.transformers import load_pretrained, load_smollm2
from centroidkv.records import Budget

SMOLLM2 = "smollm2"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""What may be the name of a model on a hub, where there is no such folder."""


def budget(text: str) -> Budget:
    """A budget from the command line: 0.25 is a ratio, 4096 a number of slots."""
    try:
        return Budget.of(int(text) if text.isdigit() else float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} (0.25 is a quarter of the tokens, 4096 a number of slots)") from None


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """How to read a whole number from ``least`` to ``most``."""
    limits = f"a whole number >= {least}" if most is None else f"a whole number from {least} to {most}"

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"takes {limits}, got {text!r}") from None
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"takes {limits}, got {text}")
        return number

    return read


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not 0 <= number <= 1:  # also true of NaN
        raise argparse.ArgumentTypeError(f"takes a number from 0 to 1, got {text!r}")
    return number


def read_prompt(path: Path) -> str:
    """The text of a file, or of stdin if the path is ``-``; UTF-8, whatever the terminal's encoding is.

    Raises:
        CommandError: it is not UTF-8, or empty, or stdin is closed.
        OSError: it cannot be read.
    """
    named = "stdin" if str(path) == "-" else repr(str(path))
    if named != "stdin":
        content: bytes | str = path.read_bytes()
    elif sys.stdin is None or sys.stdin.closed:
        raise CommandError("the prompt is to be read from stdin, which is closed; name a file")
    else:
        stream = getattr(sys.stdin, "buffer", sys.stdin)  # a program that calls us may have put a text stream there
        content = stream.read()
    if isinstance(content, bytes):
        try:
            content = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()
        except UnicodeDecodeError as error:
            raise CommandError(
                f"the prompt in {named} is not UTF-8 text: byte {error.object[error.start]:#04x} at position "
                f"{error.start}; convert it, for instance by iconv -f latin1 -t utf-8"
            ) from None
    if not content:
        raise CommandError(f"the prompt in {named} is empty; there is nothing to go on from")
    return content


def check_model(name: str) -> None:
    """Refuse what can be neither a model's folder nor a name on a hub.

    Raises:
        ModelError: says what is missing.
    """
    path = Path(name)
    if name == SMOLLM2:
        return
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelError(f"the folder {name!r} holds no config.json, so it is not a model saved by transformers")
    elif path.exists():
        raise ModelError(f"{name!r} is a file; name the folder of a model, or {SMOLLM2!r} for the packaged one")
    elif not HUB_NAME.fullmatch(name) or name.startswith("."):
        raise ModelError(
            f"there is no folder {name!r}; name the folder of a model, or {SMOLLM2!r} for the packaged one"
        )


def load(name: str, dtype: torch.dtype, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Model and tokenizer.

    Raises:
        ModelError: with the reason, whatever transformers, safetensors or torch call it.
    """
    try:
        if name == SMOLLM2:
            return load_smollm2(dtype)
        return load_pretrained(name, dtype, trust_remote_code=trust_remote_code)
    except (CentroidKVError, MemoryError):
        raise
    except Exception as error:
        raise ModelError(f"the model {name!r} cannot be loaded: {one_line(error)}") from error


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be written when it is drawn.

    Raises:
        CommandError: its folder is missing or not to be written to, or its suffix is no format of a picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in known:
        raise CommandError(
            f"the picture {str(path)!r} ends in none of {', '.join(known)}; name it demo.png, for example"
        )
    if path.is_dir():
        raise CommandError(f"the picture {str(path)!r} is a folder; name a file in it")
    folder = path.parent
    if not folder.is_dir():
        raise CommandError(f"the picture {str(path)!r} is to be in the folder {str(folder)!r}, which does not exist")
    try:
        with tempfile.TemporaryFile(dir=folder):  # what the rights say is not all: the disk may be full, or read-only
            pass
    except OSError as error:
        raise CommandError(f"the folder {str(folder)!r} cannot be written to: {error.strerror}") from error
    if path.exists() and not os.access(path, os.W_OK):
        raise CommandError(f"the picture {str(path)!r} exists and may not be overwritten")
