"""What the models are asked: lm-eval's prompts, lengths and stop strings as snapshots, and where the question begins.

After a deliberate change: ``UPDATE_SNAPSHOTS=1 python -m pytest tests/integrations/test_lm_eval_prompts.py``.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'centroidkv[lm_eval]'")
for needed in ("wonderwords", "nltk", "scipy"):
    pytest.importorskip(needed, reason=f"RULER needs {needed}: pip install 'centroidkv[lm_eval]'")

import jinja2  # noqa: E402
import yaml  # noqa: E402

from centroidkv.errors import EvaluationError  # noqa: E402
from centroidkv.integrations.lm_eval import question_start  # noqa: E402

SNAPSHOTS = Path(__file__).parent / "snapshots"
TASKS = Path(lm_eval.__file__).parent / "tasks"
# evaluation facts in our own words: new tokens per RULER task and LongBench set
RULER_NEW = {"niah": 128, "ruler_vt": 30, "ruler_cwe": 120, "ruler_fwe": 50, "ruler_qa": 32}
LONGBENCH_NEW = {
    128: ("narrativeqa", "qasper", "dureader", "samsum"),
    64: ("multifieldqa_en", "multifieldqa_zh", "trec", "lsht", "lcc", "repobench-p"),
    32: (
        "hotpotqa",
        "2wikimqa",
        "musique",
        "triviaqa",
        "passage_count",
        "passage_retrieval_en",
        "passage_retrieval_zh",
    ),
    512: ("gov_report", "qmsum", "multi_news", "vcsum"),
}
FEW_SHOT = ("trec", "triviaqa", "samsum", "lsht")


class Loader(yaml.SafeLoader):
    """Reads lm-eval's task files without running the functions they name."""


Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


def config(path):
    found = yaml.load(path.read_text(encoding="utf-8"), Loader)
    base = config(path.parent / found["include"]) if "include" in found else {}
    return {**base, **found}


def configs(suite, keep):
    paths = sorted((TASKS / suite).glob("*.yaml"))
    found = {c["task"]: c for c in map(config, paths) if isinstance(c.get("task"), str)}
    return {name: c for name, c in found.items() if keep(name)}


RULER = configs("ruler", lambda name: True)
LONGBENCH = configs("longbench", lambda name: not name.endswith("_e"))


def ruler_module(name):
    short = "niah" if name.startswith("niah") else name.removeprefix("ruler_").split("_")[0]
    return importlib.import_module(f"lm_eval.tasks.ruler.{short}_utils")


def describe(name, c, text):
    gen = c["generation_kwargs"]
    lines = [
        f"== {name}",
        f"new tokens: {gen['max_gen_toks']}; until: {gen['until']!r}; do_sample: {gen['do_sample']}",
        f"between prompt and answer prefix: {c.get('target_delimiter', ' ')!r}; answer prefix: {c.get('gen_prefix')!r}",
        text,
    ]
    return "\n".join(lines) + "\n"


def check(file, text):
    path = SNAPSHOTS / file
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, f"{file} differs; see this module's docstring"


def test_ruler_prompts_are_as_recorded():
    check(
        "ruler.txt",
        "\n".join(
            describe(name, c, f"doc_to_text: {c['doc_to_text']}\ntemplate: {ruler_module(name).TEMPLATE!r}")
            for name, c in RULER.items()
        ),
    )


def test_longbench_prompts_are_as_recorded():
    check("longbench.txt", "\n".join(describe(n, c, f"prompt: {c['doc_to_text']!r}") for n, c in LONGBENCH.items()))


def test_the_suites_are_complete_and_generate_as_many_tokens_as_published():
    assert len(RULER) == 13
    assert len(LONGBENCH) == 21
    for name, c in RULER.items():
        (new,) = {new for prefix, new in RULER_NEW.items() if name.startswith(prefix)}
        assert (c["generation_kwargs"]["max_gen_toks"], c["generation_kwargs"]["until"]) == (new, [])
    for new, sets in LONGBENCH_NEW.items():
        for name in sets:
            gen = LONGBENCH[f"longbench_{name}"]["generation_kwargs"]
            assert (gen["max_gen_toks"], gen["do_sample"]) == (new, False)
            assert gen["until"] == (["\n"] if name in FEW_SHOT else [])


# -- the question -----------------------------------------------------------------------------------------------------


def ruler_prompt(name):
    """A prompt in the template's own words, without its answer prefix, as lm-eval cuts it."""
    module, fill = ruler_module(name), {"context": "CONTEXT", "query": "QUERY", "type_needle_v": "numbers", "num_v": 5}
    text = module.TEMPLATE.format(**fill)
    if name.startswith(("ruler_vt", "ruler_cwe", "ruler_fwe")):
        text = text[: text.rfind(" Answer:")]
    return text


