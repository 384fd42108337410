"""kvpress: a press that clusters, for its pipeline, its evaluation and its presses to be compared with."""

try:
    import kvpress as _kvpress  # noqa: F401
except ImportError as error:  # pragma: no cover - depends on the environment
    raise ImportError(
        "centroidkv.integrations.kvpress needs kvpress, in an environment of its own because it asks for an older "
        "transformers: pip install 'centroidkv[kvpress]'"
    ) from error

from centroidkv.integrations.kvpress.layer import PressedLayer
from centroidkv.integrations.kvpress.loan import Loan
from centroidkv.integrations.kvpress.press import CentroidPress

__all__ = ["CentroidPress", "Loan", "PressedLayer"]
