"""Result folders in the layout of kvpress's evaluation, so that its leaderboard tools read ours.

One folder per (dataset, model, method, ratio), named ``dataset__data_dir__model__method__ratio``, holding
``config.yaml`` and ``metrics.json``; kvpress's ratio is the share that was removed, with two digits where two say it.
The query-aware protocol ends the name, as in kvpress, with ``__query_aware``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from analysis.evaluation.fidelity.contenders import FULL
from analysis.evaluation.fidelity.report import Row, grouped


def write(rows: list[Row], folder: Path, settings: dict[str, Any]) -> list[Path]:
    """Write the folders and return them. A task's score is its exact-answer share in per cent, as RULER's is."""
    by_run: dict[tuple[str, float], dict[str, list[float]]] = {}
    for (method, budget, task, figure), values in grouped(rows).items():
        if figure == "exact":
            by_run.setdefault((method, budget), {})[task] = values
    folders = []
    for (method, budget), exact in sorted(by_run.items()):
        scores = {task: {"string_match": round(100 * float(np.mean(values)), 2)} for task, values in exact.items()}
        ratio = round(1 - budget, 4)
        press = "no_press" if method == FULL else method.replace(" ", "_")
        digits = f"{ratio:.2f}" if round(ratio, 2) == ratio else f"{ratio:g}"
        parts = ["fidelity", str(settings["length"]), Path(str(settings["model"])).name, press, digits]
        target = folder / "__".join(parts + ["query_aware"] * (settings["protocol"] == "aware"))
        target.mkdir(parents=True, exist_ok=True)
        (target / "metrics.json").write_text(json.dumps(scores, indent=4) + "\n")
        config = {
            "dataset": "fidelity",
            "data_dir": str(settings["length"]),
            "model": str(settings["model"]),
            "press_name": press,
            "compression_ratio": ratio,
            "query_aware": settings["protocol"] == "aware",
            "samples": min(map(len, exact.values())),
        }
        # Scalars as JSON are YAML too, so no YAML library is needed to write them.
        (target / "config.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in config.items()))
        folders.append(target)
    return folders
