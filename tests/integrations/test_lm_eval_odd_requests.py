"""Requests that are empty, or stranger than usual: as lm-eval's own model answers them, or refused by name."""

from __future__ import annotations

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'centroidkv[lm_eval]'")

import transformers
from lm_eval.models.huggingface import HFLM
from tiny_lm import niah, prose, request, score_request

from centroidkv.errors import EvaluationError
from centroidkv.integrations.lm_eval import CentroidLM, question_start

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")


@pytest.fixture(scope="module")
def hf(folder):
    return HFLM(folder, device="cpu", dtype="float32")


EMPTY = [(niah(300), ""), ("some text", ""), ("a", ""), ("", "")]


@pytest.mark.parametrize(
    "options", [{"budget": 1.0}, {"budget": 0.3}, {"preset": "full"}, {"budget": 0.3, "interval": 4}]
)
def test_an_empty_continuation_is_certain(lm, options):
    ours = lm(**options)
    for pair in EMPTY:
        assert ours.loglikelihood([score_request(*pair)]) == [(0.0, True)]


@pytest.mark.parametrize("options", [{"budget": 0.3}, {"preset": "full"}])
def test_empty_continuations_change_nothing_for_those_beside_them(lm, options):
    rest = [(niah(300), " 12"), (niah(300, 1), " more"), ("", "ab"), (niah(300), " 12")]
    alone = lm(**options).loglikelihood([score_request(*pair) for pair in rest])
    mixed = [EMPTY[0], rest[0], EMPTY[3], rest[1], rest[2], EMPTY[1], rest[3], EMPTY[2]]
    ours = lm(**options)
    kept = []
    ours.cache_hook.add_partial = lambda kind, arguments, result: kept.append((kind, arguments, result))
    found = ours.loglikelihood([score_request(*pair) for pair in mixed])
    assert [found[index] for index in (0, 2, 5, 7)] == [(0.0, True)] * 4
    assert [found[index][0] for index in (1, 3, 4, 6)] == pytest.approx([total for total, _ in alone])
    # What lm-eval remembers, for a run that is interrupted: every request once, with its own result.
    assert sorted((arguments, result) for _, arguments, result in kept) == sorted(zip(mixed, found, strict=True))
    assert {kind for kind, _, _ in kept} == {"loglikelihood"}
    if "budget" in options:
        assert ours.tally.requests == len(mixed)


def test_an_empty_continuation_of_a_query_agnostic_run(lm):
    ours = lm(budget=0.3, protocol="query-agnostic")
    assert ours.loglikelihood([score_request(niah(400), "")]) == [(0.0, True)]


def test_odd_pairs_score_as_lm_evals_own_model_scores_them(lm, hf):
    end = hf.tok_decode([hf.prefix_token_id], skip_special_tokens=False)
    pairs = [
        ("a", "b"),
        ("a", prose(200)),  # longer than its context
        ("ab  ", "c"),  # spaces move to the continuation
        ("", "hello"),
        ("", end + "hello"),  # begins with what stands for an empty context
        ("été — 東京", " ですか"),
        ("a", "b"),
    ]
    theirs = hf.loglikelihood([score_request(*pair) for pair in pairs])
    for ours in (lm(budget=1.0), lm(preset="full")):
        found = ours.loglikelihood([score_request(*pair) for pair in pairs])
        assert [total for total, _ in found] == pytest.approx([total for total, _ in theirs], abs=1e-3)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in theirs]
    assert lm(budget=1.0).loglikelihood([score_request("", end)]) == [(0.0, True)]  # the prefix, and nothing after it


def test_no_requests_are_no_results(lm):
    ours = lm(budget=0.3)
    assert ours.loglikelihood([]) == ours.generate_until([]) == lm(preset="full").loglikelihood([]) == []


def test_a_prompt_that_just_fits_is_scored(lm, folder):
    theirs = HFLM(folder, device="cpu", dtype="float32", max_length=200)
    fits = score_request(prose(195), prose(6, 1))  # the last token is predicted, not read: 200 are
    ((total, greedy),) = lm(max_length=200, budget=1.0).loglikelihood([fits])
    ((expected, also),) = theirs.loglikelihood([fits])
    assert (total, greedy) == (pytest.approx(expected, abs=1e-3), also)
    with pytest.raises(EvaluationError, match="do not fit the model's 200"):
        lm(max_length=200, budget=1.0).loglikelihood([score_request(prose(196), prose(6, 1))])


