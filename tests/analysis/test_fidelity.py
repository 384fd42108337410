"""The fidelity harness on a tiny random model."""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from analysis.evaluation.fidelity import __main__ as program
from analysis.evaluation.fidelity import leaderboard, picture, presses, report
from analysis.evaluation.fidelity.__main__ import run_sample
from analysis.evaluation.fidelity.contenders import FULL, OURS, Contender, all_contenders, full_states, ours
from analysis.evaluation.fidelity.figures import Figures
from analysis.evaluation.fidelity.prefill import cache_of, prefill, read
from analysis.evaluation.fidelity.score import measure
from analysis.evaluation.fidelity.tasks import TASKS, Maker, Sample
from analysis.evaluation.fidelity.texts import help_topics
from centroidkv import presets
from centroidkv.errors import EvaluationError
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
    streaming = ours("streaming", presets.streaming_llm)
    assert run_sample(tiny, sample, [streaming], [0.5, 0.1], figures) == {}
    again = run_sample(tiny, sample, [streaming], [0.5, 0.25], figures)
    assert list(again) == ["streaming@0.25"]


def test_a_method_that_holds_more_than_its_share_is_refused(tiny, sample):
    greedy = Contender("greedy", lambda model, filled, share: full_states(filled), lambda share: "all")
    with pytest.raises(EvaluationError, match=r"greedy holds \d+ bytes of \d+ where 0.5"):
        run_sample(tiny, sample, [greedy], [0.5], {})


@pytest.mark.parametrize("method", sorted(OURS))
def test_every_method_stays_within_its_bytes(tiny, sample, method):
    filled = prefill(tiny, sample.context)
    contender = ours(method, OURS[method])
    for share in (0.5, 0.8):
        held = sum(contender.bytes_of(state) for state in contender.states(tiny, filled, share))
        assert share * 0.9 * filled.bytes_full < held <= share * filled.bytes_full


@pytest.mark.parametrize("task", sorted(TASKS))
def test_answers_are_where_the_sample_says(maker, task):
    sample = maker.make(task, 2)
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
        text = maker.tokenizer.decode(maker.make("needle_number", index).context[0])
        places.append(text.index("special magic number") / len(text))
    assert min(places) < 0.2
    assert max(places) > 0.8


def cells():
    def figures(base):
        return {"a@0.5": {"nll": base, "kl": 0.1, "exact": 1.0}, "full cache@1": {"nll": 0.0, "kl": 0.0, "exact": 1.0}}

    return {f"needle_number/{index}": {"figures": figures(float(index))} for index in range(4)}


def test_tables_show_means_and_bootstrap_intervals(tmp_path):
    rows = report.flatten(cells())
    text = report.table(rows)
    assert "1.500 [" in text
    assert "50% of the bytes, 4 samples" in text
    low, high = report.interval([0.0, 1.0, 2.0, 3.0])
    assert 0 < low < 1.5 < high < 3
    assert report.interval([2.0, 2.0]) == (2.0, 2.0)
    picture.plot(rows, tmp_path / "p.png", ours=frozenset({"a"}), highlight="a")
    assert (tmp_path / "p.png").stat().st_size > 5000
    with pytest.raises(EvaluationError, match="would be empty"):
        picture.plot([], tmp_path / "p.png")


def test_leaderboard_folders_hold_scores_and_configuration(tmp_path):
    settings = {"model": "some/model", "length": 400, "protocol": "agnostic", "samples": 4}
    folders = leaderboard.write(report.flatten(cells()), tmp_path, settings)
    assert [folder.name for folder in folders] == [
        "fidelity__400__model__a__0.50", "fidelity__400__model__no_press__0.00",
    ]  # fmt: skip
    assert json.loads((folders[0] / "metrics.json").read_text()) == {"needle_number": {"string_match": 100.0}}
    config = (folders[0] / "config.yaml").read_text()
    assert 'press_name: "a"' in config
    assert "samples: 4" in config
    close = [report.Row("a", budget, "needle_number", "exact", 0, 1.0) for budget in (0.125, 0.12)]
    names = {folder.name for folder in leaderboard.write(close, tmp_path, {**settings, "protocol": "aware"})}
    assert names == {f"fidelity__400__model__a__{ratio}__query_aware" for ratio in ("0.875", "0.88")}


@pytest.mark.skipif(not presses.AVAILABLE, reason="kvpress is not installed (it needs transformers < 5.3: make peers)")
def test_presses_run_on_the_shared_prefill(tiny, sample):
    filled = prefill(tiny, sample.context)
    for name, make in presses.makers().items():
        for share in (0.5, 0.25):
            states = presses.press_states(tiny, make(1 - share), filled)
            held = sum(state.keys.nbytes + state.values.nbytes for state in states)
            # Whole chunks of 20 of 200 tokens: up to one less.
            least = share - 0.1 if name.startswith("ChunkKV") else share - 0.01
            assert least * filled.bytes_full <= held <= share * filled.bytes_full, name


def test_the_plot_leaves_out_what_was_measured_on_other_texts():
    rows = [report.Row(m, 0.5, "prose", "kl", i, 1.0) for m, n in (("all", 3), ("some", 2)) for i in range(n)]
    assert list(picture.complete(rows)) == [("all", 0.5, "prose", "kl")]


def test_the_plot_names_the_best_of_ours_and_of_the_others():
    means = {("a", 0.5): 1.0, ("b", 0.5): 2.0, ("X", 0.5): 3.0, ("Y", 0.5): 1.5, ("b", 0.25): 1.0, ("a", 0.25): 2.0}
    found = {(method, budget, "prose", "kl"): value for (method, budget), value in means.items()}
    assert picture.leaders(found, ours=frozenset({"a", "b"})) == ["a", "b", "Y"]
    assert picture.leaders(found, ours=frozenset()) == ["a", "b"]


