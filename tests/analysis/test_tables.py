"""One command makes every table: what it runs exists, what fails is named, and the documents show what is stored."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from analysis.__main__ import scripts
from analysis.evaluation import choosing
from analysis.evaluation.fidelity import report
from analysis.evaluation.fidelity.contenders import OURS, all_contenders
from analysis.evaluation.fidelity.figures import method_and_budget
from analysis.tools import tables
from analysis.tools.splice import Documents, body_of
from centroidkv.errors import EvaluationError

ROOT = Path(__file__).parents[2]
BLOCKS = Documents(ROOT).blocks()
FIDELITY = [table.name for table in tables.TABLES if table.command == "analysis.evaluation.fidelity"]
NO_TABLE = {"gpu_check"}
"""Prints what is true of the GPU at hand; no document shows that yet."""


def source(command: str) -> str:
    """The text of a command's files."""
    if command.endswith(".py"):
        return (ROOT / command).read_text()
    path = ROOT.joinpath(*command.split("."))
    folder = path if path.is_dir() else path.parent
    files = [path.with_suffix(".py")] if command.startswith("analysis.") and folder != path else folder.glob("*.py")
    return "\n".join(file.read_text() for file in files)


@pytest.mark.parametrize("table", tables.TABLES, ids=lambda table: table.name)
def test_commands_exist_and_know_their_options(table):
    text = source(table.command)
    for option in re.findall(r"--[a-z-]+", f"{table.arguments} {table.small}"):
        assert f'"{option}"' in text, option


def test_names_are_unique_and_every_analysis_is_run():
    names = [table.name for table in tables.TABLES]
    assert len(set(names)) == len(names)
    run = {table.command.split(".")[-1] for table in tables.TABLES}
    assert scripts().keys() - {"tables"} - NO_TABLE <= run


def test_the_command_lists_every_script_and_runs_it():
    listed = subprocess.run([sys.executable, "-m", "analysis"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:]] == [
        name for name, _ in sorted(scripts().items(), key=lambda entry: entry[1])
    ]
    ran = subprocess.run(
        [sys.executable, "-m", "analysis", "mutation", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert "--only" in ran.stdout
    unknown = subprocess.run([sys.executable, "-m", "analysis", "mutatoin"], cwd=ROOT, capture_output=True, text=True)
    assert unknown.returncode == 1
    assert "no script is called 'mutatoin'" in unknown.stderr


def test_small_runs_stay_away_from_published_figures(capsys):
    options = tables.parse(["--small"])
    assert ROOT / "analysis" not in options.results.parents
    assert ROOT / "docs" not in options.pictures.parents
    for table in tables.TABLES:
        line = " ".join(tables.command_of(table, options))
        assert "docs/pictures" not in line
        assert "analysis/results" not in line
    with pytest.raises(SystemExit):
        tables.parse(["--small", "--results", str(ROOT / "analysis" / "results")])
    assert "would be mixed" in capsys.readouterr().err


def test_an_unknown_name_is_refused_with_those_there_are(capsys):
    with pytest.raises(SystemExit):
        tables.parse(["--only", "nothing"])
    said = capsys.readouterr().err
    assert "'nothing'" in said
    assert "bench_round" in said


def test_a_failure_is_named_and_the_others_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "bad.py").write_text("print('half'); raise SystemExit(3)")
    (tmp_path / "good.py").write_text("import sys; print('title\\n\\n| table |', sys.argv[1:])")
    bad, good = (tables.Table(name, str(tmp_path / f"{name}.py"), "'a b' {texts}", "--x") for name in ("bad", "good"))
    monkeypatch.setattr(tables, "TABLES", (bad, good))
    (tmp_path / "out/tables").mkdir(parents=True)
    (tmp_path / "out/tables/bad.txt").write_text("earlier")
    with pytest.raises(SystemExit, match="failed: bad"):
        tables.main(["--small", "--results", str(tmp_path / "out")])
    assert (tmp_path / "out/tables/good.txt").read_text() == "title\n\n| table | ['a b', 'topics', '--x']\n"
    assert not (tmp_path / "out/tables/bad.txt").exists()  # an earlier run's would be taken for this one's
    assert re.search(r"bad +\| \d+ +\| failed", capsys.readouterr().out)


def test_a_missing_environment_is_named_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "run", lambda *_: pytest.fail("ran"))
    (tmp_path / "bare").write_text("#!/bin/sh\nexit 1\n")  # a Python without kvpress
    (tmp_path / "bare").chmod(0o755)
    for python in ("none", ".", "bare"):
        with pytest.raises(SystemExit, match=r"make peers.*kvpress"):
            tables.main(["--small", "--only", "tasks_*", "--results", str(tmp_path), "--peers", str(tmp_path / python)])


def test_missing_texts_are_named_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "run", lambda *_: pytest.fail("ran"))
    monkeypatch.setattr(tables, "ADDRESSES", tmp_path / "none")
    found = ["--only", "tasks_*", "--results", str(tmp_path / "out"), "--peers"]
    (tmp_path / "has").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "has").chmod(0o755)
    with pytest.raises(SystemExit, match="datasets-sotu"):
        tables.main([*found, str(tmp_path / "has")])
    with pytest.raises(pytest.fail.Exception, match="ran"):
        tables.main([*found, str(tmp_path / "has"), "--small"])


