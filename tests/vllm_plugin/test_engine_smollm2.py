"""SmolLM2 in a real engine against the dense reference: hundreds of steps, eight requests at once."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.vllm_plugin.engines import all_free, expect_reference, generate, start

pytestmark = pytest.mark.slow
OPTIONS = {"preset": "quick", "budget": 0.25, "interval": 100}
SIZES = [1145, 700, 333, 901, 64, 512, 1333, 845]


@pytest.fixture(scope="module")
def engine(smollm2):
    return start(smollm2, OPTIONS, kv_mib=300, skip_tokenizer_init=False)


@pytest.fixture(scope="module")
def prompts(engine):
    from analysis.fidelity.texts import help_topics

    text = "\n\n".join(help_topics())
    tokens = engine.get_tokenizer()(text)["input_ids"]
    return [tokens[150 * number :][:size] for number, size in enumerate(SIZES)]


def test_three_hundred_steps_equal_the_dense_reference(smollm2, engine, prompts):
    (output,) = generate(engine, prompts[:1], 300)
    largest = expect_reference(smollm2, prompts[0], output, OPTIONS, least_events=3)
    print(f"largest |dlogprob| {largest:.2g}")
    assert all_free(engine)


@pytest.mark.xfail(
    strict=False,
    reason="a merge in one head falls the other way in about one request of eight: vLLM's float32 keys differ from the "
    "reference's by 2e-6, and a similarity at the edge of a step is decided by that; |dlogprob| was .045, top-1 equal",
)
def test_eight_requests_side_by_side_equal_the_reference(smollm2, engine, prompts):
    outputs = generate(engine, prompts, 120)
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"{len(prompt)} tokens: largest |dlogprob| {expect_reference(smollm2, prompt, output, OPTIONS):.2g}")
    assert all_free(engine)
