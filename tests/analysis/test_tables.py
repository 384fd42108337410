"""One command makes every table: what it runs exists, what fails is named, and the documents show what is stored."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from analysis import tables
from analysis.fidelity import report
from analysis.fidelity.tasks import TASKS
from analysis.splice import Documents, body_of
from centroidkv.errors import EvaluationError

ROOT = Path(__file__).parents[2]
BLOCKS = Documents(ROOT).blocks()
NO_TABLE = {"gpu_check"}
"""Prints what is true of the GPU at hand; no document shows that yet."""


def source(command: str) -> str:
    """The text of a command's files."""
    if command.endswith(".py"):
        return (ROOT / command).read_text()
    path = ROOT.joinpath(*command.split("."))
    folder = path if path.is_dir() else path.parent
    files = [path.with_suffix(".py")] if folder.name == "analysis" else folder.glob("*.py")
    return "\n".join(file.read_text() for file in files)


@pytest.mark.parametrize("table", tables.TABLES, ids=lambda table: table.name)
def test_commands_exist_and_know_their_options(table):
    text = source(table.command)
    for option in re.findall(r"--[a-z-]+", f"{table.arguments} {table.small}"):
        assert f'"{option}"' in text, option


def test_names_are_unique_and_every_analysis_is_run():
    names = [table.name for table in tables.TABLES]
    assert len(set(names)) == len(names)
    runnable = {
        path.stem if path.parent.name == "analysis" else path.parent.name
        for path in (ROOT / "analysis").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    run = {table.command.removeprefix("analysis.") for table in tables.TABLES}
    assert runnable - {"tables"} - NO_TABLE <= run


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
    with pytest.raises(SystemExit, match="failed: bad"):
        tables.main(["--small", "--results", str(tmp_path / "out"), "--texts", "topics"])
    assert (tmp_path / "out/tables/good.txt").read_text() == "title\n\n| table | ['a b', 'topics', '--x']\n"
    assert not (tmp_path / "out/tables/bad.txt").exists()
    assert re.search(r"bad +\| \d+ +\| failed", capsys.readouterr().out)


def test_a_missing_environment_is_named_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "run", lambda *_: pytest.fail("ran"))
    with pytest.raises(SystemExit, match="make peers"):
        tables.main(["--small", "--only", "tasks_*", "--results", str(tmp_path), "--peers", str(tmp_path / "none")])


def test_only_the_named_block_is_replaced(tmp_path):
    page = tmp_path / "page.md"
    text = "a\n<!-- tables: x -->\n{}<!-- end -->\nb\n<!-- tables: y -->\nkept\n<!-- end -->\nc\n"
    page.write_text(text.format("old\n"))
    documents = Documents(tmp_path, ("page.md", "absent.md"))
    assert documents.put("x", "how it was called\n\n| new |\n")
    assert not documents.put("z", "first\n\nsecond")
    assert page.read_text() == text.format("\n| new |\n\n")
    assert documents.blocks() == {"x": "\n| new |\n\n", "y": "kept\n"}


def test_documents_show_tables_that_there_are():
    assert set(BLOCKS) <= {table.name for table in tables.TABLES}


def test_output_without_a_table_or_an_unclosed_block_changes_nothing(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(before := "<!-- tables: x -->\nold\n<!-- tables: y -->\nkept\n<!-- end -->\n")
    documents = Documents(tmp_path, ("page.md",))
    assert not documents.put("x", "first\n\nsecond")
    with pytest.raises(EvaluationError, match="lose its table"):
        documents.put("y", "only one paragraph")
    assert page.read_text() == before


@pytest.mark.parametrize("name", [table.name for table in tables.TABLES if table.command == "analysis.fidelity"])
def test_documents_show_the_stored_figures(name):
    cells = json.loads((ROOT / "analysis" / "results" / f"{name}.json").read_text())["cells"]
    rows = report.flatten(cells)
    tasks = [task for task in TASKS if any(row.task == task for row in rows)]
    assert BLOCKS[name] == body_of(f"title\n\n{report.table(rows, tasks)}")
