"""A real engine on the CPU with a small random model: against the dense reference, alone and in company."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.vllm_plugin.engines import (
    all_free,
    block_pool,
    expect_alike,
    expect_reference,
    generate,
    manager,
    random_tokens,
    start,
    worker,
)

OPTIONS = {"preset": "centroidkv", "budget": 0.25, "interval": 50, "sinks": 2, "recent": 16}


@pytest.fixture(scope="module")
def engine(tiny):
    return start(tiny, OPTIONS)


def test_many_steps_equal_the_dense_reference(tiny, engine):
    returned = manager(engine).returned_blocks
    asked = random_tokens(700)
    (output,) = generate(engine, [asked], 300)
    expect_reference(tiny, asked, output, OPTIONS, least_events=3)
    assert manager(engine).returned_blocks > returned
    assert worker(engine).clustering.events >= 3
    assert all_free(engine)


def test_requests_side_by_side_in_chunks_equal_the_reference(tiny, engine):
    """Prompts of one to four chunks of 512 tokens, some of which wait for others."""
    sizes = [1, 31, 32, 64, 333, 700, 1100, 1800]
    prompts = [random_tokens(size, seed=size) for size in sizes]
    for asked, output in zip(prompts, generate(engine, prompts, 120), strict=True):
        expect_reference(tiny, asked, output, OPTIONS)
    assert all_free(engine)


def test_a_second_run_takes_blocks_from_the_first_and_says_the_same(tiny, engine):
    prompts = [random_tokens(900, seed=50), random_tokens(900, seed=50)[:600] + random_tokens(200, seed=51)]
    first = [generate(engine, [asked], 120)[0] for asked in prompts]
    stats = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    again = engine.generate([{"prompt_token_ids": asked} for asked in prompts], use_tqdm=False)
    # Of the first 900 tokens, 28 full blocks, the 7 last are written by its clustering.
    assert again[0].num_cached_tokens == 21 * 32
    assert (
        again[1].num_cached_tokens
        == min(stats.coordinator.single_type_managers[0].plan.untouched_blocks(800, 4096), 25) * 32
    )
    for asked, before in zip(prompts, first, strict=True):
        (after,) = generate(engine, [asked], 120)
        expect_alike(before, after)
        expect_reference(tiny, asked, after, OPTIONS)
    assert all_free(engine)


def test_aborted_requests_leave_nothing_behind(engine):
    from vllm import SamplingParams

    inner = engine.llm_engine
    for number in range(6):
        inner.add_request(f"gone-{number}", {"prompt_token_ids": random_tokens(600, seed=number)},
                          SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False))  # fmt: skip
    for _ in range(20):
        inner.step()
    inner.abort_request([f"gone-{number}" for number in range(6)])
    while inner.has_unfinished_requests():
        inner.step()
    inner.step()
    assert all_free(engine)
    assert block_pool(engine).num_gpu_blocks > 1
