"""Results on disk: what was measured, with what, and a file that an interrupted run goes on from."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import centroidkv
from centroidkv.errors import EvaluationError


def environment(device: str | None = None) -> dict[str, str]:
    """Versions and the commit of this checkout, with ``+`` if files differ from it; ``unknown`` outside git.

    With a device, also its name and Triton's version: what times depend on.
    """
    here = Path(__file__).parent
    try:
        asked = (["git", "rev-parse", "--short", "HEAD"], ["git", "status", "--porcelain"])
        found = [subprocess.run(a, cwd=here, capture_output=True, text=True, check=True).stdout.strip() for a in asked]
        commit = found[0] + ("+" if found[1] else "")
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "centroidkv": centroidkv.__version__,
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    } | ({"triton": triton_version(), "device": device_name(device)} if device else {})


def device_name(device: str) -> str:
    """The model of the GPU or of the processor."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


def triton_version() -> str:
    """Of the installed package, without importing it."""
    return version("triton") if find_spec("triton") else "not installed"


def write_text(path: Path, text: str) -> None:
    """Replace the file in one step, so that an interrupted run leaves a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def write_json(path: Path, content: Any) -> None:
    """Replace the file by ``content`` as JSON, in one step."""
    write_text(path, json.dumps(content, indent=1) + "\n")


class Store:
    """A JSON file of cells by key: ``{"settings": ..., "cells": {key: {..., "environment": ...}}}``.

    Every added cell is written at once and carries the versions it was measured with, which are those at the time the
    store was opened: code that was loaded then is what measures. Without a path nothing is kept.

    Raises:
        EvaluationError: the file holds results of other settings, which must not be mixed with these; or another
            process has written it since, whose cells would be lost.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings))
        self.environment = environment()
        self.cells: dict[str, Any] = {}
        self._written = self._version()
        if path is None or not path.exists():
            return
        found = json.loads(path.read_text())
        # Compared as they are written: to Python a budget of 1 slot equals one of 1.0, everything.
        if json.dumps(found["settings"], sort_keys=True) != json.dumps(self.settings, sort_keys=True):
            raise EvaluationError(
                f"{path} holds results of other settings ({found['settings']}, now {self.settings}); use another file"
            )
        self._load(found)

    def _load(self, found: dict[str, Any]) -> None:
        """Take over what a file holds."""
        self.cells = found["cells"]

    def _content(self) -> dict[str, Any]:
        """What the file is to hold."""
        return {"settings": self.settings, "cells": self.cells}

    def _version(self) -> tuple[int, int] | None:
        """Changes whenever anyone writes the file."""
        if self.path is None or not self.path.exists():
            return None
        found = self.path.stat()
        return found.st_ino, found.st_mtime_ns

    def __contains__(self, key: str) -> bool:
        return key in self.cells

    def __getitem__(self, key: str) -> Any:
        return self.cells[key]

    def add(self, key: str, cell: dict[str, Any]) -> None:
        """Keep a cell, and write the file."""
        self.cells[key] = {**cell, "environment": self.environment}
        self.write()

    def write(self) -> None:
        """Replace the file by what the store holds."""
        if self.path is None:
            return
        if self._version() != self._written:
            raise EvaluationError(
                f"another process has written {self.path} since this one read it, and keeps doing so perhaps; stop one "
                f"of them and start this one again: it goes on from what the file holds"
            )
        write_json(self.path, self._content())
        self._written = self._version()
