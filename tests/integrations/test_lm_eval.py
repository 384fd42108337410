"""The lm-eval model on a tiny random Llama: what is compressed, when, and what is refused."""

from __future__ import annotations

import pytest
import torch

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'centroidkv[lm_eval]'")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from tiny_lm import niah, prose, request, score_request  # noqa: E402

from centroidkv import Budget, presets  # noqa: E402
from centroidkv.errors import BudgetError, EvaluationError  # noqa: E402
from centroidkv.integrations.lm_eval import CentroidLM  # noqa: E402
from centroidkv.integrations.transformers import CentroidCache, enable  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")


def test_the_name_is_registered():
    assert get_model("centroidkv") is CentroidLM


# -- generation -------------------------------------------------------------------------------------------------------


def test_preset_full_is_lm_evals_own_model(folder, lm):
    requests = [request(niah(n, n)) for n in (300, 500, 420)]
    plain = HFLM(folder, device="cpu", dtype="float32").generate_until(requests)
    for protocol in ("query-aware", "query-agnostic"):
        assert lm(preset="full", protocol=protocol).generate_until(requests) == plain
    assert lm(preset=None, batch_size=2).generate_until(requests) == plain
    answers = [score_request(niah(200), " 123"), score_request(niah(200), " 4")]
    hf = HFLM(folder, device="cpu", dtype="float32").loglikelihood(answers)
    assert [total for total, _ in lm(preset="full").loglikelihood(answers)] == pytest.approx([t for t, _ in hf])


@pytest.mark.parametrize("name", ["centroidkv", "distinctive", "streaming_llm"])
def test_query_aware_generation_is_generate_with_a_centroid_cache(lm, name):
    ours = lm(preset=name, budget=0.3, interval=16)
    prompt, new = niah(600), 40
    ids = torch.tensor([ours.tok_encode(prompt)])
    with enable(ours.model):
        out = ours.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
            past_key_values=(cache := CentroidCache(presets.ALL[name](0.3), interval=16)),
        )  # fmt: skip
    assert ours.generate_until([request(prompt, new=new)]) == [ours.tok_decode(out[0, ids.shape[1] :].tolist())]
    assert ours.tally.share == pytest.approx(cache.stats().share)
    assert ours.tally.share < 0.4
    assert ours.tally.whole == 0


def test_compression_changes_the_text(lm):
    prompts = [request(niah(600, seed), new=30) for seed in range(3)]
    assert lm(budget=0.2).generate_until(prompts) != lm(preset="full").generate_until(prompts)


def test_query_agnostic_generation_compresses_before_the_question(lm):
    ours = lm(budget=0.3, interval=16, protocol="query-agnostic")
    prompt, new = niah(600), 30
    ids = torch.tensor([ours.tok_encode(prompt)])
    context = len("Memorize.\n") + 600 + 1  # one token per byte
    cache = CentroidCache(presets.centroidkv(0.3), interval=16)
    with enable(ours.model), torch.no_grad():
        ours.model(ids[:, :context], past_key_values=cache)
        assert cache.stats().physical == int(0.3 * context)
        logits = ours.model(ids[:, context:], past_key_values=cache).logits[:, -1]
        written = []
        for _ in range(new):
            written.append(int(logits.argmax()))
            logits = ours.model(torch.tensor([written[-1:]]), past_key_values=cache).logits[:, -1]
    assert ours.generate_until([request(prompt, new=new)]) == [ours.tok_decode(written)]
    aware = lm(budget=0.3, interval=16)
    assert aware.generate_until([request(prompt, new=new)]) != [ours.tok_decode(written)]


@pytest.mark.parametrize("protocol", ["query-aware", "query-agnostic"])
@pytest.mark.parametrize("name", ["centroidkv", "distinctive"])
def test_a_row_of_a_batch_fares_as_it_would_alone(lm, protocol, name):
    questions = ("number", "really very long number of all the numbers above", "n")
    prompts = [niah(n, n).replace("number?", q + "?") for n, q in zip((700, 350, 520), questions, strict=True)]
    requests = [request(prompt, new=24) for prompt in prompts]
    # In double precision: a batch rounds differently from a row, and what is merged depends on comparisons.
    options = {"preset": name, "budget": 0.4, "interval": 8, "protocol": protocol, "dtype": "float64"}
    assert lm(**options, batch_size=3).generate_until(requests) == lm(**options).generate_until(requests)


def test_stop_strings_end_a_text_and_different_arguments_never_share_a_batch(lm):
    ours = lm(budget=0.4, batch_size=4)
    (long,) = ours.generate_until([request(niah(400), new=20)])
    assert len(long) > 3
    cut, short = ours.generate_until([request(niah(400), new=20, until=[long[2]]), request(niah(400), new=2)])
    assert cut == long.split(long[2])[0]
    assert long.startswith(short)
    assert short != long


def test_short_prompts_are_reported_not_passed_off_as_compressed(lm, caplog):
    ours = lm(budget=0.25)
    ours.generate_until([request(niah(20)), request(niah(600))])
    assert "1 of 2 requests were not compressed" in caplog.text
    info = ours.get_model_info()["centroidkv"]
    assert (info["requests"], info["requests_not_compressed"]) == (2, 1)
    assert info["preset"] == "centroidkv"
    assert info["budget"] == "Budget.ratio(0.25)"
    assert "BipartiteSoftMatching" in info["compressor"]


