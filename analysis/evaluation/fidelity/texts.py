"""Prose that hides needles and is continued: presidential addresses, or CPython's help topics."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from centroidkv.cli.needle import prose

ADDRESSES = Path(__file__).resolve().parents[4] / "shared" / "data" / "addresses"
DEV = ("1830", "1857", "1896", "1906")
"""Years of the addresses that choices may look at; the others are held out."""

SPLITS = ("dev", "heldout")


def load_texts(split: str, folder: Path = ADDRESSES) -> list[str]:
    """The texts of a split, each one line of prose.

    Raises:
        ValueError: no such split.
        FileNotFoundError: the folder of addresses is not there; ``help_topics`` needs none.
    """
    if split not in SPLITS:
        raise ValueError(f"splits are {SPLITS}, got {split!r}")
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise FileNotFoundError(f"no texts in {folder}; use the split 'topics', which every Python brings along")
    chosen = [file for file in files if (file.name.startswith(DEV)) == (split == "dev")]
    return [re.sub(r"\s+", " ", file.read_text(encoding="utf-8")).strip() for file in chosen]


def help_topics(count: int = 4) -> list[str]:
    """``count`` different orders of the standard library's prose."""
    return [prose(seed) for seed in range(count)]


class Haystack:
    """Consecutive sentences from a seeded place in one of several texts."""

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        self._texts = [re.split(r"(?<=\.) ", text) for text in texts]
        self._costs = [
            [len(ids) for ids in tokenizer(text, add_special_tokens=False).input_ids] for text in self._texts
        ]

    def sentences(self, tokens: int, seed: int) -> list[str]:
        """About ``tokens`` tokens of whole sentences; counted per sentence, so the whole may differ by a few."""
        chance = random.Random(seed)
        number = seed % len(self._texts)
        text, costs = self._texts[number], self._costs[number]
        last = len(text) - 1
        room = 0
        while last > 0 and room < tokens:
            room += costs[last]
            last -= 1
        start = chance.randrange(last + 1)
        end, total = start, 0
        while end < len(text) and total < tokens:
            total += costs[end]
            end += 1
        return text[start:end]
