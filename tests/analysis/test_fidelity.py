"""The fidelity harness on a tiny random model."""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from analysis.fidelity import leaderboard, presses, report
from analysis.fidelity.__main__ import run_sample
from analysis.fidelity.contenders import FULL, full_states, ours, slots_for
from analysis.fidelity.prefill import cache_of, prefill, read
from analysis.fidelity.score import measure
from analysis.fidelity.tasks import TASKS, Maker, Sample
from analysis.fidelity.texts import help_topics
from centroidkv import presets
from centroidkv.integrations.transformers import CentroidCache, enable


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def sample():
    ids = torch.randint(3, 300, (1, 230), generator=torch.Generator().manual_seed(1))
    return Sample("needle_number", 0, ids[:, :200], ids[:, 200:], (range(20, 25),))


@pytest.fixture(scope="module")
def maker():
    """Samples for a tokenizer of one token per byte, with a chat template."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab=letters, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    return Maker(tokenizer, help_topics(1), length=2000)


def test_the_harness_reads_what_the_cache_itself_would(tiny, sample):
    compressor = presets.balanced(100)
    filled = prefill(tiny, sample.context)
    states = ours("x", lambda budget: presets.balanced(100)).states(tiny, filled, 0.5)
    cache = CentroidCache(compressor, interval=10**6)
    with enable(tiny), torch.no_grad():
        tiny(sample.context, past_key_values=cache)
        wanted = tiny(sample.tail, past_key_values=cache).logits[0]
    assert torch.allclose(read(tiny, cache_of(tiny, filled, states), sample.tail), wanted, atol=1e-4)


def test_the_full_cache_has_no_divergence_and_the_plain_model_s_logits(tiny, sample):
    filled = prefill(tiny, sample.context)
    full = read(tiny, cache_of(tiny, filled, full_states(filled)), sample.tail)
    with torch.no_grad():
        plain = tiny(torch.cat((sample.context, sample.tail), 1)).logits[0, 200:]
    assert torch.allclose(full, plain, atol=1e-4)
    assert measure(sample, full, full)["kl"] == 0


def test_figures_by_hand(sample):
    vocabulary = 300
    logits, full = torch.zeros(30, vocabulary), torch.zeros(30, vocabulary)
    for place in range(19, 24):  # the answer's tokens are the likeliest, by 2 nats
        logits[place, sample.tail[0, place + 1]] = 2.0
    full[5, 0] = 3.0  # on one of 25 question tokens the full cache says something else
    figures = measure(sample, logits, full)
    assert figures["exact"] == 1.0
    assert figures["nll"] == pytest.approx(math.log(vocabulary - 1 + math.exp(2)) - 2, rel=1e-5)
    p = full[5].softmax(0)
    kl = float((p * (p.log() + math.log(vocabulary))).sum())
    answer = float(torch.full((vocabulary,), 1 / vocabulary).log()[0] - logits[19].log_softmax(0).mean())
    assert figures["kl"] == pytest.approx((kl + answer) / 25, rel=1e-4)  # the last question token predicts the answer
    logits[21] = 0.0
    logits[21, 7] = 1.0
    assert measure(sample, logits, full)["exact"] == 0.0


def test_worse_caches_score_worse(tiny, sample):
    figures = run_sample(tiny, sample, [ours("streaming", presets.streaming_llm)], [0.5, 0.1], {})
    assert figures[f"{FULL}@1"]["kl"] == 0
    assert figures["streaming@0.1"]["kl"] > figures["streaming@0.5"]["kl"] > 0
    assert run_sample(tiny, sample, [ours("streaming", presets.streaming_llm)], [0.5, 0.1], figures) is figures


@pytest.mark.parametrize("preset", ["balanced", "distinctive", "streaming_llm"])
def test_every_method_stays_within_its_bytes(tiny, sample, preset):
    filled = prefill(tiny, sample.context)
    contender = ours(preset, presets.ALL[preset])
    for share in (0.5, 0.8):
        if not presets.ALL[preset](slots_for(share, filled, evicts=False)).fits(200):
            continue
        held = sum(contender.bytes_of(state) for state in contender.states(tiny, filled, share))
        assert share * 0.9 * filled.bytes_full < held <= share * filled.bytes_full


@pytest.mark.parametrize("task", sorted(TASKS))
def test_answers_are_where_the_sample_says(maker, task):
    sample = maker.make(task, 2, 8)
    assert sample.context.shape[1] > 300
    text = maker.tokenizer.decode(sample.context[0])
    for span in sample.answers:
        answer = maker.tokenizer.decode(sample.tail[0, span.start : span.stop]).strip()
        assert answer
        if task.startswith(("needle", "multi")):
            assert answer in text
    if sample.answers:
        aware = sample.aware()
        assert torch.cat((aware.context, aware.tail), 1).equal(torch.cat((sample.context, sample.tail), 1))
        first, second = sample.answers[0], aware.answers[0]
        assert aware.tail[0, second.start : second.stop].equal(sample.tail[0, first.start : first.stop])


def test_depths_cover_the_context(maker):
    places = []
    for index in range(8):
        text = maker.tokenizer.decode(maker.make("needle_number", index, 8).context[0])
        places.append(text.index("special magic number") / len(text))
    assert min(places) < 0.2
    assert max(places) > 0.8


def cells():
    def figures(base):
        return {"a@0.5": {"nll": base, "kl": 0.1, "exact": 1.0}, "full cache@1": {"nll": 0.0, "kl": 0.0, "exact": 1.0}}

    return {f"needle_number/{index}": {"figures": figures(float(index))} for index in range(4)}


def test_tables_show_means_and_bootstrap_intervals(tmp_path):
    rows = report.flatten(cells())
    text = report.table(rows, ["needle_number"])
    assert "1.500 [" in text
    low, high = report.interval([0.0, 1.0, 2.0, 3.0])
    assert 0 < low < 1.5 < high < 3
    assert report.interval([2.0, 2.0]) == (2.0, 2.0)
    report.plot(rows, tmp_path / "p.png", ours={"a"}, highlight="a")
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_leaderboard_folders_hold_scores_and_configuration(tmp_path):
    settings = {"model": "some/model", "length": 400, "protocol": "agnostic", "samples": 4}
    folders = leaderboard.write(report.flatten(cells()), tmp_path, settings)
    assert [folder.name for folder in folders] == [
        "fidelity__400__model__a__0.50", "fidelity__400__model__no_press__0.00",
    ]  # fmt: skip
    assert json.loads((folders[0] / "metrics.json").read_text()) == {"needle_number": {"string_match": 100.0}}
    assert 'press_name: "a"' in (folders[0] / "config.yaml").read_text()


@pytest.mark.skipif(not presses.AVAILABLE, reason="kvpress is not installed (it needs transformers < 5.3: make peers)")
def test_presses_run_on_the_shared_prefill(tiny, sample):
    filled = prefill(tiny, sample.context)
    for name, make in presses.makers().items():
        states = presses.press_states(tiny, make(0.5), filled)
        assert sum(state.slots for state in states) <= 100 * len(states), name
        assert sum(state.keys.nbytes + state.values.nbytes for state in states) <= 0.5 * filled.bytes_full, name


def test_the_plot_names_the_best_of_ours_and_of_the_others():
    means = {("a", 0.5): 1.0, ("b", 0.5): 2.0, ("X", 0.5): 3.0, ("Y", 0.5): 1.5, ("b", 0.25): 1.0, ("a", 0.25): 2.0}
    found = {(method, budget, "prose", "kl"): [value] for (method, budget), value in means.items()}
    assert report.leaders(found, ours={"a", "b"}) == ["a", "b", "Y"]
    assert report.leaders(found, ours=set()) == ["a", "b"]


def test_tables_say_who_was_measured_on_fewer_samples():
    rows = [report.Row(m, 0.5, "prose", "kl", i, 1.0) for m, n in (("all", 3), ("some", 2)) for i in range(n)]
    lines = report.table(rows, ["prose"]).splitlines()
    assert [line.split("|")[1].strip() for line in lines[-2:]] == ["all", "some (2 samples)"]