def test_tables_say_who_was_measured_on_fewer_samples():
    measured = [("all", "prose", 0.5, 3), ("all", "needle_number", 0.5, 3), ("some", "prose", 0.5, 2)]
    measured += [("some", "needle_number", 0.5, 3), ("none", "needle_number", 0.5, 3), ("late", "prose", 0.25, 2)]
    rows = [report.Row(m, b, task, "kl", i, 1.0) for m, task, b, n in measured for i in range(n)]
    lines = [[part.strip() for part in line.split("|")[1:-1]] for line in report.table(rows).splitlines()]
    shown = {line[0]: line[-2:] for line in lines if line}
    whole, short = "1.000 [1.000, 1.000]", "1.000 [1.000, 1.000], 2 samples"
    assert shown["all"] == [whole, whole]
    assert shown["some"] == [whole, short]
    assert shown["none"] == [whole, "-"]
    assert shown["late"] == ["-", short]


def test_differences_are_pair_by_pair_and_against_the_best_press_of_all_samples():
    def rows(method, values, figure="kl"):
        return [report.Row(method, 0.5, "prose", figure, i, value) for i, value in enumerate(values)]

    hard = [1.0, 5.0, 9.0]
    found = (
        rows("mine", hard) + rows("A", [v + 0.5 for v in hard]) + rows("B", [v + 2 for v in hard]) + rows("C", [0.0])
    )
    found += rows("also ours", [0.0, 0.0, 0.0])
    text = report.differences(found, "mine", frozenset({"mine", "also ours"}))
    line = [part.strip() for part in text.splitlines()[-1].split("|")[1:-1]]
    assert line == ["50%", "prose KL", "A", "5.500", "5.000", "-0.500 [-0.500, -0.500]"]
    assert report.differences(rows("mine", hard), "mine", frozenset({"mine"})) == ""
    assert report.printed(rows("mine", hard)) == report.table(rows("mine", hard))


def test_figures_say_what_they_were_measured_with_and_on_what(tmp_path, monkeypatch):
    path = tmp_path / "f.json"
    store = Figures(path, {"length": 8}, {"kvpress": "1"})
    store.describe({"a@0.5": "a, as it is"})
    store.add("prose/0", {"a@0.5": {"kl": 1.0}})
    monkeypatch.setattr("analysis.tools.store.environment", lambda: {"commit": "later"})
    later = Figures(path, {"length": 8}, {"kvpress": "2"})
    later.describe({"a@0.5": "a, as it is", "b@0.5": "b"})
    later.add("prose/0", {"b@0.5": {"kl": 2.0}})
    held = json.loads(path.read_text())
    by = {label: held["environments"][number] for label, number in held["cells"]["prose/0"]["environment"].items()}
    assert by["a@0.5"]["kvpress"] == "1"
    assert by["a@0.5"]["commit"] != "later"
    assert by["b@0.5"] == {"commit": "later", "kvpress": "2"}
    changed = Figures(path, {"length": 8})
    with pytest.raises(EvaluationError, match=r"figures of \['a'\] as they were .*--again 'a'"):
        changed.describe({"a@0.5": "a, with another setting"})
    changed.forget(["a@0.5"])
    changed.describe({"a@0.5": "a, with another setting"})
    assert changed.known("prose/0") == {"b@0.5": {"kl": 2.0}}
    assert changed.known("prose/1") == {}


def test_a_file_that_another_process_writes_is_not_overwritten(tmp_path):
    first, second = (Figures(tmp_path / "f.json", {}) for _ in range(2))
    first.add("prose/0", {"a@0.5": {"kl": 1.0}})
    with pytest.raises(EvaluationError, match="another process has written"):
        second.add("prose/1", {"a@0.5": {"kl": 1.0}})
    assert list(Figures(tmp_path / "f.json", {}).cells) == ["prose/0"]
    first.add("prose/1", {"a@0.5": {"kl": 1.0}})


def test_descriptions_hold_every_setting_and_nothing_of_this_machine():
    described = {contender.name: contender.described(0.25) for contender in all_contenders()}
    assert len(set(described.values())) == len(described)
    assert "ridge=0.1" in described["balanced"]
    assert not any(" at 0x" in text or "backend" in text for text in described.values())


@pytest.mark.parametrize(
    "wrong",
    [
        ["--report-only"], ["--report-only", "--results", "none.json"], ["--ablation", "--methods", "quick"],
        ["--protocol", "aware", "--tasks", "prose"],
    ],
)  # fmt: skip
def test_options_that_would_be_ignored_are_refused(wrong):
    with pytest.raises(SystemExit):
        program.parse(wrong)


def test_a_report_of_all_that_a_file_holds(tmp_path, capsys):
    store = Figures(
        tmp_path / "f.json", {"model": "m", "texts": "topics", "protocol": "aware", "length": 9, "samples": 1}
    )
    store.add("needle_number/0", {"a@0.5": {"nll": 0.25, "kl": 0.5, "exact": 1.0}})
    shared = ["--model", "m", "--protocol", "aware", "--length", "9", "--samples", "1", "--report-only"]
    program.main([*shared, "--results", str(tmp_path / "f.json")])
    assert "0.250 [0.250, 0.250]" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        program.parse([*shared, "--results", str(tmp_path / "f.json"), "--budgets", "0.5"])


def test_a_file_of_the_earlier_format_is_refused(tmp_path):
    (tmp_path / "f.json").write_text(json.dumps({"settings": {}, "cells": {}}))
    with pytest.raises(EvaluationError, match="earlier format"):
        Figures(tmp_path / "f.json", {})
