"""SmolLM2 in a real engine against the dense reference: hundreds of steps, eight requests at once.

A module per preset, because a process holds one engine.
"""

from __future__ import annotations

from typing import ClassVar

from tests.vllm_plugin.engines import all_free, clustered_keys, expect_reference, generate

COMMON = {"budget": 0.25, "interval": 100}
SIZES = [1145, 700, 333, 901, 64, 512, 1333, 845]


def prompts_for(engine) -> list[list[int]]:
    """Beginnings of several lengths in different places of a prose text."""
    from analysis.evaluation.fidelity.texts import help_topics

    tokens = engine.get_tokenizer()("\n\n".join(help_topics()))["input_ids"]
    return [tokens[150 * number :][:size] for number, size in enumerate(SIZES)]


class OnSmolLM2:
    """Tests of a preset: ``options`` of a subclass."""

    options: ClassVar[dict]

    def compare(self, smollm2, prompt, output, found, least_events=0):
        """With the reference's own keys if that does; else with the engine's, which must be the reference's."""
        try:
            largest, whose = expect_reference(smollm2, prompt, output, self.options, least_events), "own"
        except AssertionError as error:
            print(f"{len(prompt)} tokens: with its own keys the reference says otherwise, {error}")
            given = found[len(prompt)]
            largest, whose = expect_reference(smollm2, prompt, output, self.options, least_events, given), "engine's"
        print(f"{self.options['preset']}, {len(prompt)} tokens, {whose} keys: largest |dlogprob| {largest:.2g}")

    def test_three_hundred_steps_equal_the_dense_reference(self, smollm2, engine):
        prompt = prompts_for(engine)[0]
        with clustered_keys(engine) as found:
            (output,) = generate(engine, [prompt], 300)
        self.compare(smollm2, prompt, output, found, least_events=3)
        assert all_free(engine)

    def test_eight_requests_side_by_side_equal_the_reference(self, smollm2, engine):
        prompts = prompts_for(engine)
        with clustered_keys(engine) as found:
            outputs = generate(engine, prompts, 120)
        for prompt, output in zip(prompts, outputs, strict=True):
            self.compare(smollm2, prompt, output, found)
        assert all_free(engine)
