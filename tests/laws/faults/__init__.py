"""Planted faults: plausible wrong implementations, listed under the law that must reject them, family by family."""

from tests.laws.faults.aggregate import AGGREGATE
from tests.laws.faults.allocation import ALLOCATION
from tests.laws.faults.attention import ATTENTION
from tests.laws.faults.backend import BACKEND
from tests.laws.faults.compressor import COMPRESSOR
from tests.laws.faults.layer import LAYER
from tests.laws.faults.matching import MATCHING
from tests.laws.faults.partition import PARTITION
from tests.laws.faults.preserve import PRESERVE
from tests.laws.faults.schedule import SCHEDULE
from tests.laws.faults.similarity import SIMILARITY
from tests.laws.faults.storage import STORAGE

FAULTS = (
    PRESERVE
    | PARTITION
    | SCHEDULE
    | SIMILARITY
    | MATCHING
    | AGGREGATE
    | COMPRESSOR
    | ATTENTION
    | BACKEND
    | ALLOCATION
    | STORAGE
    | LAYER
)
