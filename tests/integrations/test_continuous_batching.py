"""generate_batch keeps its own paged cache: what happens to those who try ours with it (docs/transformers.md)."""

from __future__ import annotations

import inspect

import pytest

from centroidkv import presets
from centroidkv.integrations.transformers import CentroidCache, enable

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24),
    reason="what is documented was read from 5.24's continuous batching",
)


@pytest.fixture
def model(llama):
    made = llama()
    made.config.eos_token_id = made.generation_config.eos_token_id = 100
    return made


def test_inside_enable_it_is_refused_by_transformers(model, prompt):
    with enable(model), pytest.raises(ValueError, match="centroidkv_sdpa is not supported for continuous batching"):
        model.generate_batch(prompt(60).tolist(), max_new_tokens=3)


def test_it_takes_no_cache_and_never_looks_at_one(model, prompt):
    """Should this fail, transformers has begun to look at the cache: read the seam again, and the document."""
    cache = CentroidCache(presets.centroidkv(0.25))
    assert "past_key_values" not in inspect.signature(model.generate_batch).parameters
    small = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256)  # else it takes all memory
    answers = model.generate_batch(
        prompt(200).tolist(), max_new_tokens=3, past_key_values=cache, continuous_batching_config=small, warmup=False
    )
    text = next(iter(answers.values())).generated_tokens
    assert cache.stats().logical == 0  # how a user sees that nothing was compressed
    assert model.generate(prompt(200), max_new_tokens=3, do_sample=False)[0, 200:].tolist() == text
