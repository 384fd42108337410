"""What a model still knows after its cache was compressed: every preset, and every kvpress press that is installed.

python -m analysis.fidelity --model smollm2 --texts heldout --samples 40 --results results/fidelity.json

Two protocols, never in one table: query-agnostic (the context is compressed before the question is known) and
query-aware (the question is part of what is compressed). All methods get the same bytes. An interrupted run goes on
where it stopped if it is given the same ``--results``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from analysis.fidelity import leaderboard, report
from analysis.fidelity.ablations import ABLATIONS, COMPARED
from analysis.fidelity.clusterings import CLUSTERINGS
from analysis.fidelity.contenders import FULL, Contender, all_contenders, full_states
from analysis.fidelity.prefill import cache_of, prefill, read
from analysis.fidelity.score import measure
from analysis.fidelity.tasks import TASKS, Maker, Sample
from analysis.fidelity.texts import SPLITS, help_topics, load_texts
from analysis.store import Store
from centroidkv import presets
from centroidkv.integrations.transformers.models import PACKAGED, load_named

DEFAULT_TASKS = ("needle_number", "prose")
PROTOCOLS = ("agnostic", "aware")


def label(contender: str, budget: float) -> str:
    """The key of one method at one budget in a sample's cell."""
    return f"{contender}@{budget:g}"


def run_sample(
    model: Any, sample: Sample, contenders: list[Contender], budgets: list[float], known: dict[str, Any]
) -> dict[str, Any]:
    """Figures by ``method@budget`` of all contenders on one sample; those in ``known`` are not measured again."""
    missing = [(c, b) for c in contenders for b in budgets if label(c.name, b) not in known]
    if not missing:
        return known
    filled = prefill(model, sample.context)
    full = read(model, cache_of(model, filled, full_states(filled)), sample.tail)
    figures = {**known, label(FULL, 1): measure(sample, full, full)}
    for contender, budget in missing:
        states = contender.states(model, filled, budget)
        held = sum(contender.bytes_of(state) for state in states)
        logits = read(model, cache_of(model, filled, states), sample.tail)
        figures[label(contender.name, budget)] = {**measure(sample, logits, full), "bytes": held / filled.bytes_full}
    return figures


def main() -> None:
    """Measure, or only report what a results file holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help=f"one of {sorted(PACKAGED)}, or a model folder")
    parser.add_argument("--texts", choices=(*SPLITS, "topics"), default="topics")
    parser.add_argument("--tasks", nargs="+", choices=sorted(TASKS), default=list(DEFAULT_TASKS))
    parser.add_argument("--protocol", choices=PROTOCOLS, default="agnostic")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.25, 0.125])
    parser.add_argument("--methods", nargs="+", help="only these (default: all presets, clusterings and presses)")
    parser.add_argument("--without", nargs="+", default=[], help="all but these")
    parser.add_argument("--ablation", action="store_true", help="the default preset without one of its parts each")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--length", type=int, default=1500, help="tokens of a context")
    parser.add_argument("--results", type=Path, help="JSON file to write and to go on from")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--leaderboard", type=Path, help="folder for kvpress-leaderboard result folders")
    parser.add_argument("--report-only", action="store_true", help="measure nothing, report --results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
    settings = {key: getattr(options, key) for key in ("model", "texts", "protocol", "length", "samples")}
    store = Store(options.results, settings)
    if not options.report_only:
        measure_all(options, store)
    rows = report.flatten(store.cells)
    if options.picture:
        report.plot(rows, options.picture, ours={*presets.ALL, *CLUSTERINGS}, highlight="balanced")
    if options.leaderboard:
        leaderboard.write(rows, options.leaderboard, settings)
    print(
        f"{options.model}, {options.protocol} protocol, texts: {options.texts}, about {options.length} tokens; "
        f"mean over samples [95 % bootstrap interval]\n"
    )
    print(report.table(rows, [task for task in TASKS if any(row.task == task for row in rows)]))


def chosen(contenders: list[Contender], wanted: Collection[str] | None, without: Collection[str]) -> list[Contender]:
    """Those that are wanted, by default all but the ablations, without some; unknown names end the program."""
    names = [contender.name for contender in contenders]
    unknown = {*(wanted or ()), *without} - set(names)
    if unknown:
        sys.exit(f"unknown methods {sorted(unknown)}; known here: {names}")
    wanted = wanted or set(names) - set(ABLATIONS)
    return [contender for contender in contenders if contender.name in wanted and contender.name not in without]


def measure_all(options: argparse.Namespace, store: Store) -> None:
    """Every task and sample that the store does not hold in full."""
    contenders = chosen(all_contenders(), COMPARED if options.ablation else options.methods, options.without)
    model, tokenizer = load_named(options.model, torch.float32)
    texts = help_topics() if options.texts == "topics" else load_texts(options.texts)
    maker = Maker(tokenizer, texts, options.length)
    todo = [(task, index) for index in range(options.samples) for task in options.tasks]
    for task, index in tqdm(todo, file=sys.stderr):
        key = f"{task}/{index}"
        known = store[key]["figures"] if key in store else {}
        sample = maker.make(task, index, options.samples)
        sample = sample.aware() if options.protocol == "aware" else sample
        figures = run_sample(model, sample, contenders, options.budgets, known)
        if figures is not known:
            store.add(key, {"figures": figures})


if __name__ == "__main__":
    main()
