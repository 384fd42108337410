"""The pictures of analysis.reproduce.similarity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from analysis.reproduce.curves import Keys
from analysis.tools.pictures import pyplot_for_files, save
from centroidkv.cli.picture import key_cosines
from centroidkv.errors import EvaluationError


def heatmap_panels(keys: Keys, places: Sequence[tuple[int, int]], window: int) -> dict[str, Tensor]:
    """Cosines ``[places, window, window]`` of the text's last ``window`` tokens, before and after RoPE.

    Raises:
        EvaluationError: a layer that is not measured, a head the model lacks, more tokens than the text has.
    """
    length, heads = keys.after.shape[2], keys.after.shape[1]
    if not 2 <= window <= length:
        raise EvaluationError(f"a heat map shows 2 to {length} tokens of this text, not {window}")
    for layer, head in places:
        if layer not in keys.layers:
            raise EvaluationError(f"layer {layer} is not one of the full-attention layers {list(keys.layers)}")
        if not 0 <= head < heads:
            raise EvaluationError(f"KV head {head} is not in 0..{heads - 1}")
    return {
        name: torch.stack([key_cosines(x[keys.layers.index(i), h : h + 1, -window:])[0] for i, h in places])
        for name, x in (("before RoPE", keys.before), ("after RoPE", keys.after))
    }


def draw_heatmaps(keys: Keys, places: Sequence[tuple[int, int]], window: int, title: str, path: Path) -> None:
    """One column per (layer, head), before RoPE above, after RoPE below; one scale for all."""
    panels = heatmap_panels(keys, places, window)
    # A few pairs are far below the rest; the scale begins where all but 1 % lie, and the colour bar shows so.
    low = math.floor(10 * torch.quantile(torch.stack(list(panels.values())).flatten()[::7], 0.01).item()) / 10
    pyplot = pyplot_for_files()
    figure, grid = pyplot.subplots(
        2, len(places), figsize=(2.7 * len(places) + 1.2, 5.6), layout="constrained", squeeze=False, sharex=True,
        sharey=True,
    )  # fmt: skip
    start = keys.after.shape[2] - window
    edges = (start - 0.5, start + window - 0.5)
    for row, (name, images) in zip(grid, panels.items(), strict=True):
        for axes, (layer, head), image in zip(row, places, images, strict=True):
            shown = axes.imshow(
                image.numpy(), vmin=low, vmax=1, cmap="viridis", interpolation="nearest", extent=(*edges, *edges[::-1])
            )
            axes.set_title(f"layer {layer}, head {head}, {name}", fontsize=9)
            axes.tick_params(labelsize=8)
        row[0].set_ylabel("token")
    for axes in grid[-1]:
        axes.set_xlabel("token")
    figure.colorbar(shown, ax=grid, label="cosine similarity", shrink=0.8, extend="min")
    figure.suptitle(title)
    save(figure, path)


def thinned(curve: Tensor) -> tuple[Tensor, Tensor]:
    """Mean distances ``[m]`` and values ``[..., m]`` of a curve: every point at first, then 12 means per octave."""
    longest = curve.shape[-1]
    edges = sorted({round(2 ** (k / 12)) for k in range(12 * longest.bit_length()) if 2 ** (k / 12) <= longest})
    spans = [slice(first - 1, last - 1) for first, last in pairwise([*edges, longest + 1])]
    distance = torch.arange(1, longest + 1, dtype=torch.float32)
    return (
        torch.stack([distance[span].mean() for span in spans]),
        torch.stack([curve[..., span].mean(-1) for span in spans], -1),
    )


def draw_curves(keys: Keys, measured: dict[str, Tensor], title: str, path: Path) -> None:
    """Similarity by distance before and after RoPE: a line per layer, a band from its least to its largest head.

    Far distances are drawn as means over a twelfth of an octave.
    """
    pyplot = pyplot_for_files()
    figure, grid = pyplot.subplots(1, len(measured), figsize=(10.5, 4.3), layout="constrained", sharey=True)
    colour = pyplot.cm.ScalarMappable(pyplot.Normalize(keys.layers[0], keys.layers[-1]), "plasma")
    for axes, (name, curve) in zip(grid, measured.items(), strict=True):
        distance, shown = (x.numpy() for x in thinned(curve))
        for layer, lines in zip(keys.layers, shown, strict=True):
            paint = colour.to_rgba(layer)
            axes.plot(distance, lines.mean(0), color=paint, linewidth=1)
            if len(lines) > 1:
                axes.fill_between(distance, lines.min(0), lines.max(0), color=paint, alpha=0.06, linewidth=0)
        mean = shown.mean((0, 1))
        axes.plot(distance, mean, color="black", linewidth=2, label="mean of layers and heads")
        axes.set_title(name)
        axes.set_xlabel("distance in tokens")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower left")
    grid[0].set_ylabel("mean cosine similarity")
    bands = ", bands span its heads" if keys.after.shape[1] > 1 else ", one KV head each"
    figure.colorbar(colour, ax=grid, label=f"layer{bands}", ticks=_ticks(keys.layers))
    figure.suptitle(title)
    save(figure, path)


def _ticks(layers: Sequence[int]) -> list[int]:
    return list(layers) if len(layers) <= 6 else [layers[i * (len(layers) - 1) // 5] for i in range(6)]
