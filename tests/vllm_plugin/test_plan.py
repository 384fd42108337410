"""The plan that scheduler and workers share: pure, monotone, and true to the compressor's own sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from centroidkv import Compressor, presets
from centroidkv.errors import ServingError
from centroidkv.integrations.vllm import ServingOptions, ServingPlan
from centroidkv.integrations.vllm.options import usable_presets
from centroidkv.integrations.vllm.plan import Region, plan_of
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
    # Ties among float32 keys must not hang on their last digits.
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
        ({"budget": 60}, "never holds what is preserved"),
        ({"interval": 0}, "interval is a whole number"),
        ({"interval": True}, "interval is a whole number"),
        ({"sinks": -1}, "Sinks"),
        ({"recent": 1.5}, "Recent"),
        ({"preset": "streaming_llm", "recent": 5}, r"no Recent\(slots\)"),
        ({"preset": "knorm", "sinks": 5}, "no Sinks"),
    ],
)
def test_bad_options_are_refused_by_name(given, says):
    with pytest.raises(ServingError, match=says):
        ServingOptions.read({"centroidkv": given})


def test_usable_presets_are_those_that_are_accepted():
    for name in presets.ALL:
        if name in usable_presets():
            ServingOptions(preset=name)
        else:
            with pytest.raises(ServingError):
                ServingOptions(preset=name)
    assert {"centroidkv", "distinctive", "quick"} <= set(usable_presets())
