"""What a model still knows after its cache was compressed: every preset, and every kvpress press that is installed.

python -m analysis fidelity --model smollm2 --texts heldout --samples 40 --results results/fidelity.json

Two protocols, never in one table: query-agnostic (the context is compressed before the question is known) and
query-aware (the question is part of what is compressed). All methods get the same bytes. An interrupted run goes on
where it stopped if it is given the same ``--results``, and what is printed is all that this file holds.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from analysis.evaluation.fidelity import leaderboard, picture, presses, report
from analysis.evaluation.fidelity.ablations import ABLATIONS, COMPARED
from analysis.evaluation.fidelity.contenders import FULL, Contender, all_contenders, full_states
from analysis.evaluation.fidelity.figures import Figures, label
from analysis.evaluation.fidelity.prefill import cache_of, prefill, read
from analysis.evaluation.fidelity.score import measure
from analysis.evaluation.fidelity.tasks import TASKS, Maker, Sample
from analysis.evaluation.fidelity.texts import SPLITS, help_topics, load_texts
from centroidkv.errors import EvaluationError
from centroidkv.integrations.transformers.models import PACKAGED, load_named

DEFAULT_TASKS = {"agnostic": ["needle_number", "prose"], "aware": ["needle_number"]}
"""By protocol; prose asks nothing, so it has no query-aware form."""

TOLERATED = 1.005
"""Times its share that a method may hold: PyramidKV rounds the slots of its layers."""


def run_sample(
    model: Any, sample: Sample, contenders: list[Contender], budgets: list[float], known: dict[str, Any]
) -> dict[str, Any]:
    """Figures by ``method@budget`` of all contenders on one sample that are not in ``known``.

    Raises:
        EvaluationError: a method holds more bytes than its share.
    """
    missing = [(c, b) for c in contenders for b in budgets if label(c.name, b) not in known]
    if not missing:
        return {}
    filled = prefill(model, sample.context)
    full = read(model, cache_of(model, filled, full_states(filled)), sample.tail)
    figures = {} if label(FULL, 1) in known else {label(FULL, 1): measure(sample, full, full)}
    for contender, budget in missing:
        states = contender.states(model, filled, budget)
        held = sum(contender.bytes_of(state) for state in states)
        if held > budget * TOLERATED * filled.bytes_full:
            raise EvaluationError(
                f"{contender.name} holds {held} bytes of {filled.bytes_full} where {budget:g} of them were asked for: "
                f"its figures would not be comparable"
            )
        logits = read(model, cache_of(model, filled, states), sample.tail)
        figures[label(contender.name, budget)] = {**measure(sample, logits, full), "bytes": held / filled.bytes_full}
    return figures


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; those that would be ignored are refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help=f"one of {sorted(PACKAGED)}, or a model folder")
    parser.add_argument("--texts", choices=(*SPLITS, "topics"), default="topics")
    parser.add_argument("--tasks", nargs="+", choices=sorted(TASKS))
    parser.add_argument("--protocol", choices=sorted(DEFAULT_TASKS), default="agnostic")
    parser.add_argument("--budgets", type=float, nargs="+", help="shares of the bytes (default: .5 .25 .125)")
    parser.add_argument("--methods", nargs="+", help="only these (default: all presets, clusterings and presses)")
    parser.add_argument("--without", nargs="+", default=[], help="all but these")
    parser.add_argument("--again", nargs="+", default=[], help="these anew, though --results has them")
    parser.add_argument("--ablation", action="store_true", help="the default preset without one of its parts each")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--length", type=int, default=1500, help="tokens of a context")
    parser.add_argument("--results", type=Path, help="JSON file to write and to go on from")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--leaderboard", type=Path, help="folder for kvpress-leaderboard result folders")
    parser.add_argument("--report-only", action="store_true", help="measure nothing, report --results")
    options = parser.parse_args(arguments)
    measuring = ("tasks", "methods", "without", "again", "ablation")
    asked = [f"--{name}" for name in measuring if getattr(options, name)]
    if options.report_only and (asked or options.budgets):
        parser.error(f"--report-only reports all of --results; {asked or ['--budgets']} would be ignored")
    if options.report_only and not (options.results and options.results.exists()):
        parser.error(f"--report-only needs --results that exist, got {options.results}")
    if options.ablation and options.methods:
        parser.error("--ablation names its methods itself; --methods would be ignored")
    options.tasks = options.tasks or DEFAULT_TASKS[options.protocol]
    if options.protocol == "aware" and "prose" in options.tasks:
        parser.error("prose asks nothing, so it has no query-aware form")
    options.budgets = options.budgets or [0.5, 0.25, 0.125]
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or only report what a results file holds."""
    options = parse(arguments)
    warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
    settings = {key: getattr(options, key) for key in ("model", "texts", "protocol", "length", "samples")}
    store = Figures(options.results, settings, {"kvpress": version("kvpress")} if presses.AVAILABLE else None)
    if not options.report_only:
        measure_all(options, store)
    rows = report.flatten(store.cells)
    print(
        f"{options.model}, {options.protocol} protocol, texts: {options.texts}, about {options.length} tokens; "
        f"mean over samples [95 % bootstrap interval]\n"
    )
    print(report.printed(rows))
    if options.picture:
        picture.plot(rows, options.picture)
    if options.leaderboard:
        leaderboard.write(rows, options.leaderboard, settings)


def chosen(contenders: list[Contender], wanted: Collection[str] | None, without: Collection[str]) -> list[Contender]:
    """Those that are wanted, by default all but the ablations, without some; unknown names end the program."""
    names = [contender.name for contender in contenders]
    unknown = {*(wanted or ()), *without} - set(names)
    if unknown:
        sys.exit(f"unknown methods {sorted(unknown)}; known here: {names}")
    wanted = wanted or set(names) - set(ABLATIONS)
    return [contender for contender in contenders if contender.name in wanted and contender.name not in without]


def measure_all(options: argparse.Namespace, store: Figures) -> None:
    """Every task and sample that the store does not hold in full."""
    contenders = chosen(all_contenders(), COMPARED if options.ablation else options.methods, options.without)
    again = chosen(contenders, options.again, ()) if options.again else []
    store.forget([label(c.name, budget) for c in again for budget in options.budgets])
    store.describe({label(c.name, budget): c.described(budget) for c in contenders for budget in options.budgets})
    model, tokenizer = load_named(options.model, torch.float32)
    texts = help_topics() if options.texts == "topics" else load_texts(options.texts)
    maker = Maker(tokenizer, texts, options.length)
    todo = [(task, index) for index in range(options.samples) for task in options.tasks]
    for task, index in tqdm(todo, file=sys.stderr):
        key = f"{task}/{index}"
        sample = maker.make(task, index)
        sample = sample.aware() if options.protocol == "aware" else sample
        figures = run_sample(model, sample, contenders, options.budgets, store.known(key))
        if figures:
            store.add(key, figures)


if __name__ == "__main__":
    main()
