"""Is alternation the best split on real keys? Measured curves against the theorem's hypotheses, and brute force.

python -m analysis partition_optimality [--tokens 2048] [--picture partition_optimality.png]

For every layer and KV head: mean cosine similarity of keys by distance f(1), f(2), ...; whether it falls and is convex
on 1..c-1; the mean cross similarity of several splits of a chunk of c slots under f; and the best of all equal splits.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from tqdm import tqdm

from analysis.reproduce.capture import capture
from analysis.reproduce.curves import curves, is_convex, is_monotone
from centroidkv.cli.demo import format_table
from centroidkv.cli.needle import prose
from centroidkv.integrations.transformers import load_smollm2
from centroidkv.partition import Alternating, Halves, RandomSplit, Strided
from centroidkv.similarity import Cosine
from centroidkv.testing.oracles import best_equal_splits, cross_similarity

LENGTHS = (8, 9, 10, 11, 12)
LONGEST = 256


def abba(length: int) -> tuple[int, ...]:
    """The side of the split ABBAABBA..."""
    return tuple(i for i in range(length) if i % 4 in (0, 3))


def sides(length: int) -> dict[str, tuple[int, ...]]:
    """One side of each named split."""
    stages = {"alternating": Alternating(None), "halves": Halves(None), "strided 4": Strided(4, None)}
    named = {name: tuple(stage(length).sources.tolist()) for name, stage in stages.items()}
    named["ABBA"] = abba(length)
    named["random"] = tuple(RandomSplit(0, None)(length).sources.tolist())
    return named


def mean_cross(side: tuple[int, ...], curve: list[float]) -> float:
    """Mean similarity over the pairs of a split."""
    return cross_similarity(side, curve) / (len(side) * (len(curve) + 1 - len(side)))


def tiny_random() -> tuple[Any, int]:
    """A random Llama as control, and its vocabulary size."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=192, intermediate_size=384, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=4096,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval(), 512


def curves_of(model: Any, ids: Tensor) -> Tensor:
    """Similarity by distance, ``[layers * heads, LONGEST]``."""
    return curves((layer.keys[0] for layer in capture(model, ids)), LONGEST).flatten(0, 1)


def rows_for(name: str, lines: Tensor) -> list[list[str]]:
    """One table row per chunk length."""
    rows = []
    for length in LENGTHS:
        short = [curve[: length - 1].tolist() for curve in lines]
        monotone, convex = [is_monotone(c) for c in short], [is_convex(c) for c in short]
        named = sides(length)
        means = {split: sum(mean_cross(side, c) for c in short) / len(short) for split, side in named.items()}
        best, wins, gaps = [], 0, []
        for curve in tqdm(short, file=sys.stderr, leave=False, desc=f"{name}, c = {length}"):
            total, winners = best_equal_splits(curve)
            best.append(total / (length // 2 * (length - length // 2)))
            wins += named["alternating"] in winners or tuple(range(1, length, 2)) in winners
            gaps.append(best[-1] - mean_cross(named["alternating"], curve))
        both = sum(a and b for a, b in zip(monotone, convex, strict=True))
        share = [f"{sum(x) / len(short):.0%}" for x in (monotone, convex)]
        rows.append(
            [name, str(length), *share, f"{both / len(short):.0%}", *(f"{means[split]:.4f}" for split in named),
             f"{sum(best) / len(best):.4f}", f"{wins / len(short):.0%}", f"{max(gaps):.4f}"]
        )  # fmt: skip
    return rows


def matching_gap(model: Any, ids: Tensor, chunk: int = 256) -> tuple[float, float]:
    """Mean similarity of all sources' merges: bipartite soft matching, and the optimal one-to-one matching."""
    soft, optimal, count = 0.0, 0.0, 0
    for layer in capture(model, ids):
        for keys in layer.keys[0]:
            for start in range(0, len(keys) - chunk + 1, chunk):
                scores = Cosine()(keys[start : start + chunk : 2], keys[start + 1 : start + chunk : 2])
                soft += float(scores.max(-1).values.sum())
                rows, columns = linear_sum_assignment(-scores.numpy())
                optimal += float(scores[rows, columns].sum())
                count += len(scores)
    return soft / count, optimal / count


def main() -> None:
    """Print the table for a real model and a random control; save the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--picture", type=Path, default=None)
    options = parser.parse_args()
    model, tokenizer = load_smollm2()
    ids = torch.tensor([tokenizer(prose(1)).input_ids[: options.tokens]])
    control, vocabulary = tiny_random()
    random_ids = torch.randint(vocabulary, (1, options.tokens), generator=torch.Generator().manual_seed(0))
    measured = {"SmolLM2-135M": curves_of(model, ids), "random Llama": curves_of(control, random_ids)}
    soft, optimal = matching_gap(model, ids)
    rows = [row for name, curve in measured.items() for row in rows_for(name, curve)]
    print(f"{options.tokens} tokens, keys after RoPE; {len(measured['SmolLM2-135M'])} layers x heads\n")
    print(
        f"Mean similarity of merging all sources in chunks of 256: {soft:.4f} by bipartite soft matching (many to 1), "
        f"{optimal:.4f} by the optimal one-to-one matching\n"
    )
    header = ("model", "c", "monotone", "convex", "both", *sides(8), "best split", "alternating best", "largest gap")
    print(format_table(header, rows))
    if options.picture:
        draw(measured, options.picture)


def draw(measured: dict[str, Tensor], path: Path) -> None:
    """Similarity by distance of all layers and heads, per model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(measured), figsize=(11, 4.2), layout="constrained")
    for panel, (name, lines) in zip(panels, measured.items(), strict=True):
        distance = range(1, lines.shape[1] + 1)
        low, middle, high = torch.quantile(lines, torch.tensor([0.1, 0.5, 0.9]), dim=0).numpy()
        panel.fill_between(distance, low, high, alpha=0.2, label="10 to 90 % of layers and heads")
        panel.plot(distance, middle, label="median")
        panel.set(title=name, xlabel="distance in tokens", ylabel="mean cosine similarity of keys", xscale="log")
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
