"""Scripts that measure for minutes print what they found before they draw or write a file, either of which may fail."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import analysis

FOLDER = Path(analysis.__file__).parent
WRITERS = {"draw", "plot", "write_json", "draw_heatmaps", "draw_curves", "write"}


def called(node):
    return {
        call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
    }


def mains():
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == "main" and called(node) & WRITERS:
                yield pytest.param(node, id=str(path.relative_to(FOLDER)))


def test_there_are_such_scripts():
    assert len(list(mains())) >= 9


@pytest.mark.parametrize("main", list(mains()))
def test_results_are_printed_before_anything_is_written(main):
    prints = [index for index, statement in enumerate(main.body) if "print" in called(statement)]
    writes = [index for index, statement in enumerate(main.body) if called(statement) & WRITERS]
    assert max(prints) < min(writes)


def test_settings_that_python_takes_for_equal_are_different_settings(tmp_path):
    from analysis.tools.store import Store
    from centroidkv.errors import EvaluationError

    path = tmp_path / "results.json"
    Store(path, {"budget": 1}).add("cell", {"figure": 2})
    assert Store(path, {"budget": 1}).cells["cell"]["figure"] == 2
    for other in (1.0, True):
        with pytest.raises(EvaluationError, match="results of other settings"):
            Store(path, {"budget": other})
