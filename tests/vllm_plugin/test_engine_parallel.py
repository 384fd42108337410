"""Two tensor-parallel ranks on the CPU: each clusters its own heads, and no message passes between them."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("vllm")

from tests.vllm_plugin.engines import expect_reference, generate, random_tokens, start

# Two processes share two cores here: threads would only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("preset", ["distinctive"])
def test_two_ranks_say_what_the_reference_says(tiny, preset):
    options = {"preset": preset, "budget": 0.25, "interval": 50, "sinks": 2, "recent": 16}
    engine = start(tiny, options, tensor_parallel_size=2, distributed_executor_backend="mp")
    prompts = [random_tokens(size, seed=size) for size in (600, 150, 1000)]
    for prompt, output in zip(prompts, generate(engine, prompts, 120), strict=True):
        expect_reference(tiny, prompt, output, options, least_events=2)
