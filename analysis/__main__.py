"""``python -m analysis``: the scripts, room by room; ``python -m analysis NAME ...`` runs one of them."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
RUNS = 'if __name__ == "__main__"'


def scripts() -> dict[str, str]:
    """Name -> module, of every file and folder that runs by itself, room by room."""
    files = sorted(HERE.glob("*/*.py")) + sorted(HERE.glob("*/*/__main__.py"))
    parts = [path.relative_to(HERE.parent).with_suffix("").parts for path in files if RUNS in path.read_text()]
    names = [part[:-1] if part[-1] == "__main__" else part for part in parts]
    return {name[-1]: ".".join(name) for name in sorted(names)}


def says(module: str) -> str:
    """The first sentence of a script."""
    path = HERE.parent.joinpath(*module.split("."))
    text = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def main() -> None:
    """List the scripts, or run the one that is named."""
    known = scripts()
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("python -m analysis NAME [arguments]; --help after a name shows its arguments")
        for name, module in known.items():
            print(f"  {name:22}{module.split('.')[1]:12}{says(module)}")
        return
    name = sys.argv.pop(1)
    if name not in known:
        sys.exit(f"no script is called {name!r}; known: {', '.join(sorted(known))}")
    runpy.run_module(known[name], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
