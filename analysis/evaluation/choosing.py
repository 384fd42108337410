"""What to choose, in one table: two tasks on two models, from the figures that ``fidelity`` stored.

python -m analysis choosing analysis/results/fidelity_smollm2.json analysis/results/fidelity_gemma3-270m.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from analysis.evaluation.fidelity.contenders import FULL, OURS
from analysis.evaluation.fidelity.report import Grouped, flatten, grouped
from centroidkv.cli.demo import format_table
from centroidkv.errors import EvaluationError

SHOWN = (FULL, "balanced", "centroidkv", "Compactor", "LeverageScore", "ExpectedAttention", "SnapKV")
COLUMNS = (("needle_number", "nll", "needle NLL", 2), ("prose", "kl", "prose KL", 3))


def line(method: str, files: Sequence[Grouped], budgets: Sequence[float]) -> tuple[str, ...]:
    """A method's means over the budgets, task by task and file by file.

    Raises:
        EvaluationError: a file lacks one of them.
    """
    cells = []
    for found in files:
        for task, figure, title, digits in COLUMNS:
            shares = [1.0] if method == FULL else budgets
            missing = [share for share in shares if (method, share, task, figure) not in found]
            if missing:
                raise EvaluationError(f"no {title} of {method} at {missing} of the bytes; measure it: make fidelity")
            means = [float(np.mean(found[method, share, task, figure])) for share in shares]
            cells.append(" / ".join(f"{mean:.{digits}f}" for mean in means))
    return (f"`{method}`" if method in OURS else method, *cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of fidelity, one per model")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.25, 0.125])
    options = parser.parse_args(arguments)
    stored = [json.loads(path.read_text()) for path in options.results]
    files = [grouped(flatten(each["cells"])) for each in stored]
    shares = " / ".join(f"{100 * budget:g}" for budget in options.budgets)
    print(f"means over samples; at {shares} % of the bytes\n")
    titles = [f"{each['settings']['model']}: {title}" for each in stored for _, _, title, _ in COLUMNS]
    body = [line(method, files, options.budgets) for method in SHOWN]
    print(format_table((f"{shares} % of the bytes", *titles), body))


if __name__ == "__main__":
    main()
