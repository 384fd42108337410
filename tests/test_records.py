import pytest
import torch

from centroidkv import Budget, Plan
from centroidkv.errors import BudgetError, ShapeError, StageError
from centroidkv.records import Assignment, Block, Partition


@pytest.mark.parametrize(
    ("ratio", "seen", "slots"),
    [(0.25, 4096, 1024), (0.25, 1001, 250), (0.1, 30, 3), (0.7, 10, 7), (1.0, 17, 17), (0.01, 5, 1), (0.5, 0, 1)],
)
def test_ratio_rounds_down_once_and_keeps_one(ratio, seen, slots):
    assert Budget.ratio(ratio).slots(seen) == slots


def test_tokens_do_not_depend_on_what_was_seen():
    assert Budget.tokens(64).slots(3) == Budget.tokens(64).slots(10**6) == 64


def test_of_reads_floats_as_ratios_and_integers_as_slots():
    assert Budget.of(0.5) == Budget.ratio(0.5)
    assert Budget.of(64) == Budget.tokens(64)
    assert Budget.of(Budget.tokens(3)) == Budget.tokens(3)


@pytest.mark.parametrize("bad", [0.0, -0.1, 1.5, float("nan"), "half", None, True])
def test_bad_ratio_is_refused(bad):
    with pytest.raises(BudgetError):
        Budget.ratio(bad)


@pytest.mark.parametrize("bad", [0, -4, 2.5, True])
def test_bad_token_count_is_refused(bad):
    with pytest.raises(BudgetError):
        Budget.tokens(bad)


def test_a_partition_may_not_name_a_slot_twice_or_outside():
    with pytest.raises(StageError, match="twice"):
        Partition.whole([0, 1], [1, 2], 3)
    with pytest.raises(StageError, match="outside"):
        Partition.whole([0], [3], 3)


def test_capacity_counts_sources_with_targets_and_at_most_half():
    block = Block(torch.tensor([[0, 1, 2]]), torch.tensor([[3]]))
    lone = Block(torch.tensor([[4]]), torch.empty(1, 0, dtype=torch.long))
    partition = Partition(5, (block, lone))
    assert partition.chunk_capacities == [3, 0]
    assert partition.capacity == 2


def test_assignments_compare_print_and_serialise():
    assignment = Assignment(torch.tensor([[[1, 1, 2, -1]]]))
    assert repr(assignment) == "Assignment(4 slots: 2 stay, 1 merge, 1 evicted)"
    assert Assignment.from_dict(assignment.to_dict()) == assignment
    assert assignment != Assignment(torch.tensor([[[1, 1, 2, 3]]]))


@pytest.mark.parametrize("joins", [[1, 2, 2], [1, -1, 2], [3, 1, 2]])
def test_an_assignment_must_end_in_slots_that_stay(joins):
    with pytest.raises(StageError):
        Assignment(torch.tensor([[joins]])).validate()


def test_an_assignment_is_int64_of_rank_three():
    with pytest.raises(ShapeError):
        Assignment(torch.tensor([0, 1]))


def test_plan_arithmetic():
    plan = Plan(slots=100, budget=40, preserved=10, sizes=(45, 30))
    assert (plan.compressible, plan.removed, plan.final, plan.met) == (90, (45, 15), 40, True)
    assert not Plan(slots=100, budget=40, preserved=10, sizes=(45,)).met


def test_whole_numbers_beyond_a_floats_range_are_budgets():
    assert Budget.tokens(10**400).slots(7) == 10**400
    assert Budget.of(10**400) == Budget.tokens(10**400)
