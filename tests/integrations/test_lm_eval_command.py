"""lm-eval's own command line, knowing our model."""

from __future__ import annotations

import json
import sys
from functools import partialmethod

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'centroidkv[lm_eval]'")

from centroidkv.integrations.lm_eval.__main__ import main

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

TASK = """
task: niah_tiny
custom_dataset: !function data.make
test_split: test
output_type: generate_until
doc_to_text: "{{{{input}}}}"
doc_to_target: "{{{{outputs}}}}"
gen_prefix: "The number is"
generation_kwargs: {{max_gen_toks: 5, do_sample: false, until: ["\\n"]}}
metric_list: [{{metric: exact_match}}]
"""
DATA = """
import datasets
def make(**kwargs):
    text = "Memorize." + chr(10) + "abcdefgh " * {repeat} + chr(10) + "What is the number?"
    return {{"test": datasets.Dataset.from_list([{{"input": text, "outputs": "7"}}] * 2)}}
"""


@pytest.fixture
def tiny_task(tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    # Reading lm-eval's own ten thousand task files takes half a minute.
    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))
    (tmp_path / "task.yaml").write_text(TASK.format())
    (tmp_path / "data.py").write_text(DATA.format(repeat=60))
    return tmp_path


@pytest.mark.parametrize("chat", [[], ["--apply_chat_template"]])
def test_the_command_runs_a_task(folder, tiny_task, monkeypatch, capsys, chat):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model_args = f"pretrained={folder},preset=centroidkv,budget=0.3,protocol=query-agnostic,dtype=float32"
    monkeypatch.setattr(
        sys, "argv",
        ["lm_eval", "--model", "centroidkv", "--model_args", model_args, "--tasks", "niah_tiny", "--include_path",
         str(tiny_task), "--device", "cpu", "--batch_size", "2", "--output_path", str(tiny_task / "out"),
         "--log_samples", *chat],
    )  # fmt: skip
    assert main() == 0
    assert "niah_tiny" in capsys.readouterr().out
    (found,) = (tiny_task / "out").rglob("results*.json")
    config = json.loads(found.read_text())["config"]
    assert config["centroidkv"]["protocol"] == "query-agnostic"
    assert config["centroidkv"]["requests_not_compressed"] == 0
    assert config["centroidkv"]["kept_bytes_share"] < 0.5
    (samples,) = (tiny_task / "out").rglob("samples*.jsonl")
    prompt = json.loads(samples.read_text().splitlines()[0])["arguments"]["gen_args_0"]["arg_0"]
    end = "What is the number?</s><assistant>The number is" if chat else "What is the number? The number is"
    assert prompt.endswith(end)
    assert prompt.startswith("<user>" if chat else "Memorize.")


def test_the_command_prints_our_errors_and_fails(tiny_task, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv",
        ["lm_eval", "--model", "centroidkv", "--model_args", "pretrained=x,preset=nope", "--tasks", "niah_tiny",
         "--include_path", str(tiny_task)],
    )  # fmt: skip
    assert main() == 2
    assert "EvaluationError: no preset is named 'nope'" in capsys.readouterr().err
