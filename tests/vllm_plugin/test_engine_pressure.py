"""Too many requests for the cache: preemption, recomputation and reuse of blocks change no output, and leak nothing."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

from tests.vllm_plugin.engines import all_free, expect_alike, expect_reference, generate, random_tokens, start

OPTIONS = {"preset": "distinctive", "budget": 0.25, "interval": 50, "sinks": 2, "recent": 16}


@pytest.fixture(scope="module")
def engine(tiny):
    # 3 layers, 2 heads, 32 + 32 channels of float32 and 8 bytes: 1584 bytes a token; room for 1900 tokens.
    return start(tiny, OPTIONS, kv_mib=3, max_model_len=1500)


def preemptions(engine) -> int:
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    return scheduler.preempted


@pytest.fixture(scope="module", autouse=True)
def counted(engine):
    """Count preemptions, which the engine only logs."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    scheduler.preempted, scheduler.preempted_after_output, stock = 0, 0, scheduler._preempt_request

    def counting(request, *arguments, **more):
        scheduler.preempted += 1
        scheduler.preempted_after_output += bool(request.num_output_tokens)
        return stock(request, *arguments, **more)

    scheduler._preempt_request = counting


def test_preempted_requests_say_what_the_reference_says(tiny, engine):
    """They compute their prompt and output again, with an event in the middle of a chunk."""
    # Short prompts are admitted together, and grow before they are first clustered.
    prompts = [random_tokens(40 + 2 * number, seed=number) for number in range(16)]
    outputs = generate(engine, prompts, 330)
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    assert scheduler.preempted_after_output > 0
    for asked, output in zip(prompts, outputs, strict=True):
        expect_reference(tiny, asked, output, OPTIONS, least_events=1)
    assert all_free(engine)


@pytest.mark.slow
def test_five_hundred_mixed_requests_under_pressure_equal_their_solo_runs(engine):
    rng = random.Random(1)
    before = preemptions(engine)
    documents = [random_tokens(1200, seed=100 + number) for number in range(5)]  # many share a beginning
    prompts, steps = [], []
    for number in range(500):
        length = rng.choice([1, 20, 64, 150, 300, 700, 1200])
        own = random_tokens(rng.randint(0, 40), seed=1000 + number)
        prompts.append((rng.choice(documents)[: max(length - len(own), 1)] + own)[: max(length, 1)])
        steps.append(rng.randint(1, 120))
    together = generate(engine, prompts, steps)
    assert preemptions(engine) > before
    assert all_free(engine)
    for number in rng.sample(range(500), 500):
        (alone,) = generate(engine, [prompts[number]], steps[number])
        expect_alike(alone, together[number])
    assert all_free(engine)
