"""decode_quality on tiny random models: against explicit runs, and on caches that must do well or badly."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from analysis.evaluation import decode_quality, decode_runs
from analysis.evaluation.decode_chat import make_chat, read_chat
from analysis.evaluation.decode_runs import compare, continuation, distinct, follow, free_run, sampled
from analysis.tools.store import Store
from centroidkv import Budget, Compressor, presets
from centroidkv.errors import EvaluationError
from centroidkv.integrations.transformers import CentroidCache, enable
from centroidkv.matching import Evict
from centroidkv.preserve import Recent, Sinks
from centroidkv.schedule import FewestRounds

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

PROMPT, FED = 40, 64


def destructive(slots: int = 4):
    """Forgets everything but the last few tokens."""
    stages = Compressor.builder().preserve(Recent(share=1.0)).matching(Evict()).schedule(FewestRounds())
    return stages.budget(Budget.tokens(slots)).build()


def small(budget):
    return Compressor.builder().preserve(Sinks(2), Recent(8)).budget(budget).build()


def test_a_full_budget_diverges_nowhere_and_a_destructive_cache_most(llama, ids):
    made = {"whole": small(1.0), "half": small(0.5), "gone": destructive()}
    found = follow(llama, ids(PROMPT + FED + 1), PROMPT, made, block=8, interval=16)
    whole, half, gone = (found[name].values["kl"] for name in made)
    assert whole.shape == (FED,)
    assert whole.abs().max() < 1e-6
    assert found["whole"].values["top1"].min() == 1.0
    assert half.mean() > 1e-4
    assert gone.mean() > 2 * half.mean()
    assert found["gone"].values["top1"].mean() < found["half"].values["top1"].mean()
    assert found["whole"].slots == PROMPT + FED
    assert found["gone"].slots <= 4 + 16
    assert found["gone"].events > 1


def test_following_equals_an_explicit_run_token_by_token(llama, ids):
    tokens = ids(PROMPT + FED + 1, seed=1)
    found = follow(llama, tokens, PROMPT, {"half": small(0.5)}, block=8, interval=16)["half"].values
    with torch.no_grad():
        full = llama(tokens).logits[0, PROMPT:-1].log_softmax(-1)
        cache, other = CentroidCache(small(0.5), interval=16), []
        with enable(llama):
            llama(tokens[:, :PROMPT], past_key_values=cache)
            for i in range(PROMPT, PROMPT + FED):
                other.append(llama(tokens[:, i : i + 1], past_key_values=cache).logits[0, -1])
    expected = compare(full, torch.stack(other).log_softmax(-1), tokens[0, PROMPT + 1 :])
    for key in ("kl", "nll", "nll_full"):
        torch.testing.assert_close(found[key], expected[key], atol=1e-4, rtol=1e-3)


def test_comparison_by_hand():
    full, other = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.25, 0.75]]).log()
    found = compare(full, other, torch.tensor([1]))
    assert found["kl"].item() == pytest.approx(0.5 * torch.tensor(3.0).log().item())
    assert found["top1"].item() == 0.0
    assert found["nll"].exp().item() == pytest.approx(1 / 0.75)
    assert found["nll_full"].exp().item() == pytest.approx(4.0)


def test_windows_are_means_over_time():
    values = {"kl": torch.tensor([1.0, 3.0, 5.0, 7.0])}
    assert decode_runs.Followed(values, 0, 0).windows("kl", 2) == [2.0, 6.0]


def test_blocks_that_would_shift_compression_are_refused(llama, ids):
    with pytest.raises(EvaluationError, match="divide the interval"):
        follow(llama, ids(PROMPT + 61), PROMPT, {}, block=6, interval=16)


def test_the_continuation_is_the_full_caches_own_and_repeats_by_seed(llama, ids):
    prompt = ids(20)
    cold = continuation(llama, prompt, 12, temperature=1e-4, seed=0)
    greedy = llama.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(cold, greedy[0, 20:])
    warm = [continuation(llama, prompt, 12, 5.0, seed) for seed in (0, 0, 1)]
    assert torch.equal(warm[0], warm[1])
    assert not torch.equal(warm[0], warm[2])
    over = sampled(llama, prompt, 12, 5.0, 0, CentroidCache(small(1.0), 4))
    assert torch.equal(over, warm[0])


def test_the_end_of_text_is_never_sampled(llama, ids):
    first = continuation(llama, ids(20), 1, 1e-4, 0).item()
    llama.generation_config.eos_token_id = [first]
    assert first not in continuation(llama, ids(20), 12, 1e-4, 0).tolist()


def test_repetition_is_counted():
    assert distinct([1, 2, 3, 4], 2) == 1.0
    assert distinct([1, 2] * 50, 2) == pytest.approx(2 / 99)
    with pytest.raises(EvaluationError, match="no 8-gram"):
        distinct([1, 2, 3], 8)


def test_free_running_scores_the_text_under_the_full_cache(llama, ids):
    prompt = ids(20)
    cell = free_run(llama, prompt, None, 10, 1e-4, 0, 8)
    tokens = torch.tensor(cell["ids"])
    with torch.no_grad():
        logits = llama(torch.cat((prompt, tokens[None]), -1)).logits[0, 19:-1]
    assert cell["nll"] == pytest.approx(torch.nn.functional.cross_entropy(logits, tokens).item(), abs=1e-5)
    assert free_run(llama, prompt, small(1.0), 10, 1e-4, 0, 8)["ids"] == cell["ids"]
    assert free_run(llama, prompt, destructive(2), 10, 1e-4, 0, 8)["ids"] != cell["ids"]


def test_a_chat_asks_for_every_fact_once_after_it_was_told(letters):
    turns = make_chat(letters, 300, seed=3)
    text = "".join(letters.decode_all(turn.question) + letters.decode_all(turn.answer) for turn in turns)
    assert len(turns) == 6
    assert len({letters.decode_all(turn.answer) for turn in turns}) == 6
    before = ""
    for turn in turns:
        before += letters.decode_all(turn.question)
        assert letters.decode_all(turn.answer) in before
        before += letters.decode_all(turn.answer)
    assert before == text
    assert text.count("What is the special magic number") == 6


def test_a_chat_over_a_full_budget_scores_as_over_the_full_cache(llama, letters):
    chat = make_chat(letters, 300, seed=0)
    full = read_chat(llama, chat, None, 64)
    whole = read_chat(llama, chat, small(1.0), 64)
    gone = read_chat(llama, chat, destructive(), 64)
    assert whole["nll_by_turn"] == pytest.approx(full["nll_by_turn"], abs=1e-4)
    with torch.no_grad():
        whole_text = torch.cat([part for turn in chat for part in (turn.question, turn.answer)], -1)
        logits = llama(whole_text).logits[0]
    size = chat[-1].answer.shape[1]
    last = torch.nn.functional.cross_entropy(logits[-size - 1 : -1], chat[-1].answer[0]).item()
    assert full["nll_by_turn"][-1] == pytest.approx(last, abs=1e-4)
    assert full["tokens"] == full["slots"] == whole_text.shape[1]
    assert abs(gone["nll"] - full["nll"]) > 1e-2
    assert gone["slots"] < 4 + 64 + 8


def test_a_chat_template_that_rewrites_the_past_is_refused(letters):
    letters.chat_template = "yes"
    letters.apply_chat_template = lambda messages, **kwargs: f"{len(messages)}{messages}"
    with pytest.raises(EvaluationError, match="rewrites earlier turns"):
        make_chat(letters, 300, 0)


def test_every_preset_can_be_named_and_a_text_too_short_is_refused(letters, tmp_path):
    made = decode_quality.methods(list(presets.ALL), [Budget.ratio(0.5), Budget.tokens(256)])
    assert len(made) == 2 * len(presets.ALL)
    assert {"tome 50%", "tome 256 slots"} <= set(made)
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(EvaluationError, match="3 tokens, 9 are needed"):
        decode_quality.prompt_and_text(letters, [tmp_path / "short.txt"], 0, 9)


@pytest.mark.parametrize(
    "wrong", [["--block", "48"], ["--window", "100"], ["--text", "a", "b"], ["--source", "--picture", "x.png"]]
)
def test_options_that_do_not_fit_together_are_refused(wrong):
    with pytest.raises(SystemExit):
        decode_quality.parse(wrong)


def test_results_are_resumed_and_never_mixed(tmp_path):
    path = tmp_path / "deep" / "r.json"
    store = Store(path, {"tokens": 8})
    store.add("a", {"kl": 1.0})
    again = Store(path, {"tokens": 8})
    assert "a" in again
    assert again["a"]["kl"] == 1.0
    assert {"commit", "torch", "transformers"} <= set(again["a"]["environment"])
    with pytest.raises(EvaluationError, match="other settings"):
        Store(path, {"tokens": 9})


def test_the_whole_program_and_a_second_run_that_measures_nothing(tmp_path, monkeypatch, capsys, llama, letters):
    monkeypatch.setattr(decode_quality, "load_named", lambda name, dtype: (llama, letters))
    arguments = [
        *("--presets", "centroidkv", "streaming_llm", "--budgets", "1.0", "80", "--prompt", "100", "--tokens", "64"),
        *("--window", "32", "--block", "8", "--interval", "16", "--free", "16", "--chats", "1", "--document", "200"),
        *("--json", str(tmp_path / "r.json"), "--picture", str(tmp_path / "p.png")),
    ]
    decode_quality.main(arguments)
    first = capsys.readouterr().out
    assert (tmp_path / "p.png").stat().st_size < 200_000
    cells = json.loads((tmp_path / "r.json").read_text())["cells"]
    assert max(cells["text 0 | centroidkv 100%"]["kl"]) < 1e-5 < max(cells["text 0 | centroidkv 80 slots"]["kl"])
    assert len(cells["generate 0 | streaming_llm 80 slots"]["kl"]) == 2
    for heading in ("source text", "source generate", "free-running", "chat(s)"):
        assert heading in first
    forbidden = SimpleNamespace(config=None)  # any forward pass would fail
    monkeypatch.setattr(decode_quality, "load_named", lambda name, dtype: (forbidden, letters))
    decode_quality.main(arguments)
    assert capsys.readouterr().out == first
