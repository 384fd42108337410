"""Shrink the KV cache of large language models by online clustering.

``Compressor`` assembles the stages, ``KVState`` goes in and comes out, ``presets`` are ready-made assemblies, and
``centroidkv.attention.degree_attention`` attends over the result.
"""

from centroidkv import presets
from centroidkv.compressor import Compressor
from centroidkv.records import Budget, Plan
from centroidkv.rotary import Rotary
from centroidkv.state import KVState

__version__ = "0.1.0"
__all__ = ["Budget", "Compressor", "KVState", "Plan", "Rotary", "__version__", "presets"]
