"""Check your own stages against the library's laws, in one line each. Needs the extra ``centroidkv[testing]``.

A law is a property that every stage of a family must have, searched for counter-examples by Hypothesis. How many
examples are tried follows the loaded Hypothesis profile, or ``examples=``.

>>> from centroidkv.testing import check_matcher
>>> from centroidkv.matching import ThresholdMatching
>>> check_matcher(ThresholdMatching(0.5), examples=5)
"""

try:
    import hypothesis as _hypothesis  # noqa: F401
except ImportError as error:  # pragma: no cover - depends on the environment
    raise ImportError("centroidkv.testing needs Hypothesis: pip install 'centroidkv[testing]'") from error

from centroidkv.testing.aggregate_laws import check_aggregator
from centroidkv.testing.allocation_laws import check_allocation
from centroidkv.testing.attention_laws import check_attention
from centroidkv.testing.backend_laws import check_backend
from centroidkv.testing.compressor_laws import check_compressor
from centroidkv.testing.law import Law, LawViolation
from centroidkv.testing.layer_laws import check_layer
from centroidkv.testing.matcher_check import check_matcher
from centroidkv.testing.partition_laws import check_partition
from centroidkv.testing.preserve_laws import check_preserver
from centroidkv.testing.schedule_laws import check_schedule
from centroidkv.testing.similarity_laws import check_similarity
from centroidkv.testing.storage_laws import check_storage

__all__ = [
    "Law",
    "LawViolation",
    "check_aggregator",
    "check_allocation",
    "check_attention",
    "check_backend",
    "check_compressor",
    "check_layer",
    "check_matcher",
    "check_partition",
    "check_preserver",
    "check_schedule",
    "check_similarity",
    "check_storage",
]
