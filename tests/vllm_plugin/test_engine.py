"""A real engine on the CPU with a small random model: against the dense reference, alone and in company."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

from tests.vllm_plugin.engines import (
    all_free,
    block_pool,
    expect_alike,
    expect_reference,
    generate,
    manager,
    start,
    tiny_model,
    worker,
)

OPTIONS = {"preset": "centroidkv", "budget": 0.25, "interval": 50, "sinks": 2, "recent": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(model):
    return start(model, OPTIONS)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(500), k=length)


def test_many_steps_equal_the_dense_reference(model, engine):
    returned = manager(engine).returned_blocks
    asked = prompt(700)
    (output,) = generate(engine, [asked], 300)
    expect_reference(model, asked, output, OPTIONS, least_events=3)
    assert manager(engine).returned_blocks > returned
    assert worker(engine).clustering.events >= 3
    assert all_free(engine)


def test_requests_side_by_side_in_chunks_equal_the_reference(model, engine):
    """Prompts of one to four chunks of 512 tokens, some of which wait for others."""
    sizes = [1, 31, 32, 64, 333, 700, 1100, 1800]
    prompts = [prompt(size, seed=size) for size in sizes]
    for asked, output in zip(prompts, generate(engine, prompts, 120), strict=True):
        expect_reference(model, asked, output, OPTIONS)
    assert all_free(engine)


def test_a_second_run_takes_blocks_from_the_first_and_says_the_same(model, engine):
    prompts = [prompt(900, seed=50), prompt(900, seed=50)[:600] + prompt(200, seed=51)]
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
        expect_reference(model, asked, after, OPTIONS)
    assert all_free(engine)


def test_aborted_requests_leave_nothing_behind(engine):
    from vllm import SamplingParams

    inner = engine.llm_engine
    for number in range(6):
        inner.add_request(f"gone-{number}", {"prompt_token_ids": prompt(600, seed=number)},
                          SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False))  # fmt: skip
    for _ in range(20):
        inner.step()
    inner.abort_request([f"gone-{number}" for number in range(6)])
    while inner.has_unfinished_requests():
        inner.step()
    inner.step()
    assert all_free(engine)
    assert block_pool(engine).num_gpu_blocks > 1
