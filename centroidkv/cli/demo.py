"""``centroidkv demo``: compress a real model's cache, show what it saved and what it cost."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import DynamicCache

from centroidkv import presets
from centroidkv.cli.needle import Needle, Outcome, ask, make_needle
from centroidkv.cli.options import SMOLLM2, check_picture, load, share, whole
from centroidkv.cli.picture import draw_similarity

PICTURE_LAYER = 10
LEAST = 300
"""Tokens of prose: a quarter of fewer would hold no centroid beside the 4 sinks and 64 recent tokens of a preset."""
MOST = 8000
"""Tokens of prose: the model reads 8192, and chat template, question and answer need some."""
RUNS = (
    ("full cache", None, 1.0),
    ("streaming_llm", "streaming_llm", 0.5),
    ("streaming_llm", "streaming_llm", 0.25),
    ("centroidkv", "centroidkv", 0.5),
    ("centroidkv", "centroidkv", 0.25),
    ("distinctive", "distinctive", 0.5),
    ("distinctive", "distinctive", 0.25),
    ("balanced", "balanced", 0.5),
    ("balanced", "balanced", 0.25),
)
HEADER = ("method", "budget", "slots", "MiB", "bytes", "compress s", "answer", "exact", "NLL", "tok/s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``centroidkv demo``."""
    length = f"length of the prose in tokens, {LEAST} to {MOST} (default 3000)"
    parser.add_argument("--tokens", type=whole(LEAST, MOST), default=3000, help=length)
    parser.add_argument("--seed", type=whole(0), default=0, help="which prose, which number (default 0)")
    parser.add_argument("--depth", type=share, default=0.4, help="where in the prose the number is hidden, 0..1")
    parser.add_argument("--picture", type=Path, default=Path("demo.png"), help="where to save the picture")


def run(options: argparse.Namespace) -> int:
    """Run the demo, print its table, then draw its picture.

    Raises:
        CommandError: the picture cannot be written where it is asked for.
    """
    check_picture(options.picture)
    with tqdm(total=len(RUNS) + 2, desc="loading SmolLM2-135M", file=sys.stderr, leave=False) as steps:
        model, tokenizer = load(SMOLLM2, torch.float32)
        needle = make_needle(tokenizer, options.tokens, options.depth, options.seed)
        steps.update()
        rows: list[Sequence[str]] = []
        try:
            for name, preset, budget in RUNS:
                steps.set_description(f"{name} at {budget:.0%}")
                compressor = presets.ALL[preset](budget) if preset else None
                rows.append(_row(name, budget, ask(model, tokenizer, needle, compressor)))
                steps.update()
        finally:
            # Also after an error or an interrupt, and before the picture: what was measured is not to be lost.
            if rows:
                steps.clear()
                _print(needle, rows)
        steps.set_description("drawing keys")
        _draw(model, needle, options.picture)
        steps.update()
    print(f"Key similarity of layer {PICTURE_LAYER} is drawn in {options.picture}.")
    return 0


def _print(needle: Needle, rows: Sequence[Sequence[str]]) -> None:
    length = needle.context.shape[1]
    print(f"A number is hidden in {length} tokens of prose, which are compressed before it is asked for.")
    print(f"SmolLM2-135M-Instruct, float32, {torch.get_num_threads()} threads. The right answer is {needle.number}.\n")
    print(format_table(HEADER, rows))
    print(
        "\nslots: kept of the context, per KV head. bytes: share of the full keys and values. NLL: of the right answer,"
        "\nnats per token, lower is better. tok/s: decoding, after compression.",
        flush=True,
    )


def _row(name: str, budget: float, outcome: Outcome) -> Sequence[str]:
    stats = outcome.stats
    answer = outcome.answer if len(outcome.answer) <= 22 else outcome.answer[:19] + "..."
    return (
        name,
        f"{budget:.0%}",
        f"{stats.physical}/{stats.logical}",
        f"{stats.bytes / 2**20:.1f}",
        f"{stats.share:.1%}",
        f"{stats.seconds:.2f}",
        answer,
        "yes" if outcome.exact else "no",
        f"{outcome.nll:.3f}",
        f"{outcome.tokens_per_second:.1f}",
    )


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up as plain text."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in padded)


@torch.no_grad()
def _draw(model: Any, needle: Needle, path: Path) -> None:
    cache = DynamicCache(config=model.config)
    model(needle.context[:, :1024], past_key_values=cache, logits_to_keep=1)
    keys = cache.layers[PICTURE_LAYER].keys
    draw_similarity(keys[0], path, f"SmolLM2-135M, layer {PICTURE_LAYER}: keys as cached (after RoPE)")
