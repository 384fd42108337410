"""Preserve: which slots are set aside before clustering and stay bit-identical."""

from centroidkv.preserve.distinctive import Distinctive
from centroidkv.preserve.recent import Recent
from centroidkv.preserve.sinks import Sinks

__all__ = ["Distinctive", "Recent", "Sinks"]
