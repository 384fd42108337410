"""The integration tests in one virtual environment per transformers release, and a table of the results.

    python tools/compat.py [release ...] [--environments FOLDER] [--report FILE]

Environments are made where they are missing and kept (``.venv-compat/`` by default). The table holds, per situation of
tests/integrations/test_matrix.py and release, what became of all its models: how many passed, were refused or are not
there, with the reasons below; and per test file how many tests passed. Ends with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELEASES = ("4.57.6", "5.2.0", "5.17.0", "5.24.0")
"""The oldest that is supported, the newest that kvpress takes, and one before and after caches hand degrees on."""

FILES = (
    "test_matrix.py",
    "test_attention_routes.py",
    "test_interruptions.py",
    "test_switching.py",
    "test_masks.py",
    "test_saving.py",
    "test_storage_in_the_cache.py",
    "test_allocation_in_the_cache.py",
    "test_transformers_cache.py",
    "test_queries_in_the_cache.py",
    "test_rope.py",
    "test_must_hold.py",
)


@dataclass
class Result:
    """What one release's run said."""

    files: dict[str, Counter[str]] = field(default_factory=dict)
    cells: dict[str, Counter[str]] = field(default_factory=dict)
    reasons: dict[str, None] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def constraint(package: str) -> str:
    """``package==version`` as constraints.txt states it."""
    found = re.search(rf"^{package}==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"constraints.txt names no version of {package}")
    return found[0]


def environment(folder: Path, release: str) -> Path:
    """The Python of an environment with this release, made if it is missing."""
    home = folder / release
    python = home / "bin" / "python"
    if not (home / ".ready").exists():
        print(f"making {home}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        packages = [*map(constraint, ("torch", "numpy", "accelerate", "pytest", "hypothesis"))]
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *packages, f"transformers=={release}"], check=True)
        (home / ".ready").touch()
    return python


def run(python: Path, report: Path, extra: list[str]) -> Result:
    """Run the tests; read pytest's XML report, in which the matrix notes its rows and refusals."""
    tests = [str(ROOT / "tests" / "integrations" / name) for name in FILES]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={report}"]
    done = subprocess.run([*command, *tests, *extra], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if not report.exists():
        raise SystemExit(f"{python} ended with {done.returncode} and left no report")
    result = Result()
    if done.returncode not in (0, 1):
        result.failures.append(f"pytest ended with {done.returncode}")
    for case in ElementTree.parse(report).iter("testcase"):
        told = {note.get("name", ""): note.get("value", "") for note in case.iter("property")}
        skipped = case.find("skipped")
        broken = case.find("failure") is not None or case.find("error") is not None
        outcome = "failed" if broken else "skipped" if skipped is not None else "passed"
        name = case.get("classname", "").rsplit(".", 1)[-1] or "collection"
        result.files.setdefault(name, Counter())[outcome] += 1
        where = told.get("row", name)
        if broken:
            result.failures.append(f"{case.get('classname')}::{case.get('name')}")
        if skipped is not None:
            result.reasons[f"skipped  {where}: {skipped.get('message', '').removeprefix('Skipped: ')}"] = None
        if "refused" in told:
            outcome = "refused"
            result.reasons[f"refused  {where}: {told['refused']}"] = None
        if "refused model" in told:
            result.reasons[f"refused  {told['refused model']}"] = None
        if "row" in told:
            result.cells.setdefault(told["row"], Counter())[outcome] += 1
    return result


def table(results: dict[str, Result]) -> str:
    """The results as text."""
    lines = [f"{'':28}" + "".join(f"{release:>22}" for release in results)]
    for title, part in (("situations, all models", "cells"), ("test files", "files")):
        lines.append(title)
        for row in dict.fromkeys(row for result in results.values() for row in getattr(result, part)):
            told = [_spell(getattr(result, part).get(row)) for result in results.values()]
            lines.append(f"  {row:26}" + "".join(f"{text:>22}" for text in told))
    for release, result in results.items():
        lines += ["", f"transformers {release}: {'FAILED' if result.failures else 'passed'}"]
        lines += [f"  FAILED   {name}" for name in result.failures]
        lines += [f"  {reason:.180}" for reason in result.reasons]
    return "\n".join(lines)


def _spell(counts: Counter[str] | None) -> str:
    """``7 +, 2 refused``: + passed, - not there."""
    if not counts:
        return "-"
    short = {"passed": "+", "skipped": "-", "failed": "FAILED", "refused": "refused"}
    return ", ".join(f"{counts[kind]} {name}" for kind, name in short.items() if counts[kind])


def main() -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", default=list(RELEASES), help=f"default: {' '.join(RELEASES)}")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-compat", help="where they are kept")
    parser.add_argument("--report", type=Path, help="write the table to this file as well")
    parser.add_argument("--pytest", default="", help="more arguments for pytest, in one string")
    options = parser.parse_args()
    results = {}
    for release in options.releases:
        print(f"== transformers {release}", flush=True)
        python = environment(options.environments, release)
        report = options.environments / f"report-{release}.xml"
        report.unlink(missing_ok=True)
        results[release] = run(python, report, options.pytest.split())
    text = table(results)
    print(text)
    if options.report:
        options.report.write_text(text + "\n")
    return int(any(result.failures for result in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