def test_only_the_named_block_is_replaced(tmp_path):
    page = tmp_path / "page.md"
    text = "a\n<!-- tables: x -->\n{}<!-- end: x -->\nb\n<!-- tables: y -->\nkept\n<!-- end: y -->\nc\n"
    page.write_text(text.format("old\n"))
    documents = Documents(tmp_path, ("page.md", "absent.md"))
    assert documents.put("x", "how it was called\n\n| new |\n")
    assert not documents.put("z", "first\n\nsecond")
    assert page.read_text() == text.format("\n| new |\n\n")
    assert documents.blocks() == {"x": "\n| new |\n\n", "y": "kept\n"}


def test_documents_show_tables_that_there_are():
    assert set(BLOCKS) <= {table.name for table in tables.TABLES}
    written = {table.name for table in tables.TABLES if table.command == "analysis.evaluation.fidelity"}
    assert set(BLOCKS) == written | {"decode_quality", "complexity", "attention_error", "choosing"}


@pytest.mark.parametrize(
    "name", [table.name for table in tables.TABLES if table.command == "analysis.evaluation.fidelity"]
)
def test_stored_figures_are_those_of_the_methods_as_they_are_now(name):
    stored = json.loads((ROOT / "analysis" / "results" / f"{name}.json").read_text())["methods"]
    known = {contender.name: contender for contender in all_contenders()}
    for label, was in stored.items():
        method, budget = method_and_budget(label)
        if method in known or method in OURS:  # presses are only known where kvpress is
            assert was == known[method].described(budget), f"{label} changed: measure it anew with --again"


def test_the_readme_shows_the_stored_figures(capsys):
    choosing.main(
        [str(ROOT / "analysis" / "results" / f"fidelity_{model}.json") for model in ("smollm2", "gemma3-270m")]
    )
    assert BLOCKS["choosing"] == body_of(capsys.readouterr().out)


def test_a_figure_that_is_missing_is_named(tmp_path):
    (tmp_path / "f.json").write_text(json.dumps({"settings": {"model": "m"}, "cells": {}}))
    with pytest.raises(EvaluationError, match=r"no needle NLL of full cache at \[1.0\]"):
        choosing.main([str(tmp_path / "f.json")])


@pytest.mark.parametrize(
    "broken",
    [
        "<!-- tables: x -->\nold\n<!-- tables: y -->\nkept\n<!-- end: y -->\n",
        "<!-- tables: x -->\nold\n\nProse.\n<!-- tables: y -->\nkept\n<!-- end: x -->\n<!-- end: y -->\n",
        "<!-- tables: x -->\nold\n",
        "<!-- tables: x --> \nold\n<!-- end: x -->\n",
        "old\n<!-- end: x -->\n",
    ],
)
def test_a_block_that_is_not_whole_is_refused_before_anything_is_measured(tmp_path, broken):
    (tmp_path / "page.md").write_text(broken)
    with pytest.raises(EvaluationError, match="belongs to no whole block"):
        Documents(tmp_path, ("page.md",))


@pytest.mark.parametrize(
    ("printed", "said"), [("only one paragraph", "lose its table"), ("first\n\n<!-- end: y -->", "taken for the end")]
)
def test_output_that_is_no_table_changes_nothing(tmp_path, printed, said):
    page = tmp_path / "page.md"
    page.write_text(before := "<!-- tables: y -->\nkept\n<!-- end: y -->\n")
    with pytest.raises(EvaluationError, match=said):
        Documents(tmp_path, ("page.md",)).put("y", printed)
    assert page.read_text() == before


def test_published_output_goes_into_the_documents_and_one_without_a_table_is_named(tmp_path, monkeypatch, capsys):
    page = tmp_path / "analysis" / "README.md"
    page.parent.mkdir()
    page.write_text(
        "".join(f"<!-- tables: {name} -->\nold {name}\n<!-- end: {name} -->\n" for name in ("good", "bare"))
    )
    (tmp_path / "good.py").write_text("print('title\\n\\n| new |')")
    (tmp_path / "bare.py").write_text("print('title')")
    found = tuple(tables.Table(name, str(tmp_path / f"{name}.py")) for name in ("bare", "good"))
    monkeypatch.setattr(tables, "TABLES", found)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="failed: bare"):
        tables.main([])
    assert "| new |" in page.read_text()
    assert "old good" not in page.read_text()
    assert "old bare" in page.read_text()
    assert "lose its table" in capsys.readouterr().out


def test_a_command_ends_with_the_program_that_started_it(tmp_path):
    (tmp_path / "long.py").write_text(
        "import os, pathlib, sys, time\npathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    script = (
        "import sys\nfrom analysis.tools import tables\n"
        f"tables.TABLES = (tables.Table('long', {str(tmp_path / 'long.py')!r}, {str(tmp_path / 'pid')!r}),)\n"
        f"tables.main(['--small', '--results', {str(tmp_path / 'out')!r}])\n"
    )
    program = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.DEVNULL)
    for _ in range(600):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            break
        time.sleep(0.1)
    child = int((tmp_path / "pid").read_text())
    program.terminate()
    assert program.wait(timeout=60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.parametrize(
    "name", [table.name for table in tables.TABLES if table.command == "analysis.evaluation.fidelity"]
)
def test_documents_show_the_stored_figures(name):
    cells = json.loads((ROOT / "analysis" / "results" / f"{name}.json").read_text())["cells"]
    assert BLOCKS[name] == body_of(f"title\n\n{report.printed(report.flatten(cells))}")
