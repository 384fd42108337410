import pytest

from centroidkv.errors import StageError
from centroidkv.schedule import Constant, FewestRounds, LinearAnnealing, plan_sizes


def half(length):
    return length // 2


def test_annealing_falls_to_its_minimum():
    schedule = LinearAnnealing(initial=0.3, delta=0.1, minimum=0.02)
    assert [schedule(j) for j in range(5)] == [0.3, 0.2, 0.1, 0.02, 0.02]
    assert LinearAnnealing(initial=0.0)(0) == 0.0


def test_sizes_are_planned_with_stated_rounding():
    assert plan_sizes(Constant(0.1), 30, 20, half) == (27, 24, 21, 20)
    assert plan_sizes(Constant(0.5), 9, 2, half) == (5, 3, 2)
    assert plan_sizes(FewestRounds(), 100, 20, lambda n: n - 1) == (20,)


def test_a_finished_schedule_stops_the_plan():
    assert plan_sizes(LinearAnnealing(0.5, 0.5, minimum=0.0), 100, 10, half) == (50,)
    assert plan_sizes(Constant(0.0), 100, 10, half) == ()


def test_every_budget_is_reached_by_the_defaults():
    assert plan_sizes(LinearAnnealing(), 100_000, 3, half)[-1] == 3


def test_rates_from_user_functions_are_checked():
    with pytest.raises(StageError, match="round 0"):
        plan_sizes(lambda index: 1.5, 100, 10, half)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Constant(0.51),
        lambda: Constant(-0.1),
        lambda: LinearAnnealing(0.5, -0.1),
        lambda: LinearAnnealing("x"),
        lambda: LinearAnnealing(delta="x"),
    ],
)
def test_bad_arguments_are_refused(build):
    with pytest.raises(StageError):
        build()
