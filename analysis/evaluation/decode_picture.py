"""The picture of analysis.evaluation.decode_quality: divergence over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from analysis.tools.pictures import pyplot_for_files, save
from analysis.tools.store import Store


def draw(
    store: Store,
    sources: Sequence[str],
    presets: Sequence[str],
    budgets: Sequence[str],
    samples: int,
    window: int,
    path: Path,
) -> None:
    """KL to the full cache (above) and extra NLL (below) by window; a column per source and budget."""
    pyplot = pyplot_for_files()
    columns = [(source, size) for source in sources for size in budgets]
    figure, grid = pyplot.subplots(
        2, len(columns), figsize=(3 * len(columns) + 1, 5.6), layout="constrained", sharex=True, sharey="row",
        squeeze=False,
    )  # fmt: skip
    for (source, size), above, below in zip(columns, *grid, strict=True):
        for preset in presets:
            cells = [store[f"{source} {sample} | {preset} {size}"] for sample in range(samples)]
            kl = [mean(values) for values in zip(*(cell["kl"] for cell in cells), strict=True)]
            nll, full = ([mean(v) for v in zip(*(c[key] for c in cells), strict=True)] for key in ("nll", "nll_full"))
            middle = [(i + 0.5) * window for i in range(len(kl))]
            above.plot(middle, kl, marker="o", markersize=3, label=preset)
            below.plot(middle, [a - b for a, b in zip(nll, full, strict=True)], marker="o", markersize=3)
        above.set_title(f"{source}, budget {size}", fontsize=10)
        below.axhline(0, color="black", linewidth=0.8)
        below.set_xlabel("tokens after the prompt")
        for axes in (above, below):
            axes.grid(alpha=0.3)
    grid[0, 0].set_ylim(bottom=0)
    grid[0, 0].set_ylabel("KL to the full cache (nats)")
    grid[1, 0].set_ylabel("NLL above the full cache's")
    grid[0, -1].legend(fontsize=9)
    save(figure, path)