@pytest.mark.parametrize("name", RULER)
def test_the_question_of_every_ruler_task_is_found(name):
    prompt = ruler_prompt(name)
    example = f"{prompt} Answer: 1. one\n\n"  # a worked example holds the same words
    for before, after in (("", ""), ("<|user|>\n", "<|end|>\n<|assistant|>\nThe answer is"), (example, " Answer:")):
        whole = before + prompt + after
        question = whole[question_start(name, whole, {}) :]
        assert question.startswith(("What", "Question: ", "Answer the question"))
        assert "CONTEXT" not in question
        assert question.endswith(after)
        assert "QUERY" not in whole[len(before) : question_start(name, whole, {})]


def test_the_singular_niah_question_is_found():
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE
    from lm_eval.tasks.ruler.prepare_niah import generate_input_output

    prompt, (answer,), query = generate_input_output(
        30, "The grass is green.", type_haystack="repeat", num_needle_k=1, type_needle_k="words", num_needle_v=1,
        type_needle_v="numbers", template=TEMPLATE,
    )  # fmt: skip
    start = question_start("niah_single_1", prompt, {})
    assert prompt[start:] == f"What is the special magic number for {query} mentioned in the provided text?"
    assert answer in prompt[:start]


@pytest.mark.parametrize("name", LONGBENCH)
def test_the_question_of_every_longbench_task_is_found(name):
    doc = {"context": " Some text.\nQuestion: not this one.\n\nMore text. ", "question": "QUERY"}
    prompt = jinja2.Template(LONGBENCH[name]["doc_to_text"], keep_trailing_newline=True).render(doc)
    for whole in (prompt, f"<|user|>\n{prompt}<|end|>\n<|assistant|>\n"):
        start = question_start(name, whole, doc)
        assert whole[:start].endswith("More text.")
        assert re.search(r"\w", whole[start:]), "nothing is asked"
        assert "QUERY" not in whole[:start]


def test_prompts_that_cannot_be_split_are_refused():
    with pytest.raises(EvaluationError, match=r"for task 'gsm8k' no rule .* protocol=query-aware"):
        question_start("gsm8k", "1 + 1?", {})
    with pytest.raises(EvaluationError, match="last line that begins with 'Question:'"):
        question_start("ruler_vt", "VAR A = 1", {})
    with pytest.raises(EvaluationError, match="field 'context'"):
        question_start("longbench_trec", "a b", {"input": "a"})
    with pytest.raises(EvaluationError, match="does not occur in the prompt"):
        question_start("longbench_trec", "a b", {"context": "c"})
    with pytest.raises(EvaluationError, match="is not followed by a question"):
        question_start("longbench_trec", "a b\n", {"context": "b"})


# -- without a network ------------------------------------------------------------------------------------------------


def test_essays_from_hands_lm_eval_a_local_text_and_takes_it_back(tmp_path):
    from lm_eval.tasks.ruler import prepare_niah

    from analysis.evaluation.ruler import essays_from

    before = prepare_niah.datasets, prepare_niah.cached_sent_tokenize
    for name, text in (("b.txt", "Third.  Fourth!"), ("a.txt", "First one.\nSecond?")):
        (tmp_path / name).write_text(text)
    with essays_from(tmp_path):
        assert prepare_niah.get_haystack("essay") == ["First", "one.", "Second?", "Third.", "Fourth!"]
        assert prepare_niah.cached_sent_tokenize("First one. Second? Third") == ["First one.", "Second?", "Third"]
        assert prepare_niah.get_haystack("needle").startswith("One of the special magic")
    assert (prepare_niah.datasets, prepare_niah.cached_sent_tokenize) == before
    assert prepare_niah.get_haystack.cache_info().currsize == 0
    with pytest.raises(FileNotFoundError, match="--essays FOLDER"), essays_from(tmp_path / "none"):
        pass


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("CENTROIDKV_LONG"),
    reason="lm-eval builds 500 documents per task, which takes many minutes; set CENTROIDKV_LONG=1 to run it",
)
def test_offline_ruler_runs_on_a_real_model(tmp_path, capsys):
    """Two tasks, one of them with local prose, through both protocols; a second call runs nothing again."""
    from analysis.evaluation import ruler

    folder = Path(__file__).parents[3] / "shared" / "data" / "addresses"
    if not folder.is_dir():
        pytest.skip("no prose for the essay tasks: shared/data/addresses beside the repository is absent")
    arguments = ["--presets", "full", "distinctive", "--budgets", "0.5", "--samples", "1", "--essays", str(folder)]
    arguments += ["--tasks", "niah_single_1", "niah_single_2", "--output", str(tmp_path / "out.json")]
    ruler.main(arguments)
    out = capsys.readouterr().out
    assert "query-aware\n" in out
    assert "query-agnostic\n" in out
    cells = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert len(cells) == 6
    assert cells["full | both | niah_single_2"]["scores"] == [1.0]
    assert cells["distinctive 0.5 | query-agnostic | niah_single_1"]["tally"]["kept_bytes_share"] < 0.6
    stamp = (tmp_path / "out.json").stat().st_mtime_ns
    ruler.main(arguments)
    assert capsys.readouterr().out == out
    assert (tmp_path / "out.json").stat().st_mtime_ns == stamp
    with pytest.raises(EvaluationError, match="other settings"):
        ruler.main([*arguments, "--samples", "2"])
