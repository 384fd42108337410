"""SmolLM2 in a real engine against the dense reference: hundreds of steps, eight requests at once.

A module per preset, because a process holds one engine.
"""

from __future__ import annotations

import pytest

from tests.vllm_plugin.engines import all_free, clustered_keys, expect_reference, generate, start

SIZES = [1145, 700, 333, 901, 64, 512, 1333, 845]


class OnSmolLM2:
    """Tests of a preset, which a subclass names."""

    preset: str

    @property
    def options(self):
        return {"preset": self.preset, "budget": 0.25, "interval": 100}

    @pytest.fixture(scope="class")
    def engine(self, smollm2):
        return start(smollm2, self.options, kv_mib=300, skip_tokenizer_init=False)

    @pytest.fixture(scope="class")
    def prompts(self, engine):
        from analysis.fidelity.texts import help_topics

        text = "\n\n".join(help_topics())
        tokens = engine.get_tokenizer()(text)["input_ids"]
        return [tokens[150 * number :][:size] for number, size in enumerate(SIZES)]

    def compare(self, smollm2, prompt, output, found, least_events=0):
        """With the reference's own keys if that does; else with the engine's, which must be the reference's."""
        try:
            largest, whose = expect_reference(smollm2, prompt, output, self.options, least_events), "own"
        except AssertionError as error:
            print(f"{len(prompt)} tokens: with its own keys the reference says otherwise, {error}")
            given = found[len(prompt)]
            largest, whose = expect_reference(smollm2, prompt, output, self.options, least_events, given), "engine's"
        print(f"{self.preset}, {len(prompt)} tokens, {whose} keys: largest |dlogprob| {largest:.2g}")

    def test_three_hundred_steps_equal_the_dense_reference(self, smollm2, engine, prompts):
        with clustered_keys(engine) as found:
            (output,) = generate(engine, prompts[:1], 300)
        self.compare(smollm2, prompts[0], output, found, least_events=3)
        assert all_free(engine)

    def test_eight_requests_side_by_side_equal_the_reference(self, smollm2, engine, prompts):
        with clustered_keys(engine) as found:
            outputs = generate(engine, prompts, 120)
        for prompt, output in zip(prompts, outputs, strict=True):
            self.compare(smollm2, prompt, output, found)
        assert all_free(engine)
