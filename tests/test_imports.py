"""The import rules of DESIGN.md, read off the source, and what a fresh process loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import centroidkv

PACKAGE = Path(centroidkv.__file__).parent

# What each part may import from the package; a part may always import itself.
BASE = {
    "errors",
    "gram",
    "guards",
    "kept",
    "kernels",
    "native",
    "protocols",
    "queries",
    "ranges",
    "records",
    "rotary",
    "scores",
    "slot_data",
    "state",
    "state_ops",
    "traits",
}
ALLOWED = {
    "errors": set(),
    "gram": {"errors"},
    "guards": {"errors"},
    "ranges": {"errors"},
    "traits": {"errors"},
    "kernels": {"errors"},
    "kept": {"errors"},
    "native": {"errors", "kept"},
    "rotary": {"errors"},
    "slot_data": {"errors"},
    "state": {"errors", "guards", "ranges", "rotary", "slot_data"},
    "state_ops": {"state"},
    "records": {"errors"},
    "protocols": {"errors", "records", "state", "traits"},
    "queries": {"errors", "gram", "ranges", "rotary", "state"},
    "scores": {"gram", "ranges", "state"},
    "preserve": BASE,
    "partition": BASE,
    "similarity": BASE,
    "matching": BASE,
    "aggregate": BASE,
    "schedule": BASE,
    "allocation": BASE,
    "attention": {"errors", "guards", "kernels", "native"},
    "dense": {"errors", "state", "state_ops"},
    "rounds": BASE | {"aggregate", "dense", "matching"},
    "assembly": {"errors", "preserve", "rounds", "traits"},
    "builder": {"aggregate", "allocation", "matching", "partition", "preserve", "records", "schedule", "similarity"},
    "compressor": BASE | {"allocation", "assembly", "builder", "dense", "rounds", "schedule", "preserve"},
    "trigger": {"compressor", "errors", "records"},
    "cache": BASE | {"compressor", "dense", "trigger"},
    "presets": BASE | {"allocation", "compressor", "matching", "partition", "preserve", "schedule", "similarity"},
    "paged": BASE | {"attention", "compressor", "trigger"},
    "integrations": BASE
    | {"paged", "allocation", "attention", "cache", "compressor", "presets", "preserve", "rounds", "similarity"},
    "cli": BASE | {"cache", "compressor", "integrations", "presets"},
    "testing": BASE
    | {
        "aggregate",
        "allocation",
        "attention",
        "cache",
        "compressor",
        "matching",
        "partition",
        "preserve",
        "schedule",
        "similarity",
    },
    "__init__": {"compressor", "presets", "records", "rotary", "state"},
}
# Who may import packages beyond torch, numpy and the standard library.
OUTSIDE = {
    "transformers": {"integrations", "cli"},
    "vllm": {"integrations"},
    "prometheus_client": {"integrations"},
    "lm_eval": {"integrations"},
    "safetensors": {"integrations"},
    "kvpress": {"integrations"},
    "hypothesis": {"testing"},
    "matplotlib": {"cli"},
    "tqdm": {"cli", "integrations"},
}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports out in full"
            names.add(node.module or "")
            if node.module == "centroidkv":
                names |= {f"centroidkv.{alias.name}" for alias in node.names}
    return names - {"centroidkv"}


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_parts_import_only_what_they_may(path):
    part = part_of(path)
    for name in imports(path):
        root, *rest = name.split(".")
        if root == "centroidkv":
            other = rest[0]
            if hasattr(centroidkv, other) and not (PACKAGE / other).exists() and not (PACKAGE / f"{other}.py").exists():
                continue  # a name re-exported by the package, not a module
            assert other == part or other in ALLOWED[part], f"{path.name} ({part}) may not import {name}"
        elif root == "triton":
            assert path.name == "triton.py", f"only */triton.py may import triton, not {path}"
        elif root in OUTSIDE:
            assert part in OUTSIDE[root], f"{part} may not import {root}"
        else:
            known = root in sys.stdlib_module_names or root in {"torch", "numpy"}
            assert known, f"{path} imports {root}, which no rule allows"


def test_adapters_of_engines_import_no_other_adapter():
    for folder, forbidden in (
        ("integrations/vllm", ("transformers", "kvpress", "lm_eval")),
        ("integrations/transformers", ("vllm", "kvpress", "lm_eval")),
    ):
        for path in (PACKAGE / folder).rglob("*.py"):
            named = imports(path)
            assert not [n for n in named for other in forbidden if n.startswith(f"centroidkv.integrations.{other}")], (
                path
            )


def module_of(path: Path) -> str:
    parts = ["centroidkv", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def for_types(tree: ast.Module) -> list[ast.stmt]:
    """What is imported for annotations only."""
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    return [line for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING" for line in block.body]


def test_no_file_imports_itself_through_others():
    """Imports inside functions count as well: they would only hide the circle."""
    modules = {module_of(path): path for path in FILES}
    graph = {}
    for module, path in modules.items():
        named, tree = set(), ast.parse(path.read_text())
        only_types = for_types(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node not in only_types:
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                named |= {full if full in modules else str(node.module) for full in inside}
        graph[module] = named & modules.keys() - {module}
    done: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, "circle: " + " -> ".join((*trail[trail.index(module) :], module))
        if module in done:
            return
        for other in sorted(graph[module]):
            walk(other, (*trail, module))
        done.add(module)

    for module in sorted(graph):
        walk(module, ())


def test_files_fit_in_one_head():
    long = {path.name: n for path in FILES if (n := len(path.read_text().splitlines())) > 300}
    assert not long


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_a_fresh_import_loads_no_optional_package_and_patches_nothing():
    heavy = "['triton', 'transformers', 'hypothesis', 'matplotlib', 'tqdm', 'vllm', 'lm_eval', 'kvpress']"
    code = (
        "import sys, torch\n"
        "before = set(sys.modules); softmax = torch.nn.functional.scaled_dot_product_attention\n"
        "import centroidkv, centroidkv.attention, centroidkv.cache\n"
        "assert torch.nn.functional.scaled_dot_product_attention is softmax\n"
        f"print([name for name in {heavy} if name in set(sys.modules) - before])"
    )
    assert fresh(code) == "[]"


def test_the_core_works_where_optional_packages_are_missing():
    code = (
        "import sys\n"
        "for name in ('triton', 'transformers', 'hypothesis', 'matplotlib', 'tqdm', 'lm_eval', 'kvpress'):\n"
        "    sys.modules[name] = None\n"
        "import torch, centroidkv\n"
        "state = centroidkv.KVState.from_kv(torch.randn(1, 1, 300, 8), torch.randn(1, 1, 300, 8))\n"
        "print(centroidkv.presets.centroidkv(0.5)(state).slots)\n"
        "try:\n"
        "    import centroidkv.integrations.transformers\n"
        "except ImportError as error:\n"
        '    print("centroidkv[transformers]" in str(error))\n'
        "try:\n"
        "    import centroidkv.integrations.lm_eval\n"
        "except ImportError as error:\n"
        '    print("centroidkv[lm_eval]" in str(error))\n'
        "try:\n"
        "    import centroidkv.integrations.kvpress\n"
        "except ImportError as error:\n"
        '    print("centroidkv[kvpress]" in str(error))\n'
    )
    assert fresh(code).splitlines() == ["150", "True", "True", "True"]


def test_the_type_marker_ships():
    assert (PACKAGE / "py.typed").exists()
