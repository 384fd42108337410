"""How laws look for counter-examples, and what they say of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from centroidkv.aggregate import DegreeWeightedMean
from centroidkv.records import Assignment
from centroidkv.testing import LawViolation, check_aggregator
from centroidkv.testing.law import expect, expect_same, given_that, law, show
from centroidkv.testing.memory import expect_inputs_unchanged, expect_no_memory, untouched_randomness


def test_fixed_cases_are_tried_whatever_number_of_examples_is_asked_for():
    tried = []

    @law("it is noted", st.integers(0, 9), first=(-1,), always=(10**6, 10**7))
    def notes(subject, case):
        tried.append(case)

    notes.check(None, 1)
    assert tried[0] == -1
    assert tried[-2:] == [10**6, 10**7]
    tried.clear()
    notes.check(None, 1, fixed=False)
    assert max(tried) < 10


def test_fixed_cases_may_depend_on_the_subject_and_name_the_input_that_breaks_the_law():
    @law("numbers are small", st.integers(0, 9), always=lambda subject: [subject])
    def are_small(subject, case):
        expect(case < 100, "less than a hundred", case)

    are_small.check(99)
    with pytest.raises(
        LawViolation, match=r"(?s)'are small'.*input found: 2048\n  expected: less than a hundred\n  got: 2048"
    ):
        are_small.check(2048, 1)


def test_inputs_of_which_a_law_does_not_speak_are_passed_over():
    @law("numbers that are even can be halved", st.integers(0, 99), always=(3,))
    def can_be_halved(subject, case):
        given_that(case % 2 == 0)
        expect(case // 2 * 2 == case, "a half")

    can_be_halved.check(None, 20)


def test_messages_about_large_tensors_say_where_the_first_difference_is():
    torn = DegreeWeightedMean()

    def past_two_thousand(state, assignment):
        after = torn(state, assignment)
        if state.slots > 2000:
            after.values[:, :, 2000:] += 1.0
        return after

    with pytest.raises(LawViolation) as caught:
        check_aggregator(past_two_thousand, 5)
    message = str(caught.value)
    assert "slots=2100" in message
    assert "entries differ" in message
    assert len(message) < 3000


def test_what_is_shown_is_short_and_small_tensors_are_shown_whole():
    assert show(torch.arange(3)) == "tensor([0, 1, 2])"
    assert len(show(torch.randn(2, 3, 2048))) < 400
    assert len(show(list(range(10**5)))) < 2000


def test_tensors_are_compared_entry_by_entry_within_a_bound_and_nan_with_nan():
    one = torch.tensor([1.0, float("nan"), float("inf")])
    expect_same(one.clone(), one, "numbers")
    expect_same(one + 0.1, one, "numbers", 0.2)
    for got, wanted, bound in ((one + 0.1, one, 0.05), (one.nan_to_num(0.0), one, 9.0), (one[:2], one, 9.0)):
        with pytest.raises(Exception, match="numbers"):
            expect_same(got, wanted, "numbers", bound)


def test_memory_is_found_in_whichever_way_it_shows():
    class Adds:
        def __init__(self):
            self.total = 0

        def __call__(self, number):
            self.total += number
            return self.total

    rates = iter([3, 2, 1])
    for subject in (Adds(), lambda number: next(rates, 0), lambda number: float(torch.rand(()))):
        with pytest.raises(Exception, match=r"asked again|random states"):
            expect_no_memory(subject, lambda stage, number: stage(number), [1, 2, 1])
    expect_no_memory(lambda number: number + 1, lambda stage, number: stage(number), [1, 2, 1])


def test_random_states_are_as_they_were_and_inputs_that_are_written_to_are_named():
    before = torch.get_rng_state()
    with pytest.raises(Exception, match="global random states"), untouched_randomness(3):
        torch.rand(2)
    assert torch.get_rng_state().equal(before)
    with pytest.raises(Exception, match="keys as before"):
        expect_inputs_unchanged(
            lambda keys, other: keys.mul_(2), keys=torch.ones(2), other=Assignment(torch.zeros(1, 1, 1).long())
        )
