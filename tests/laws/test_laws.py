"""Every exported stage through every law of its family."""

import math
import os

import pytest
import torch

import centroidkv.aggregate
import centroidkv.allocation
import centroidkv.matching
import centroidkv.partition
import centroidkv.preserve
import centroidkv.schedule
import centroidkv.similarity
from centroidkv import testing
from centroidkv.attention import degree_attention
from tests.laws import stages

CHECKS = {
    testing.check_preserver: stages.PRESERVERS,
    testing.check_partition: stages.PARTITIONS,
    testing.check_similarity: stages.SIMILARITIES,
    testing.check_matcher: stages.MATCHERS,
    testing.check_aggregator: stages.AGGREGATORS,
    testing.check_schedule: stages.SCHEDULES,
    testing.check_compressor: stages.COMPRESSORS,
    testing.check_attention: stages.ATTENTIONS,
    testing.check_allocation: stages.ALLOCATIONS,
    testing.check_storage: stages.STORAGES,
    testing.check_layer: stages.LAYERS,
}


# In the thorough profile every family sees at least this many examples, all its stages and laws together.
THOROUGH = 20_000
LAWS_AT_LEAST = {
    testing.check_preserver: 3,
    testing.check_partition: 4,
    testing.check_similarity: 4,
    testing.check_matcher: 5,
    testing.check_aggregator: 6,
    testing.check_schedule: 5,
    testing.check_compressor: 10,
    testing.check_attention: 5,
    testing.check_allocation: 5,
    testing.check_storage: 7,
    testing.check_layer: 5,
}


def examples(check):
    if os.environ.get("HYPOTHESIS_PROFILE") != "thorough":
        return None
    return math.ceil(THOROUGH / (len(CHECKS[check]) * LAWS_AT_LEAST[check]))


@pytest.mark.parametrize(
    ("check", "stage", "options"),
    [
        pytest.param(check, stage, options, id=f"{check.__name__}-{index}")
        for check, stage_list in CHECKS.items()
        for index, (stage, options) in enumerate(stage_list)
    ],
)
def test_stage_obeys_the_laws_of_its_family(check, stage, options):
    check(stage, examples(check), **options)


def test_sdpa_equals_the_reference():
    reference, sdpa, _ = (stage for stage, _ in stages.ATTENTIONS)
    testing.check_backend(sdpa, reference, "attention")


def test_the_kernel_equals_the_reference():
    pytest.importorskip("triton")
    reference, *_ = (stage for stage, _ in stages.ATTENTIONS)

    def kernel(query, *others, causal):
        # The law's cases have every type, the kernel has no float64 and says so.
        chosen = "reference" if query.dtype == torch.float64 else "triton"
        return degree_attention(query, *others, causal=causal, backend=chosen)

    testing.check_backend(kernel, reference, "attention", examples=25)


FAMILIES = ["preserve", "partition", "similarity", "matching", "aggregate", "schedule", "allocation"]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_exported_stage_is_missing_from_the_list(family):
    module = getattr(centroidkv, family)
    exported = {name for name in module.__all__ if isinstance(getattr(module, name), type)}
    listed = {type(stage).__name__ for stage_list in CHECKS.values() for stage, _ in stage_list}
    assert exported <= listed


@pytest.mark.parametrize("family", FAMILIES)
def test_every_exported_stage_is_listed_as_it_comes_by_default(family):
    module = getattr(centroidkv, family)
    listed = [stage for stage_list in CHECKS.values() for stage, _ in stage_list]
    for name in module.__all__:
        if isinstance(getattr(module, name), type) and name != "Recent":  # which must be told how many
            assert getattr(module, name)() in listed
