"""torch.compile: attention and clustering lie outside of the compiled parts."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.vllm_plugin.engines import all_free, expect_reference, generate, random_tokens, start

pytestmark = pytest.mark.slow


def test_a_compiled_model_says_what_the_reference_says(tiny):
    options = {"preset": "centroidkv", "budget": 0.25, "interval": 50, "sinks": 2, "recent": 16}
    engine = start(tiny, options, enforce_eager=False)
    assert engine.llm_engine.vllm_config.compilation_config.mode.value > 0
    prompts = [random_tokens(size, seed=size) for size in (600, 150, 1000)]
    for prompt, output in zip(prompts, generate(engine, prompts, 120), strict=True):
        expect_reference(tiny, prompt, output, options, least_events=2)
    assert all_free(engine)
