"""The picture of analysis.benchmarks.serve_bench: throughput by KV size, and the ratio to the stock server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from analysis.tools.pictures import pyplot_for_files, save


def draw(speeds: Mapping[str, Mapping[int, float]], path: Path) -> None:
    """Output tokens per second by server and KV size (above), and times the first server's (below)."""
    pyplot = pyplot_for_files()
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(6.4, 5.6), layout="constrained", sharex=True, height_ratios=(3, 2)
    )
    first, *_ = speeds
    ratios = {
        name: {size: speed / speeds[first][size] for size, speed in found.items() if size in speeds[first]}
        for name, found in speeds.items()
        if name != first
    }
    for colour, (name, found) in enumerate(speeds.items()):
        style = {"color": f"C{colour}", "marker": "o", "markersize": 4}
        above.plot(list(found), list(found.values()), label=name, **style)
        if name == first:
            continue
        below.plot(list(ratios[name]), list(ratios[name].values()), **style)
        for size, ratio in ratios[name].items():
            best = ratio == max(other.get(size, 0) for other in ratios.values())
            below.annotate(
                f"{ratio:.2f}", (size, ratio), xytext=(0, 6 if best else -13), textcoords="offset points", ha="center",
                fontsize=8,
            )  # fmt: skip
    below.axhline(1, color="C0", linewidth=1)
    above.set_ylabel("output tokens per second")
    below.set_ylabel(f"times {first}")
    below.set_xlabel("KV cache of the server (MiB)")
    above.legend(loc="lower right")
    for axes in (above, below):
        axes.set_ylim(0, 1.15 * axes.dataLim.ymax)  # from zero, so that heights compare; room for the numbers
        axes.grid(alpha=0.3)
    save(figure, path)
