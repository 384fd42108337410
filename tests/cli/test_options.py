"""What the command is asked for is checked before a model is loaded, and what was measured is printed first."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from damaged import damage

from centroidkv.cli import demo, generate
from centroidkv.cli.main import main
from centroidkv.errors import ModelError

# -- prompts and models -----------------------------------------------------------------------------------------------


def nothing(*args, **kwargs):
    raise AssertionError("the model was loaded before the options were checked")


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr(generate, "load", nothing)
    monkeypatch.setattr(demo, "load", nothing)


@pytest.mark.parametrize("raw", [[], ["--raw"]])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "CommandError: the prompt in .* is empty"),
        (b"ab\xff", "CommandError: the prompt in .* is not UTF-8 text: byte 0xff at position 2"),
        (None, "IsADirectoryError"),
        ("missing", "FileNotFoundError.*missing.txt"),
    ],
)
def test_prompts_are_read_before_the_model(no_model, folder, tmp_path, content, says, raw, capsys):
    path = tmp_path / ("missing.txt" if content == "missing" else "prompt")
    if content is None:
        path.mkdir()
    elif content != "missing":
        path.write_bytes(content)
    assert main(["generate", "--model", str(folder), "--prompt-file", str(path), *raw]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(says, line)


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="ascii"), "the prompt in stdin is not UTF-8"),
        (io.StringIO(""), "the prompt in stdin is empty"),
        (None, "stdin, which is closed"),
    ],
)
def test_stdin_is_read_before_the_model(no_model, folder, stream, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", stream)
    assert main(["generate", "--model", str(folder), "--prompt-file", "-"]) == 2
    assert says in capsys.readouterr().err


def test_stdin_is_utf8_whatever_the_terminal_is(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("één\r\ntwee".encode()), encoding="ascii"))
    assert generate.read_prompt(Path("-")) == "één\ntwee"


def test_a_prompt_without_tokens_is_refused(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "p").write_text("x")
    monkeypatch.setattr(
        "transformers.PreTrainedTokenizerFast.__call__", lambda *a, **k: type("Encoded", (), {"input_ids": []})()
    )
    assert main(["generate", "--raw", "--model", str(folder), "--prompt-file", str(tmp_path / "p")]) == 2
    assert "holds no token of this model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("file", "is a file; name the folder"),
        ("bare", "holds no config.json"),
        ("no/such/folder", "there is no folder"),
        ("..", "holds no config.json|there is no folder"),
        ("", "holds no config.json"),
    ],
)
def test_what_is_no_model_is_refused_before_anything_is_read(no_model, tmp_path, monkeypatch, name, says, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "bare").mkdir()
    assert main(["generate", "--model", name, "--prompt-file", "file"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("centroidkv: ModelError: ")
    assert any(part in line for part in says.split("|"))


@pytest.mark.parametrize(
    "more",
    [
        ["--interval", "0"], ["--interval", "1.5"], ["--interval", "-1"], ["--max-new-tokens", "0"],
        ["--max-new-tokens", "many"], ["--budget", "0"], ["--budget", "nan"], ["--budget", "-3"], ["--budget", "inf"],
        ["--preset", "best"], ["--dtype", "int8"],
    ],
)  # fmt: skip
def test_options_are_checked_before_anything_is_read(no_model, folder, more, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["generate", "--model", str(folder), "--prompt-file", "missing", *more])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("centroidkv generate: argument ")


def test_a_budget_too_small_for_its_preset_is_refused_before_anything_is_read(no_model, folder, capsys):
    assert main(["generate", "--model", str(folder), "--prompt-file", "missing", "--budget", "10"]) == 2
    assert "BudgetError" in capsys.readouterr().err


def test_a_models_own_code_is_not_run_unasked(folder, prompt, tmp_path, monkeypatch, capsys):
    model = damage(folder, "intact", tmp_path)
    ran = tmp_path / "ran"
    (model / "own.py").write_text(
        "from transformers import PretrainedConfig\n"
        f"open({str(ran)!r}, 'w').close()\n"
        "class OwnConfig(PretrainedConfig):\n"
        "    model_type = 'own'\n"
    )
    (model / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}')
    asked = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append(text) or "yes")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    arguments = ["generate", "--model", str(model), "--prompt-file", str(prompt)]
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("centroidkv: ModelError: the model ")
    assert "--trust-remote-code" in line
    assert not asked
    assert not ran.exists()
    with pytest.raises(ModelError, match="trust_remote_code=True"):
        generate.load(str(model), generate.DTYPES["float32"])
    assert main([*arguments, "--trust-remote-code"]) == 2  # runs it, and finds no model for this configuration
    assert ran.exists()
    assert not asked


# -- the demo ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        ["--depth", "1.5"], ["--depth", "-0.1"], ["--depth", "nan"], ["--depth", "middle"], ["--tokens", "0"],
        ["--tokens", "-5"], ["--tokens", "299"], ["--tokens", "8001"], ["--tokens", "1e3"], ["--seed", "-1"],
        ["--seed", "x"],
    ],
)  # fmt: skip
def test_the_demos_options_are_checked_first(no_model, more, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["demo", *more])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"centroidkv demo: argument {more[0]}: takes ")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no/folder/demo.png", "which does not exist"),
        ("demo", "ends in none of "),
        ("demo.txt", "ends in none of "),
        ("folder.png", "is a folder"),
        ("file/demo.png", "which does not exist"),
        ("x" * 300 + ".png", "File name too long"),
    ],
)
def test_the_picture_is_checked_before_the_model_is_loaded(no_model, tmp_path, monkeypatch, name, says, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("x")
    assert main(["demo", "--picture", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_folder_that_cannot_be_written_to_is_noticed_first(no_model, tmp_path, monkeypatch, capsys):
    def full(dir):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    assert main(["demo", "--picture", str(tmp_path / "demo.png")]) == 2
    assert f"the folder '{tmp_path}' cannot be written to: No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_demo(folder, monkeypatch):
    from centroidkv.integrations.transformers import load_pretrained

    monkeypatch.setattr(demo, "load", lambda name, dtype: load_pretrained(folder, dtype))
    monkeypatch.setattr(demo, "RUNS", demo.RUNS[:3])
    monkeypatch.setattr(demo, "PICTURE_LAYER", 1)


def rows_of(text):
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")][2:]


def test_the_demo_prints_then_draws(small_demo, tmp_path, capsys):
    assert main(["demo", "--tokens", "300", "--picture", str(tmp_path / "demo.svg")]) == 0
    said = capsys.readouterr().out
    assert rows_of(said) == ["full cache", "streaming_llm", "streaming_llm"]
    assert said.splitlines()[-1].endswith("demo.svg.")
    assert (tmp_path / "demo.svg").read_text().startswith("<?xml")


def test_the_table_is_not_lost_with_the_picture(small_demo, tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo, "draw_similarity", fail)
    assert main(["demo", "--tokens", "300", "--picture", str(tmp_path / "demo.png")]) == 2
    said = capsys.readouterr()
    assert len(rows_of(said.out)) == 3
    assert "is drawn in" not in said.out
    assert "No space left on device" in said.err


def test_rows_are_not_lost_with_a_later_one(small_demo, tmp_path, monkeypatch, capsys):
    ask, asked = demo.ask, []

    def sometimes(*args):
        asked.append(args)
        if len(asked) == 3:
            raise MemoryError
        return ask(*args)

    monkeypatch.setattr(demo, "ask", sometimes)
    assert main(["demo", "--tokens", "300", "--picture", str(tmp_path / "demo.png")]) == 2
    said = capsys.readouterr()
    assert rows_of(said.out) == ["full cache", "streaming_llm"]
    assert "centroidkv: MemoryError" in said.err


def test_the_shortest_demo_still_compresses_by_every_preset():
    from centroidkv import presets

    for _, name, budget in demo.RUNS:
        if name:
            whole = presets.ALL[name](budget)
            for layer in whole.for_layers([index / 29 for index in range(30)]):
                assert layer.fits(demo.LEAST)


def test_a_needle_that_cannot_be_made_is_refused(folder):
    from centroidkv.cli.needle import make_needle
    from centroidkv.errors import EvaluationError
    from centroidkv.integrations.transformers import load_pretrained

    tokenizer = load_pretrained(folder)[1]
    for bad in ({"depth": 1.5}, {"depth": float("nan")}, {"length": 0}, {"seed": -1}):
        with pytest.raises(EvaluationError, match="a needle takes length >= 1"):
            make_needle(tokenizer, **bad)
    with pytest.raises(EvaluationError, match="fewer than the 500 asked for"):
        make_needle(tokenizer, 500, text="A short text. Very short.")
