"""Quality against bytes, as a picture."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from analysis.evaluation.fidelity.contenders import OURS
from analysis.evaluation.fidelity.report import HIGHLIGHT, Row, grouped, samples_of
from centroidkv.errors import EvaluationError

PANELS = (
    ("needle_number", "nll", "needle: NLL of the answer"),
    ("needle_number", "kl", "needle: KL on the question"),
    ("prose", "kl", "prose: KL on what follows"),
)


def complete(rows: list[Row]) -> dict[tuple[str, float, str, str], float]:
    """Means by (method, budget, task, figure) of those measured on all samples: others are means of other texts."""
    found = grouped(rows)
    most = samples_of(found)
    return {key: float(np.mean(v)) for key, v in found.items() if len(v) == most[key[2:]]}


def leaders(found: dict[tuple[str, float, str, str], float], ours: Collection[str]) -> list[str]:
    """Methods that are the best of ours, or of the others, in a panel at some budget; ``found`` holds means."""
    best = set()
    for task, figure, _ in PANELS:
        for budget in {key[1] for key in found if key[1] < 1}:
            means = {key[0]: mean for key, mean in found.items() if key[1:] == (budget, task, figure)}
            for mine in (True, False):
                group = [name for name in means if (name in ours) == mine]
                best |= {min(group, key=lambda name: (means[name], name))} if group else set()
    return sorted(best, key=lambda name: (name not in ours, name))


def plot(rows: list[Row], path: Path, ours: Collection[str] = OURS, highlight: str = HIGHLIGHT) -> None:
    """Needle NLL, needle KL and prose KL of every method over the budgets, where it was measured on all samples.

    Those that lead somewhere have colours and names, the rest are grey.

    Raises:
        EvaluationError: there is nothing to draw.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = {key: mean for key, mean in complete(rows).items() if key[1] < 1}
    panels = [panel for panel in PANELS if any(key[2:] == panel[:2] for key in found)]
    if not panels:
        raise EvaluationError(f"{path} would be empty: no method has figures of {[panel[:2] for panel in PANELS]}")
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 4.4), layout="constrained", squeeze=False
    )
    named = leaders(found, ours)
    others = sorted({key[0] for key in found if any(key[2:] == panel[:2] for panel in panels)} - set(named))
    colours = pyplot.get_cmap("tab10")
    for axis, (task, name, title) in zip(axes[0], panels, strict=True):
        said = False
        for method in (*others, *named):
            points = sorted((key[1], mean) for key, mean in found.items() if (key[0], *key[2:]) == (method, task, name))
            if not points:
                continue
            leads, mine = method in named, method in ours
            told = None if said or leads else f"{len(others)} others"
            said = said or not leads
            axis.plot(
                *zip(*points, strict=True),
                marker=("o" if mine else "x") if leads else None,
                color=colours(named.index(method) % 10) if leads else "0.8",
                linestyle="-" if mine else "--",
                linewidth=3 if method == highlight else 1.4 if leads else 0.8,
                markersize=5,
                label=method if leads else told,
                zorder=4 if method == highlight else 3 if leads else 2,
            )
        axis.set(title=title, xscale="log", yscale="log", xlabel="share of the full cache's bytes")
        axis.set_xticks([0.125, 0.25, 0.5], ["12.5 %", "25 %", "50 %"], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("nats per token (lower is better)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