# -- log-likelihoods --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["query-aware", "query-agnostic"])
def test_every_scored_token_is_predicted_from_the_compressed_cache(lm, protocol):
    ours = lm(budget=0.3, interval=4, protocol=protocol)
    prompt, answers = niah(500), [" 1234567", " 1", " 9876"]
    ids = ours.tok_encode(prompt)
    context = len(ids) - 1 if protocol == "query-aware" else len("Memorize.\n") + 500 + 1
    found = ours.loglikelihood([score_request(prompt, answer) for answer in answers])
    for answer, (total, greedy) in zip(answers, found, strict=True):
        target = ours.tok_encode(answer)
        cache = CentroidCache(presets.centroidkv(0.3), interval=4)
        with enable(ours.model), torch.no_grad():
            ours.model(torch.tensor([ids[:context]]), past_key_values=cache)
            logits = [ours.model(torch.tensor([[t]]), past_key_values=cache).logits[0] for t in ids[context:]][-1:]
            logits += [ours.model(torch.tensor([[t]]), past_key_values=cache).logits[0] for t in target[:-1]]
        expected = torch.cat(logits).log_softmax(-1)
        # Pieces of `interval` tokens against single ones: events fall on the same tokens only in the first piece.
        tolerance = 1e-4 if len(ids) - context + len(target) - 1 <= 4 else 0.5
        assert total == pytest.approx(float(expected[range(len(target)), target].sum()), abs=tolerance)
        assert isinstance(greedy, bool)
    plain = lm(preset="full").loglikelihood([score_request(prompt, answer) for answer in answers])
    assert [total for total, _ in plain] != pytest.approx([total for total, _ in found], abs=1e-3)
    assert ours.tally.whole == 0


def test_at_budget_one_log_likelihoods_are_the_plain_models(lm):
    requests = [score_request(niah(300, n), " 12345") for n in range(2)] + [score_request("", "ab")]
    ours = lm(budget=1.0).loglikelihood(requests)
    plain = lm(preset="full").loglikelihood(requests)
    assert [total for total, _ in ours] == pytest.approx([total for total, _ in plain], abs=1e-3)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in plain]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "nosuch"}, "no preset is named 'nosuch'; there are .*distinctive"),
        ({"protocol": "both"}, "protocol is one of query-aware, query-agnostic; got 'both'"),
        ({"overlong": "left"}, "overlong is one of refuse, middle"),
        ({"preset": "full", "budget": 0.5}, "budget=0.5 would have no effect"),
        ({"preset": "none", "interval": 64}, "interval=64 would have no effect"),
        ({"batch_size": "auto"}, "batch_size is a whole number"),
        ({"truncation": True}, "overlong=middle"),
        ({"think_end_token": 7}, "think_end_token is a text"),
    ],
)
def test_options_are_checked_before_the_model_is_loaded(options, message):
    with pytest.raises(EvaluationError, match=message):
        CentroidLM("no/such/model", **options)


@pytest.mark.parametrize("budget", [1.5, 0, -0.25, "quarter"])
def test_a_bad_budget_is_refused(budget):
    with pytest.raises(BudgetError):
        CentroidLM("no/such/model", budget=budget)


def test_budgets_may_be_slots(lm):
    ours = lm(budget=100)
    with torch.no_grad():
        ours._feed(torch.tensor([ours.tok_encode(prose(500))]), cache := ours.options.new_cache())
    assert cache.stats().physical == 100
    assert repr(lm(budget=Budget.tokens(90)).options.slots) == "Budget.tokens(90)"


def test_unscorable_requests_are_refused(lm, monkeypatch):
    rolling = Instance("loglikelihood_rolling", {}, (prose(200),), 0, ("wikitext", 0, 1))
    with pytest.raises(EvaluationError, match="no context to compress before scoring"):
        lm().loglikelihood_rolling([rolling])
    assert lm(preset="full").loglikelihood_rolling([rolling])[0] < 0
    agnostic = lm(protocol="query-agnostic")
    with pytest.raises(EvaluationError, match="no rule says where the question begins"):
        agnostic.loglikelihood([score_request(niah(300), " 1", task="hellaswag")])
    with pytest.raises(EvaluationError, match="begins with 'What'"):
        agnostic.generate_until([request(prose(300))])
    monkeypatch.setattr("centroidkv.integrations.lm_eval.model.question_start", lambda *_: 0)
    with pytest.raises(EvaluationError, match="belongs to its context alone"):
        agnostic.generate_until([request(niah(300))])


def test_prompts_that_do_not_fit_are_refused_or_lose_their_middle(lm):
    with pytest.raises(EvaluationError, match="overlong=middle keeps the first and last"):
        lm(max_length=200).generate_until([request(niah(300))])
    prompt = niah(300)
    for protocol in ("query-aware", "query-agnostic"):
        ours = lm(max_length=200, overlong="middle", budget=0.6, protocol=protocol)
        fitted = ours._prompt(0, request(prompt), 12)
        assert ours.tok_decode(fitted.ids) == prompt[:94] + prompt[-94:]
        if protocol == "query-agnostic":
            assert ours.tok_decode(fitted.ids[fitted.context :]) == "What is the number? The number is"
        assert len(ours.generate_until([request(prompt)])) == 1
