"""``python -m analysis``: the scripts, room by room; ``python -m analysis NAME ...`` runs one of them."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent


def scripts() -> dict[str, tuple[str, str]]:
    """Name -> module and first sentence, of every file and folder that runs by itself."""
    found = {}
    for path in sorted(HERE.glob("*/*.py")) + sorted(HERE.glob("*/*/__main__.py")):
        text = path.read_text()
        parts = path.relative_to(HERE.parent).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__main__" else parts
        if 'if __name__ == "__main__"' in text:
            found[parts[-1]] = (".".join(parts), (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0])
    return found


def main() -> None:
    """List the scripts, or run the one that is named."""
    known = scripts()
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("python -m analysis NAME [arguments]; --help after a name shows its arguments")
        for name, (module, says) in sorted(known.items(), key=lambda entry: entry[1]):
            print(f"  {name:22}{module.split('.')[1]:12}{says}")
        return
    name = sys.argv.pop(1)
    if name not in known:
        sys.exit(f"no script is called {name!r}; known: {', '.join(sorted(known))}")
    runpy.run_module(known[name][0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
