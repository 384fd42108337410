"""The plan that scheduler and workers share: pure, monotone, and true to the compressor's own sizes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from centroidkv import Budget, Compressor, presets
from centroidkv.errors import ServingError
from centroidkv.integrations.vllm import ServingOptions, ServingPlan
from centroidkv.integrations.vllm.options import plan_of, usable_presets
from centroidkv.paged.plan import Region
from centroidkv.preserve import Recent, Sinks

plans = st.builds(
    lambda preset, budget, interval, block: ServingPlan(
        ServingOptions(preset=preset, budget=budget, interval=interval).compressor(), block, interval
    ),
    preset=st.sampled_from(["centroidkv", "quick", "distinctive", "streaming_llm"]),
    budget=st.sampled_from([0.5, 0.25, 0.125, 100, 600]),
    interval=st.sampled_from([1, 7, 64, 128, 1000]),
    block=st.sampled_from([16, 32, 128]),
)
prompts = st.integers(1, 3000)


@given(plans, prompts, st.lists(st.integers(0, 5000), min_size=2, max_size=5).map(sorted))
def test_regions_only_move_on_and_events_lead_from_one_to_the_next(plan, prompt, lengths):
    at = plan.region(prompt, 0)
    assert at == Region()
    for before, after in zip([0, *lengths], lengths, strict=False):
        for event in plan.events(prompt, before, after):
            assert before < event.tokens <= after
            assert event.tokens >= prompt
            assert event.before == at
            at = event.after
            # Targets are the last of the sources; everything read is computed, and something is given back.
            assert event.before.first < event.after.first <= event.after.end <= event.tokens // plan.block_size
            assert event.before.end < event.after.end
            assert 0 < event.target_blocks < event.source_blocks
        assert plan.region(prompt, after) == at


@given(plans, prompts, st.integers(0, 4000))
def test_what_is_left_is_within_the_budget_of_the_full_blocks(plan, prompt, more):
    for event in plan.events(prompt, 0, prompt + more):
        left = event.target_blocks * plan.block_size
        seen = event.after.end * plan.block_size
        assert left <= plan.compressor.budget.slots(seen) < left + plan.block_size
        sized = plan.sized(left)
        assert sized.plan(seen, event.source_blocks * plan.block_size).final == left


@given(plans, prompts, st.integers(0, 3000))
def test_untouched_blocks_are_never_written(plan, prompt, more):
    limit = prompt + more
    untouched = plan.untouched_blocks(prompt, limit)
    assert untouched <= limit // plan.block_size
    targets = [event.after.first for event in plan.events(prompt, 0, limit)]
    assert all(first >= untouched for first in targets)
    if targets:
        assert untouched == targets[0]  # and not one block less than possible


def test_a_short_prompt_waits_and_a_long_run_is_planned_without_recursion():
    plan = ServingPlan(ServingOptions(budget=0.25).compressor(), 32, 128)
    assert plan.region(100, 100) == Region()
    first = next(plan.events(100, 0, 5000))
    assert first.tokens > 276  # sinks, recent window and one centroid in a quarter
    far = plan.region(100, 1_000_000)
    left = (far.end - far.first) * 32
    assert left <= far.end * 32 // 4 < left + 32


def test_a_plan_knows_whether_it_ever_acts():
    assert ServingPlan(ServingOptions(budget=0.25).compressor(), 32, 128).acts(4096)
    assert not ServingPlan(ServingOptions(budget=0.25).compressor(), 32, 128).acts(200)
    assert not ServingPlan(ServingOptions(budget=8192).compressor(), 32, 128).acts(4096)


def test_memory_of_many_prompts_is_bounded():
    plan = ServingPlan(ServingOptions().compressor(), 32, 128)
    wanted = plan.region(5, 2000)
    for prompt in range(1, 5000):
        plan.region(prompt, prompt)
    assert len(plan._regions) <= 4096
    assert plan.region(5, 2000) == wanted
    assert plan_of(ServingOptions(), 32, torch.float32) is plan_of(ServingOptions(), 32, torch.float32)


def test_sizes_that_depend_on_the_data_are_refused():
    compressor = Compressor.builder().preserve(lambda state: state.degree > 1).budget(0.25).build()
    with pytest.raises(ServingError, match="must know them ahead"):
        ServingPlan(compressor, 32, 128)


# -- options -----------------------------------------------------------------------------------------------------------


def test_options_are_read_only_where_they_are_given():
    assert ServingOptions.read({}) is None
    assert ServingOptions.read({"other plugin": 1}) is None
    assert ServingOptions.read(object()) is None  # vLLM also takes objects that only have a hash
    assert ServingOptions.read({"centroidkv": {}}) == ServingOptions()
    given = {"preset": "distinctive", "budget": 512, "interval": 64, "sinks": 2, "recent": 32}
    options = ServingOptions.read({"centroidkv": given})
    assert options == ServingOptions(**given)
    assert options.compressor().preservers.members[:2] == (Sinks(2), Recent(32))
    assert options.compressor().budget.slots(10_000) == 512
    assert ServingOptions().compressor() == presets.quick(0.25)
    # Ties among float32 keys must not be decided by their last digits.
    assert ServingOptions().compressor(torch.float32).similarity.step == 2**-8


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (7, "is a table with any of"),
        ({"buget": 0.5}, r"knows .*'budget'.* got \['buget'\]"),
        ({"preset": "best"}, "preset is one of"),
        ({"preset": "balanced"}, "needs the model's queries"),
        ({"preset": "tome"}, "all heads together"),
        ({"budget": 1.5}, r"share of tokens to keep, in \(0, 1\]"),
        ({"budget": "a quarter"}, "budget"),
        ({"budget": 60}, "cannot hold .* = 68 preserved slots"),
        ({"interval": 0}, "interval is a whole number"),
        ({"interval": True}, "interval is a whole number"),
        ({"sinks": -1}, "Sinks"),
        ({"recent": 1.5}, "Recent"),
        ({"preset": "streaming_llm", "recent": 5}, r"no Recent\(slots\)"),
        ({"preset": "knorm", "sinks": 5}, "no Sinks"),
        (None, "is a table with any of"),
        ([], "is a table with any of"),
        ("quick", "is a table with any of"),
        ({"centroidkv": {"budget": 0.5}}, r"knows .* got \['centroidkv'\]"),
        ({1: 2, "buget": 3, None: 4}, "knows .*'buget'"),
        *(({"preset": wrong}, "preset is one of") for wrong in ([], {}, None, True, 7, ("quick",))),
        *(
            ({"budget": wrong}, r"budget is a share of the tokens in \(0, 1\].* or a whole number of slots")
            for wrong in (
                "0.25", "", None, True, False, [], {"ratio": 0.5}, 0, -1, 0.0, -0.0, -0.25, 1.0001, float("nan"),
                float("inf"), -float("inf"), 1e308, 10**12, 10**400, -(10**400), 10**5000, 1j, np.bool_(True),
                np.float64("nan"), Fraction(10**400, 3),
            )
        ),
        *(
            ({"interval": wrong}, "interval is a whole number of tokens >= 1")
            for wrong in ("128", None, True, 1.0, 1.5, -1, float("nan"), [], {}, np.float32(4), np.bool_(True))
        ),
        *(
            ({name: wrong}, f"{name} is a whole number of slots >= 0 for ")
            for name in ("sinks", "recent")
            for wrong in ("4", True, False, 4.0, 1.5, -1, float("nan"), [], {}, np.float32(4), np.bool_(False))
        ),
        ({"sinks": 10**400}, "never holds what is preserved"),
        ({"recent": 1 << 31}, "never holds what is preserved"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_by_name(given, says):
    with pytest.raises(ServingError, match=says):
        ServingOptions.read({"centroidkv": given})


def test_numbers_of_numpy_are_welcome_and_become_pythons():
    given = {"budget": np.float32(0.25), "interval": np.int64(64), "sinks": np.int32(2), "recent": np.uint8(32)}
    options = ServingOptions.read({"centroidkv": given})
    assert options == ServingOptions(budget=0.25, interval=64, sinks=2, recent=32)
    assert repr(options) == "ServingOptions(preset='quick', budget=0.25, interval=64, sinks=2, recent=32)"
    for slots in (np.int64(512), Budget.tokens(512)):
        assert ServingOptions(budget=slots) == ServingOptions(budget=512)
    assert ServingOptions(budget=Budget.ratio(0.5)) == ServingOptions(budget=0.5)
    assert ServingOptions(interval=10**400).interval == 10**400  # once, at the end of the prompt


@pytest.mark.parametrize("first", [0, 1])
def test_what_is_equal_to_python_and_means_something_else_has_a_plan_of_its_own(first):
    pair = [ServingOptions(budget=budget, sinks=0, recent=0) for budget in (1, 1.0)]
    assert pair[0] != pair[1]
    assert pair[0] == ServingOptions(budget=1, sinks=0, recent=0)
    assert hash(pair[0]) == hash(ServingOptions(budget=1, sinks=0, recent=0))
    assert pair[0] != "quick"
    wanted = [Budget.tokens(1), Budget.ratio(1.0)]
    plan_of.cache_clear()
    for index in (first, 1 - first):
        assert plan_of(pair[index], 16, torch.bfloat16).compressor.budget == wanted[index]


def test_numbers_that_equal_whole_ones_are_not_remembered_for_them():
    plan = ServingPlan(ServingOptions(budget=0.25).compressor(), 32, 128)
    for call in (lambda: plan.region(4000.0, 4000), lambda: plan.region(4000, 4000.0),
                 lambda: plan.untouched_blocks(4000.0, 5000), lambda: plan.untouched_blocks(4000, 5000.0)):  # fmt: skip
        with pytest.raises(ServingError, match="counted in whole numbers"):
            call()
    found = plan.region(np.int64(4000), np.int32(4000))
    assert found == plan.region(4000, 4000)
    assert {type(found.first), type(found.end)} == {int}
    for size in (32.0, True, 0, "32"):
        with pytest.raises(ServingError, match="block_size is a whole number"):
            plan_of(ServingOptions(), size, torch.bfloat16)
        with pytest.raises(ServingError, match="interval is a whole number"):
            ServingPlan(plan.compressor, 32, size)


def test_usable_presets_are_those_that_are_accepted():
    for name in presets.ALL:
        if name in usable_presets():
            ServingOptions(preset=name)
        else:
            with pytest.raises(ServingError):
                ServingOptions(preset=name)
    assert {"centroidkv", "distinctive", "quick"} <= set(usable_presets())
