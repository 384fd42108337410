"""A failing case as one file that runs alone: it needs centroidkv and what that needs, nothing of this folder."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from tools.fuzz.draw import SUBJECTS, Case

PARTS = {
    "life": ("found", "models", "oracle", "recipe", "holds", "alone", "cached", "life"),
    "pool": ("found", "pool"),
    "back_ends": ("found", "recipe", "back_ends"),
}
"""The files of this folder that each subject is made of, in the order in which they need one another."""


def write(case: Case, message: str, prelude: str = "", threads: int = 2) -> str:
    """The script: the case on top, as calls, and below it what these calls do. ``prelude`` is run before."""
    name = case.subject.rstrip("s")
    calls = ["before = thread_facts()", f"{name} = {SUBJECTS[case.subject][0].__name__}({_arguments(case.options)})"]
    calls += [f"{name}.{operation}({_arguments(given)})" for operation, given in (*case.operations, ("finish", {}))]
    calls.append("check_threads(before)")
    text = textwrap.fill(" ".join(message.replace("\\", "/").replace('"""', "'''").split()), 112)
    imports, bodies = set(), []
    for part in PARTS[case.subject]:
        found, body = _split(Path(__file__).with_name(f"{part}.py").read_text())
        imports |= found
        bodies.append(f"# {'-' * 20} tools/fuzz/{part}.py\n\n{body}")
    lines = [
        f'"""Found by tools/fuzz:\n\n{text}\n\nRun by itself it ends with that error, or says "mended".\n"""',
        "from __future__ import annotations",
        "import os\n\nos.environ.setdefault('HF_HUB_OFFLINE', '1')",
        "\n".join(sorted(imports, key=lambda line: (line.startswith("from"), line))),
        "def main() -> None:\n" + textwrap.indent("\n".join(calls), "    "),
        *bodies,
        *([prelude] if prelude else []),
        f'if __name__ == "__main__":\n    torch.set_num_threads({threads})\n    main()\n    print("mended")',
    ]  # fmt: skip
    return "\n\n\n".join(lines) + "\n"


def _arguments(given: dict[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items())


def _split(source: str) -> tuple[set[str], str]:
    """Top-level imports, one a line, and the rest without its docstring; imports of this folder are left out."""
    source = re.sub(r'\A""".*?"""\n', "", source, flags=re.DOTALL)
    imports: set[str] = set()
    kept = []
    for line in source.splitlines():
        if re.match(r"(import|from) ", line):
            if not line.startswith(("from tools.fuzz", "from __future__")):
                imports.add(line)
        else:
            kept.append(line)
    return imports, "\n".join(kept).strip()