@pytest.mark.parametrize("plain", [True, False])
def test_a_context_without_tokens_is_refused_by_name(lm, plain):
    ours = lm(preset="full") if plain else lm(budget=0.3)
    with pytest.raises(EvaluationError, match="request is empty"):
        ours.loglikelihood([score_request(" ", "a")])  # the space is the continuation's
    with pytest.raises(EvaluationError, match="request is empty"):
        ours.generate_until([request("")])


@pytest.mark.parametrize("until", ["q", ["q"], [], "", ["\n\n", "q", "zz"]])
def test_stop_strings_are_taken_as_lm_evals_own_model_takes_them(lm, hf, until):
    asked = [request(prose(60, seed), until=until, new=20) for seed in range(3)] + [request("a", until=until)]
    assert lm(budget=1.0, batch_size=2).generate_until(asked) == hf.generate_until(asked)


def test_duplicates_and_different_arguments_keep_their_order(lm, hf):
    asked = [request(prose(60), new=5), request("ab", new=9), request(prose(60), new=5), request(prose(60), new=3)]
    assert lm(budget=1.0, batch_size=3).generate_until(asked) == hf.generate_until(asked)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"max_gen_toks": 0}, "max_gen_toks is a whole number >= 1, got 0"),
        ({"max_gen_toks": -3}, "max_gen_toks is a whole number >= 1, got -3"),
        ({"max_gen_toks": "few"}, "generation arguments"),
        ({"until": None}, "until is a stop string or a list"),
        ({"until": ["a", 7]}, "until is a stop string or a list"),
        ({"until": ("a", "b")}, "until is a stop string or a list"),
        ({"temperature": "hot"}, "generation arguments"),
        ({"num_return_sequences": 2}, "one text per prompt"),
        ({"max_length": 40}, "max_length=40 is set by the model itself"),
        ({"past_key_values": 1}, "past_key_values=1 is set by the model itself"),
        ({"cache_implementation": "static"}, "is set by the model itself"),
    ],
)
def test_generation_that_cannot_be_carried_out_is_refused_before_any_is(lm, monkeypatch, more, says):
    ours = lm(budget=0.3)
    monkeypatch.setattr(ours, "_continue", lambda *args: pytest.fail("generated before the last request was read"))
    with pytest.raises(EvaluationError, match=says):
        ours.generate_until([request(niah(100)), request(niah(100), **more)])


def test_greedy_by_temperature_zero_is_greedy(lm, hf):
    asked = [request(prose(60), temperature=0.0), request(prose(60), temperature=0.0, do_sample=False)]
    assert lm(budget=1.0).generate_until(asked) == hf.generate_until(asked)


@pytest.mark.parametrize("doc", [None, {}, [], "text", {"context": ""}])
def test_a_document_without_a_context_is_refused_by_name(doc):
    with pytest.raises(EvaluationError, match="document's field 'context'"):
        question_start("longbench_qasper", "some prompt", doc)


@pytest.mark.parametrize("size", ["auto", "auto:4", "0", "-1", "1.5", "²", None, True, [2]])
def test_batch_sizes_are_whole_numbers(size):
    with pytest.raises(EvaluationError, match="batch_size is a whole number"):
        CentroidLM("no/such/model", batch_size=size)


@pytest.mark.parametrize("options", [{"preset": []}, {"preset": 7}, {"preset": {"name": "quick"}}, {"protocol": []}])
def test_options_of_other_types_are_refused_by_name(options):
    with pytest.raises(EvaluationError):
        CentroidLM("no/such/model", **options)


def test_a_models_own_code_is_never_run_unasked(folder, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append(text) or "yes")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}')
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for more in ({}, {"trust_remote_code": False}):
        with pytest.raises(EvaluationError, match=r"trust_remote_code=True to --model_args"):
            CentroidLM(str(tmp_path), device="cpu", **more)
    for wrong in (None, "yes", 1):
        with pytest.raises(EvaluationError, match="trust_remote_code is True or False"):
            CentroidLM(str(tmp_path), device="cpu", trust_remote_code=wrong)
    assert not asked
    assert not (tmp_path / "ran").exists()
