"""Shrink the KV cache of large language models by online clustering.

``Compressor`` assembles the stages, ``KVState`` goes in and comes out, ``presets`` are ready-made assemblies, and
``centroidkv.attention.degree_attention`` attends over the result.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from centroidkv import presets
    from centroidkv.compressor import Compressor
    from centroidkv.records import Budget, Plan
    from centroidkv.rotary import Rotary
    from centroidkv.state import KVState

__version__ = "0.1.0"
__all__ = ["Budget", "Compressor", "KVState", "Plan", "Rotary", "__version__", "presets"]

_HOMES = {"Compressor": "compressor", "Budget": "records", "Plan": "records", "Rotary": "rotary", "KVState": "state"}


def __getattr__(name: str) -> Any:
    """The names above, and the parts they are made of, imported when the first of them is asked for.

    Not earlier, because importing PyTorch takes seconds: the command must be able to say something sensible if it is
    interrupted meanwhile, and every import of a module in this package runs this file first.
    """
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("centroidkv.presets")
    for exported, home in _HOMES.items():
        globals()[exported] = getattr(import_module(f"centroidkv.{home}"), exported)
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    """What there is, loaded or not."""
    return sorted({*globals(), *__all__})
