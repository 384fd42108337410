"""Tables and plots of what was measured."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import bootstrap

from centroidkv.cli.demo import format_table

COLUMNS = {"needle_number": ("nll", "exact", "kl"), "prose": ("kl",)}
"""Figures shown of a task; of all others ``("nll", "kl")``."""

WIDEST = 6
"""Columns of figures that one table shows."""


@dataclass(frozen=True)
class Row:
    """One figure of one sample: ``method`` at ``budget`` (share of the full bytes) on a task."""

    method: str
    budget: float
    task: str
    figure: str
    index: int
    value: float


def flatten(cells: dict[str, dict]) -> list[Row]:
    """Rows of the store's cells, whose keys are ``task/index`` and whose figures are by ``method@budget``."""
    rows = []
    for key, cell in cells.items():
        task, index = key.split("/")
        for label, figures in cell["figures"].items():
            method, budget = label.rsplit("@", 1)
            rows += [Row(method, float(budget), task, name, int(index), value) for name, value in figures.items()]
    return rows


def grouped(rows: Iterable[Row]) -> dict[tuple[str, float, str, str], list[float]]:
    """Values of all samples by (method, budget, task, figure)."""
    found: dict[tuple[str, float, str, str], list[float]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.index):
        found[row.method, row.budget, row.task, row.figure].append(row.value)
    return found


def interval(values: list[float], resamples: int = 2000) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean over samples."""
    data = np.asarray(values)
    if data.size < 2 or np.ptp(data) == 0:
        return float(data.mean()), float(data.mean())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = bootstrap((data,), np.mean, n_resamples=resamples, method="percentile", rng=np.random.default_rng(0))
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 0.1 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _cell(values: list[float] | None, intervals: bool) -> str:
    if not values:
        return "-"
    if not intervals:
        return _number(float(np.mean(values)))
    low, high = interval(values)
    return f"{_number(float(np.mean(values)))} [{_number(low)}, {_number(high)}]"


def table(rows: list[Row], tasks: list[str], intervals: bool = True) -> str:
    """Per budget, all methods by their needle NLL (or the first figure), means with 95 % intervals.

    More than WIDEST columns become a table per figure.
    """
    found = grouped(rows)
    columns = [(task, figure) for task in tasks for figure in COLUMNS.get(task, ("nll", "kl"))]
    parts = [columns]
    if len(columns) > WIDEST:
        figures = dict.fromkeys(figure for _, figure in columns)
        parts = [[column for column in columns if column[1] == figure] for figure in figures]
    blocks = []
    for budget in sorted({row.budget for row in rows}, reverse=True):
        methods = {row.method for row in rows if row.budget == budget}
        blocks.append(f"{budget:.1%} of the bytes".replace(".0%", "%"))
        blocks += [_of_budget(found, budget, methods, part, intervals) for part in parts]
    return "\n\n".join(blocks)


def _of_budget(
    found: dict[tuple[str, float, str, str], list[float]], budget: float, methods: Iterable[str],
    columns: list[tuple[str, str]], intervals: bool,
) -> str:  # fmt: skip
    """A table of one budget, its methods by the first column."""

    def rank(method: str) -> tuple[float, str]:
        return float(np.mean(found.get((method, budget, *columns[0]), [np.inf]))), method

    counts = {name: [len(found.get((name, budget, *column), [])) for column in columns] for name in methods}
    most = [max(column) for column in zip(*counts.values(), strict=True)]

    def shown(method: str) -> str:
        """The name, and if it was measured on fewer samples than others, on how many."""
        return method if counts[method] == most else f"{method} ({min(counts[method])} samples)"

    body = [
        (shown(method), *(_cell(found.get((method, budget, *column)), intervals) for column in columns))
        for method in sorted(methods, key=rank)
    ]
    head = ("method", *(f"{task} {figure.upper() if figure != 'exact' else figure}" for task, figure in columns))
    return format_table(head, body)


PANELS = (
    ("needle_number", "nll", "needle: NLL of the answer"),
    ("needle_number", "kl", "needle: KL on the question"),
    ("prose", "kl", "prose: KL on what follows"),
)


def leaders(found: dict[tuple[str, float, str, str], list[float]], ours: set[str]) -> list[str]:
    """Methods that are the best of ours, or of the others, in a panel at some budget."""
    best = set()
    for task, figure, _ in PANELS:
        for budget in {key[1] for key in found if key[1] < 1}:
            means = {key[0]: float(np.mean(v)) for key, v in found.items() if key[1:] == (budget, task, figure)}
            for mine in (True, False):
                group = [name for name in means if (name in ours) == mine]
                best |= {min(group, key=lambda name: (means[name], name))} if group else set()
    return sorted(best, key=lambda name: (name not in ours, name))


def plot(rows: list[Row], path: Path, ours: set[str], highlight: str) -> None:
    """Quality against bytes: needle NLL, needle KL and prose KL of every method over the budgets.

    Those that lead somewhere have colours and names, the rest are grey.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = grouped(rows)
    panels = [panel for panel in PANELS if any(key[2:] == panel[:2] for key in found)]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 4.4), layout="constrained", squeeze=False
    )
    named = leaders(found, ours)
    others = sorted({key[0] for key in found} - set(named))
    colours = pyplot.get_cmap("tab10")
    for axis, (task, name, title) in zip(axes[0], panels, strict=True):
        for method in (*others, *named):
            points = sorted(
                (key[1], float(np.mean(v)))
                for key, v in found.items()
                if key[0] == method and key[1] < 1 and key[2:] == (task, name)
            )
            if not points:
                continue
            leads, mine = method in named, method in ours
            axis.plot(
                *zip(*points, strict=True),
                marker=("o" if mine else "x") if leads else None,
                color=colours(named.index(method) % 10) if leads else "0.8",
                linestyle="-" if mine else "--",
                linewidth=3 if method == highlight else 1.4 if leads else 0.8,
                markersize=5,
                label=method if leads else f"{len(others)} others" if method == others[0] else None,
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
