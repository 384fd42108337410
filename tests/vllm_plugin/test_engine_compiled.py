"""torch.compile: attention and clustering lie outside of the compiled parts."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

from tests.vllm_plugin.engines import all_free, expect_reference, generate, start, tiny_model

pytestmark = pytest.mark.slow


def test_a_compiled_model_says_what_the_reference_says(tmp_path):
    options = {"preset": "centroidkv", "budget": 0.25, "interval": 50, "sinks": 2, "recent": 16}
    model = tiny_model(tmp_path)
    engine = start(model, options, enforce_eager=False)
    assert engine.llm_engine.vllm_config.compilation_config.mode.value > 0
    prompts = [random.Random(size).choices(range(500), k=size) for size in (600, 150, 1000)]
    for prompt, output in zip(prompts, generate(engine, prompts, 120), strict=True):
        expect_reference(model, prompt, output, options, least_events=2)
    assert all_free(engine)
