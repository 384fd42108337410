"""Hugging Face transformers: a cache that clusters itself, and the attention for it where stock attention cannot."""

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:  # pragma: no cover - depends on the environment
    raise ImportError(
        "centroidkv.integrations.transformers needs transformers: pip install 'centroidkv[transformers]'"
    ) from error

from centroidkv.integrations.transformers.cache import CentroidCache
from centroidkv.integrations.transformers.models import (
    load_gemma3_270m,
    load_named,
    load_pretrained,
    load_smollm2,
)
from centroidkv.integrations.transformers.switch import Enabled, enable

__all__ = [
    "CentroidCache",
    "Enabled",
    "enable",
    "load_gemma3_270m",
    "load_named",
    "load_pretrained",
    "load_smollm2",
]
