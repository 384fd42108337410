"""What the documents say is true of the code."""

from __future__ import annotations

import ast
import doctest
import re
from dataclasses import fields
from pathlib import Path

import pytest

from centroidkv import presets
from centroidkv.integrations.vllm import ServingOptions
from centroidkv.integrations.vllm.options import usable_presets

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    "README.md",
    "DESIGN.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/api.md",
    "docs/glossary.md",
    "docs/transformers.md",
    "docs/families.md",
    "docs/lm_eval.md",
    "docs/kvpress.md",
    "docs/vllm.md",
    "docs/distributed.md",
    "analysis/README.md",
    "analysis/quality.md",
)
README = (ROOT / "README.md").read_text()
VLLM = (ROOT / "docs" / "vllm.md").read_text()


def test_the_readmes_example_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    (example,) = [block for block in blocks if "Compressor.builder()" in block]
    exec(example, {})
    assert "T=250" in capsys.readouterr().out


def test_the_readmes_table_names_every_exported_part_and_files_that_exist():
    for family in ("preserve", "partition", "similarity", "matching", "aggregate", "schedule", "allocation"):
        module = __import__(f"centroidkv.{family}", fromlist=["__all__"])
        for name in module.__all__:
            if isinstance(getattr(module, name), type):
                assert f"`{name}`" in README, f"README's table of parts lacks {name}"
    for path in re.findall(r"\| `([a-z_]+/[a-z_]*(?:\.py)?)` \|", README):
        assert (ROOT / "centroidkv" / path).exists(), path


def test_the_readme_names_every_preset():
    assert all(f"`{name}`" in README for name in presets.ALL)


def test_design_names_tests_that_exist():
    references = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "DESIGN.md").read_text())
    assert len(references) > 15
    for path, name in references:
        functions = {node.name for node in ast.parse((ROOT / path).read_text()).body if hasattr(node, "name")}
        assert name in functions, f"{path} has no {name}"


def test_the_sizes_in_the_vllm_page_are_the_plans():
    (session,) = [block for block in re.findall(r"```python\n(.*?)```", VLLM, re.S) if ">>>" in block]
    test = doctest.DocTestParser().get_doctest(session, {}, "docs/vllm.md", "docs/vllm.md", 0)
    assert doctest.DocTestRunner().run(test) == (0, len(test.examples))
    assert len(test.examples) > 5


def test_the_vllm_page_names_every_option_its_default_and_every_preset_that_can_serve():
    for option in fields(ServingOptions):
        shown = {str: f'`"{option.default}"`', type(None): "the preset's"}.get(
            type(option.default), f"`{option.default}`"
        )
        assert f"| `{option.name}` | {shown} |" in VLLM, option.name
    (row,) = [line for line in VLLM.splitlines() if line.startswith("| `preset` |")]
    assert re.findall(r"`(\w+)`", row.split("|")[3]) == usable_presets()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_paths_lead_somewhere(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / name).parent.joinpath(target).exists(), target
