"""The process that runs cases: it writes down each before it runs it, so that one which ends the process is known."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from tools.fuzz.draw import Case, draw
from tools.fuzz.drive import Failure, plain_words, run
from tools.fuzz.script import write
from tools.fuzz.shrink import shrink
from tools.fuzz.watch import Watch

NOW, FOUND, REPORT = "now.json", "found.jsonl", "report.json"
"""Files in the folder of a run: the case being run, what was found so far, and the end's account."""


def case_of(seed: int, number: int, subjects: tuple[str, ...]) -> Case:
    """Case ``number`` of a run, whatever came before it."""
    return draw(Random(f"{seed}/{number}"), subjects)


def read_case(folder: Path) -> tuple[int, Case] | None:
    """Number and case that were being run."""
    try:
        told = json.loads((folder / NOW).read_text())
    except (OSError, ValueError):
        return None
    operations = tuple((name, _tuples(given)) for name, given in told["operations"])
    return told["number"], Case(told["subject"], _tuples(told["options"]), operations)


def _tuples(given: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def keep(folder: Path, number: int, case: Case, failure: Failure, threads: int, prelude: str = "") -> Path:
    """Write the script of a failing case, and a line about it; returns the script's path."""
    path = folder / f"case_{number}.py"
    path.write_text(write(case, f"{failure.sort}: {failure.message}", prelude, threads))
    line = {"number": number, "script": str(path), "signature": failure.signature, **asdict(failure)}
    with (folder / FOUND).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return path


class Worker:
    """Runs cases from ``start`` on until the time is over, and shrinks the first of every signature."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, Path(options.out)
        self.known: set[str] = set(options.known)
        self.again: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.subjects: Counter[str] = Counter()
        self.cases = self.operations = 0
        self.watch = Watch(options.seconds)

    def run(self) -> None:
        """The whole run; leaves a report."""
        torch.set_num_threads(self.options.threads)
        end = time.monotonic() + self.options.seconds
        number = self.options.start
        while time.monotonic() < end and (not self.options.cases or self.cases < self.options.cases):
            self.one(number, end)
            number += 1
            self.watch.look()
        report = {
            "cases": self.cases, "operations": self.operations, "subjects": self.subjects, "again": self.again,
            "refusals": self.refusals, "growth": self.watch.growth(), "line": self.watch.line(),
        }  # fmt: skip
        (self.folder / REPORT).write_text(json.dumps(report))

    def one(self, number: int, end: float) -> None:
        """Run case ``number``."""
        case = case_of(self.options.seed, number, tuple(self.options.subjects))
        outcome = self._run(number, case)
        self.cases += 1
        self.operations += outcome.operations
        self.subjects[case.subject] += 1
        for refusal in outcome.refusals:
            self.refusals[plain_words(refusal)[:160]] += 1
        if outcome.failure is None:
            return
        wanted = outcome.failure.signature
        self.again[wanted] += 1
        if wanted in self.known:
            return
        self.known.add(wanted)
        case = replace(case, operations=case.operations[: outcome.failure.operation + 1])
        latest = [outcome.failure]

        def fails(smaller: Case) -> bool:
            failure = self._run(number, smaller).failure
            if failure is None or failure.signature != wanted:
                return False
            latest[0] = failure
            return True

        case = shrink(case, fails, min(self.options.shrink, max(end - time.monotonic(), 20.0)))
        path = keep(self.folder, number, case, latest[0], self.options.threads)
        print(f"case {number}: {latest[0].sort}: {latest[0].message[:300]}\n  {path}", flush=True)

    def _run(self, number: int, case: Case) -> Any:
        (self.folder / NOW).write_text(json.dumps({"number": number, **asdict(case)}))
        return run(case)
