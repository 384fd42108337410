"""Figures on disk: a cell per sample, filled method by method; what each was, and by which versions measured."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from analysis.tools.store import Store
from centroidkv.errors import EvaluationError


def label(method: str, budget: float) -> str:
    """The key of one method at one budget in a sample's cell."""
    return f"{method}@{budget:g}"


def method_and_budget(label: str) -> tuple[str, float]:
    """What :func:`label` made it of."""
    method, _, budget = label.rpartition("@")
    return method, float(budget)


class Figures(Store):
    """A store whose cells ``task/index`` hold figures by ``method@budget``.

    Methods join a cell at different times, so the file says of every figure by which versions it was measured
    (``"environment": {label: index into "environments"}``), and of every label what the method was
    (``"methods": {label: description}``), since names stay when settings change.

    Args:
        path: JSON file, or None to keep nothing.
        settings: what all figures of a file share.
        versions: of further packages that figures depend on, beside those of :func:`analysis.tools.store.environment`.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any], versions: dict[str, str] | None = None) -> None:
        self.environments: list[dict[str, str]] = []
        self.methods: dict[str, str] = {}
        super().__init__(path, settings)
        self.environment |= versions or {}

    def _load(self, found: dict[str, Any]) -> None:
        if "methods" not in found:
            raise EvaluationError(f"{self.path} does not say what its methods were (earlier format); use another")
        super()._load(found)
        self.environments, self.methods = found["environments"], found["methods"]

    def _content(self) -> dict[str, Any]:
        return {**super()._content(), "environments": self.environments, "methods": self.methods}

    def known(self, key: str) -> dict[str, Any]:
        """Figures of a cell by label; empty if there are none."""
        return self.cells[key]["figures"] if key in self.cells else {}

    def forget(self, labels: Collection[str]) -> None:
        """Drop all figures of these labels, so that they are measured anew; the file changes with the next figure."""
        for label in labels:
            self.methods.pop(label, None)
            for cell in self.cells.values():
                cell["figures"].pop(label, None)
                cell["environment"].pop(label, None)

    def describe(self, methods: dict[str, str]) -> None:
        """Say what the methods to come are, by label.

        Raises:
            EvaluationError: the file has figures of another method of that name.
        """
        changed = [label for label, what in methods.items() if self.methods.get(label, what) != what]
        if changed:
            names = sorted({method_and_budget(label)[0] for label in changed})
            raise EvaluationError(
                f"{self.path} holds figures of {names} as they were ({self.methods[changed[0]]}; now "
                f"{methods[changed[0]]}): measure them anew, --again {' '.join(map(repr, names))}, or use another file"
            )
        self.methods |= methods

    def add(self, key: str, figures: dict[str, Any]) -> None:
        """Add figures by label to those of a cell, and write the file."""
        if self.environment not in self.environments:
            self.environments.append(self.environment)
        mine = self.environments.index(self.environment)
        cell = self.cells.setdefault(key, {"figures": {}, "environment": {}})
        cell["figures"] |= figures
        cell["environment"] |= dict.fromkeys(figures, mine)
        self.write()
