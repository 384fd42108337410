"""Printed tables inside Markdown documents, between ``<!-- tables: NAME -->`` and ``<!-- end: NAME -->``."""

from __future__ import annotations

import re
from pathlib import Path

from analysis.tools.store import write_text
from centroidkv.errors import EvaluationError

SHOWN = ("README.md", "analysis/README.md", "analysis/quality.md")
MARK = re.compile(r"<!--\s*(?:tables|end)\s*:")
BLOCK = re.compile(r"<!-- tables: (?P<name>[\w.-]+) -->\n(?P<body>(?:(?!<!--).)*)<!-- end: (?P=name) -->\n", re.DOTALL)


def body_of(printed: str) -> str:
    """What a document shows of a command's output: all but the first paragraph, which says how it was called."""
    body = printed.strip().partition("\n\n")[2]
    if not body:
        raise EvaluationError(
            f"nothing follows the first paragraph of {printed[:80]!r}, so a document would lose its table"
        )
    if "<!--" in body:
        raise EvaluationError(f"a comment in {printed[:80]!r} would be taken for the end of its table in a document")
    return f"\n{body}\n\n"


class Documents:
    """The Markdown files below ``root`` that hold printed tables.

    Raises:
        EvaluationError: a block has no end of its own, so its table would stay as it is, unnoticed.
    """

    def __init__(self, root: Path, names: tuple[str, ...] = SHOWN) -> None:
        self.paths = [root / name for name in names if (root / name).exists()]
        for path in self.paths:
            rest = BLOCK.sub("", path.read_text(encoding="utf-8"))
            if stray := MARK.search(rest):
                line = rest[stray.start() :].partition("\n")[0]
                raise EvaluationError(
                    f"{path}: {line!r} belongs to no whole block; those are '<!-- tables: NAME -->', the table and "
                    f"'<!-- end: NAME -->', the marks alone on their lines"
                )

    def blocks(self) -> dict[str, str]:
        """What the documents show now, by table."""
        texts = [path.read_text(encoding="utf-8") for path in self.paths]
        return {found["name"]: found["body"] for text in texts for found in BLOCK.finditer(text)}

    def put(self, name: str, printed: str) -> bool:
        """Replace what the documents show of table ``name``; whether any shows it."""
        shown = False
        for path in self.paths:
            text = path.read_text(encoding="utf-8")
            blocks = [found for found in BLOCK.finditer(text) if found["name"] == name]
            for found in reversed(blocks):
                text = text[: found.start("body")] + body_of(printed) + text[found.end("body") :]
            if blocks:
                write_text(path, text)
                shown = True
        return shown
