"""Tables of what was measured."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap

from analysis.fidelity.ablations import ABLATIONS
from analysis.fidelity.clusterings import CLUSTERINGS
from analysis.fidelity.tasks import TASKS
from centroidkv import presets
from centroidkv.cli.demo import format_table

OURS = frozenset({*presets.ALL, *CLUSTERINGS, *ABLATIONS})
"""What is ours among the methods; the rest are presses."""

HIGHLIGHT = "balanced"
"""The preset that is held against the presses."""

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


def _cell(values: list[float] | None, most: int) -> str:
    """Mean and interval, and the number of samples if others have more."""
    if not values:
        return "-"
    low, high = interval(values)
    fewer = f", {len(values)} samples" if len(values) < most else ""
    return f"{_number(float(np.mean(values)))} [{_number(low)}, {_number(high)}]{fewer}"


def columns_of(rows: list[Row]) -> list[tuple[str, str]]:
    """(task, figure) of every column there are figures for."""
    tasks = {row.task for row in rows}
    return [(task, figure) for task in TASKS if task in tasks for figure in COLUMNS.get(task, ("nll", "kl"))]


def printed(rows: list[Row]) -> str:
    """All that is to be said of the rows: the tables by budget, and how far ours is from the best press."""
    return "\n\n".join(filter(None, (table(rows), differences(rows))))


def table(rows: list[Row]) -> str:
    """Per budget, all methods by their needle NLL (or the first figure), means with 95 % intervals.

    More than WIDEST columns become a table per figure.
    """
    found = grouped(rows)
    columns = columns_of(rows)
    most = {column: max((len(v) for key, v in found.items() if key[2:] == column), default=0) for column in columns}
    parts = [columns]
    if len(columns) > WIDEST:
        figures = dict.fromkeys(figure for _, figure in columns)
        parts = [[column for column in columns if column[1] == figure] for figure in figures]
    blocks = []
    for budget in sorted({row.budget for row in rows}, reverse=True):
        methods = {row.method for row in rows if row.budget == budget}
        here = max(len(values) for key, values in found.items() if key[1] == budget)
        blocks.append(f"{budget:.1%} of the bytes, {here} samples".replace(".0%", "%"))
        blocks += [_of_budget(found, budget, methods, part, most) for part in parts]
    return "\n\n".join(blocks)


def _of_budget(
    found: dict[tuple[str, float, str, str], list[float]], budget: float, methods: Iterable[str],
    columns: list[tuple[str, str]], most: dict[tuple[str, str], int],
) -> str:  # fmt: skip
    """A table of one budget, its methods by the first column."""

    def rank(method: str) -> tuple[float, str]:
        return float(np.mean(found.get((method, budget, *columns[0]), [np.inf]))), method

    body = [
        (method, *(_cell(found.get((method, budget, *column)), most[column]) for column in columns))
        for method in sorted(methods, key=rank)
    ]
    return format_table(("method", *map(_title, columns)), body)


def _title(column: tuple[str, str]) -> str:
    task, figure = column
    return f"{task} {figure.upper() if figure != 'exact' else figure}"


def differences(rows: list[Row], mine: str = HIGHLIGHT, ours: frozenset[str] = OURS) -> str:
    """Per budget and figure: ``mine`` minus the press whose mean is best, pair by pair; empty without presses.

    The press is the best of those that were measured on every sample that ``mine`` was; the interval is the bootstrap's
    over samples of the differences, so what makes one sample harder than another does not widen it.
    """
    by_sample: dict[tuple[float, str, str], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        by_sample[row.budget, row.task, row.figure][row.method][row.index] = row.value
    body = []
    for budget in sorted({row.budget for row in rows}, reverse=True):
        for column in columns_of(rows):
            found = by_sample[budget, *column]
            own = found.get(mine, {})
            presses = {name: v for name, v in found.items() if name not in ours and own.keys() <= v.keys()}
            if not own or not presses:
                continue
            better = max if column[1] == "exact" else min
            means = {name: float(np.mean([v[index] for index in own])) for name, v in presses.items()}
            best = better(sorted(means), key=means.__getitem__)
            paired = [own[index] - presses[best][index] for index in sorted(own)]
            low, high = interval(paired)
            gap = f"{_number(float(np.mean(paired)))} [{_number(low)}, {_number(high)}]"
            share = f"{budget:.1%}".replace(".0%", "%")
            body.append(
                (share, _title(column), best, _number(means[best]), _number(float(np.mean(list(own.values())))), gap)
            )
    if not body:
        return ""
    head = ("bytes", "figure", "best press", "its mean", mine, "difference, paired")
    return f"{mine} minus the best press\n\n" + format_table(head, body)
