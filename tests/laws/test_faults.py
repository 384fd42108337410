"""Every law rejects at least two planted faults: a law that rejects none would be no law."""

from __future__ import annotations

import pytest

from centroidkv.testing import (
    Law,
    LawViolation,
    aggregate_laws,
    allocation_laws,
    attention_laws,
    backend_laws,
    bipartite_laws,
    check_matcher,
    compressor_laws,
    layer_laws,
    matching_laws,
    partition_laws,
    prepare_laws,
    preserve_laws,
    schedule_laws,
    similarity_laws,
    storage_laws,
)
from tests.laws.faults import FAULTS
from tests.laws.faults.matching import MATCHING

MODULES = (
    aggregate_laws, allocation_laws, attention_laws, backend_laws, bipartite_laws, compressor_laws, layer_laws,
    matching_laws, partition_laws, prepare_laws, preserve_laws, schedule_laws, similarity_laws, storage_laws,
)  # fmt: skip
LAWS = list({x for module in MODULES for x in vars(module).values() if isinstance(x, Law)})
CASES = [
    pytest.param(law, fault, id=f"{law.name}: {name}")
    for law, faults in FAULTS.items()
    for name, fault in faults.items()
]


def test_every_law_has_two_planted_faults():
    assert len(LAWS) > 80
    lacking = [law.name for law in LAWS if len(FAULTS.get(law, {})) < 2]
    assert not lacking


@pytest.mark.parametrize(("law", "fault"), CASES)
def test_the_law_rejects_the_fault(law, fault):
    with pytest.raises(LawViolation, match=law.name):
        law.check(fault, examples=200, shrink=False)  # that it is found, not how small


def test_a_violation_names_the_law_the_smallest_input_and_what_was_expected():
    faults = MATCHING[matching_laws.removes_as_many_as_asked]
    with pytest.raises(LawViolation) as caught:
        check_matcher(faults["one too few"])
    message = str(caught.value)
    assert "removes as many as asked" in message
    assert "smallest input found: MatchCase(state=StateCase(slots=" in message
    assert "expected: " in message
    assert "slots to leave" in message
