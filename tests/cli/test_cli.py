import re
import subprocess
import sys

import pytest
import torch

from centroidkv import Budget

pytest.importorskip("transformers")

from centroidkv.cli.generate import budget
from centroidkv.cli.main import main
from centroidkv.cli.picture import draw_similarity, key_cosines, similarity_by_distance


def test_budget_reads_ratios_and_slots():
    assert budget("0.25") == Budget.ratio(0.25)
    assert budget("4096") == Budget.tokens(4096)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--model", "m", "--prompt-file", "f", "--budget", "1.5"], r"\(0, 1\]"),
        (["generate", "--model", "m", "--prompt-file", "f", "--budget", "much"], "could not convert"),
        (["generate", "--model", "m"], "--prompt-file"),
        (["compress"], "invalid choice"),
    ],
)
def test_bad_arguments_end_with_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_missing_file_is_named(capsys):
    assert main(["generate", "--model", "smollm2", "--prompt-file", "no/such/file"]) == 2
    assert "no/such/file" in capsys.readouterr().err


def test_similarity_by_distance_by_hand():
    keys = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    assert similarity_by_distance(key_cosines(keys), 2).tolist() == [[0.5, 0.0]]


def test_the_picture_is_a_png(tmp_path):
    draw_similarity(torch.randn(2, 40, 8), tmp_path / "keys.png", "keys")
    assert (tmp_path / "keys.png").read_bytes().startswith(b"\x89PNG")


def run(*arguments):
    command = [sys.executable, "-m", "centroidkv.cli.main", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.mark.slow
def test_the_demo_prints_its_table_and_finds_the_needle(tmp_path):
    out = run("demo", "--picture", str(tmp_path / "demo.png")).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    table = {(row[0], row[1]): dict(zip(rows[0], row, strict=True)) for row in rows[2:]}
    assert len(table) == 9
    best = table["distinctive", "25%"]
    assert best["exact"] == "yes"
    assert float(best["bytes"].rstrip("%")) <= 27
    assert table["full cache", "100%"]["exact"] == "yes"
    assert float(best["NLL"]) < float(table["streaming_llm", "25%"]["NLL"])
    assert (tmp_path / "demo.png").exists()


@pytest.mark.slow
def test_generate_streams_an_answer_on_a_users_folder(tmp_path):
    from centroidkv.integrations.transformers.models import smollm2_folder

    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The capital of France is Paris. " * 60 + "What is the capital of France?")
    ran = run("generate", "--model", str(smollm2_folder()), "--prompt-file", str(prompt), "--max-new-tokens", "12")
    assert "Paris" in ran.stdout
    assert re.search(r"\d+ tokens in \d+ slots", ran.stderr)
