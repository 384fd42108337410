"""What may be relied on is written down: docs/api.md says what the modules say, and documents use no other names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TABLE = re.findall(r"^\| `(centroidkv[\w.]*)` \| (.*?) \|", (ROOT / "docs" / "api.md").read_text(), re.M)
PUBLIC = {module: re.findall(r"`(\w+)`", names) for module, names in TABLE}
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def tree_of(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def declared(tree: ast.Module) -> list[str]:
    """``__all__``, read and not imported: some modules need packages that are not here."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


@pytest.mark.parametrize("module", PUBLIC)
def test_the_table_says_what_the_module_says(module):
    tree = tree_of(module)
    assert PUBLIC[module] == declared(tree)
    assert len(set(PUBLIC[module])) == len(PUBLIC[module])
    assert ast.get_docstring(tree)


def test_every_module_that_declares_public_names_is_in_the_table():
    inner = {"centroidkv.attention.paged", "centroidkv.native", "centroidkv.integrations.transformers.saving"}
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "centroidkv").rglob("*.py")
        if declared(ast.parse(path.read_text()))
    }
    assert modules - inner == PUBLIC.keys()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_use_public_names_only(path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", path.read_text(), re.S))
    lines = [line.strip().removeprefix(">>> ") for line in code.splitlines()]
    for node in (ast.parse(line).body[0] for line in lines if re.match(r"(from|import) centroidkv\S*.*[^(]$", line)):
        if isinstance(node, ast.ImportFrom):
            strangers = {alias.name for alias in node.names} - set(PUBLIC.get(node.module or "", ()))
            assert not strangers, f"{ast.unparse(node)}: {strangers} are not public names of {node.module}"
        else:
            assert all(alias.name in PUBLIC for alias in node.names), ast.unparse(node)
