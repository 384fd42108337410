"""Printed tables inside Markdown documents, between ``<!-- tables: NAME -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
from pathlib import Path

from centroidkv.errors import EvaluationError

SHOWN = ("analysis/README.md", "analysis/quality.md")
BLOCK = re.compile(r"<!-- tables: (?P<name>[\w.-]+) -->\n(?P<body>(?:(?!<!-- tables:).)*?)<!-- end -->", re.DOTALL)


def body_of(printed: str) -> str:
    """What a document shows of a command's output: all but the first paragraph, which says how it was called."""
    body = printed.strip().partition("\n\n")[2]
    if not body:
        raise EvaluationError(
            f"nothing follows the first paragraph of {printed[:80]!r}, so a document would lose its table"
        )
    return f"\n{body}\n\n"


class Documents:
    """The Markdown files below ``root`` that hold printed tables."""

    def __init__(self, root: Path, names: tuple[str, ...] = SHOWN) -> None:
        self.paths = [root / name for name in names if (root / name).exists()]

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
                path.write_text(text, encoding="utf-8")
                shown = True
        return shown
