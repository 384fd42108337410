"""Tables of what was measured."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap

from analysis.evaluation.fidelity.contenders import OURS
from analysis.evaluation.fidelity.figures import method_and_budget
from analysis.evaluation.fidelity.tasks import TASKS
from centroidkv.cli.demo import format_table

HIGHLIGHT = "balanced"
"""The preset that is held against the presses."""

COLUMNS = {"needle_number": ("nll", "exact", "kl"), "prose": ("kl",)}
"""Figures shown of a task; of all others ``("nll", "kl")``."""

WIDEST = 6
"""Columns of figures that one table shows."""


Grouped = dict[tuple[str, float, str, str], list[float]]
"""Values of all samples by (method, budget, task, figure)."""


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
            method, budget = method_and_budget(label)
            rows += [Row(method, budget, task, name, int(index), value) for name, value in figures.items()]
    return rows


def grouped(rows: Iterable[Row]) -> Grouped:
    """Values of all samples by (method, budget, task, figure)."""
    found: Grouped = defaultdict(list)
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


def _percent(budget: float) -> str:
    return f"{budget:.1%}".replace(".0%", "%")


def _mean(values: list[float]) -> str:
    """Mean and interval."""
    low, high = interval(values)
    return f"{_number(float(np.mean(values)))} [{_number(low)}, {_number(high)}]"


def _cell(values: list[float] | None, most: int) -> str:
    """Mean and interval, and the number of samples if others have more."""
    if not values:
        return "-"
    return _mean(values) + (f", {len(values)} samples" if len(values) < most else "")


def samples_of(found: Grouped) -> dict[tuple[str, str], int]:
    """By (task, figure) of grouped rows, the most samples that any method has at any budget."""
    most: dict[tuple[str, str], int] = defaultdict(int)
    for (_, _, task, figure), values in found.items():
        most[task, figure] = max(most[task, figure], len(values))
    return most


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
    most = samples_of(found)
    parts = [columns]
    if len(columns) > WIDEST:
        figures = dict.fromkeys(figure for _, figure in columns)
        parts = [[column for column in columns if column[1] == figure] for figure in figures]
    blocks = []
    for budget in sorted({row.budget for row in rows}, reverse=True):
        methods = {row.method for row in rows if row.budget == budget}
        here = max(len(values) for key, values in found.items() if key[1] == budget)
        blocks.append(f"{_percent(budget)} of the bytes, {here} samples")
        blocks += [_of_budget(found, budget, methods, part, most) for part in parts]
    return "\n\n".join(blocks)


def _of_budget(
    found: Grouped, budget: float, methods: Iterable[str],
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


def differences(rows: list[Row], mine: str = HIGHLIGHT, ours: Collection[str] = OURS) -> str:
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
            own_mean = float(np.mean(list(own.values())))
            body.append(
                (_percent(budget), _title(column), best, _number(means[best]), _number(own_mean), _mean(paired))
            )
    if not body:
        return ""
    head = ("bytes", "figure", "best press", "its mean", mine, "difference, paired")
    return f"{mine} minus the best press\n\n" + format_table(head, body)
