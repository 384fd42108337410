"""``python -m tools.fuzz``: random cases for some seconds, in a process of their own that is looked after from here."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
SUBJECTS = ("life", "pool", "back_ends")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--cases", type=int, default=0, help="stop after so many cases; 0: only the time counts")
    parser.add_argument("--seed", type=int, help="of the whole run; case N of a seed is always the same (default: new)")
    parser.add_argument(
        "--start", type=int, default=0, help="the first case's number: to run one again, with --cases 1"
    )
    parser.add_argument("--subjects", nargs="+", default=SUBJECTS, choices=SUBJECTS, help="what to fuzz (default: all)")
    parser.add_argument("--out", help="folder for failing scripts (default: a new temporary one)")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds to spend on making a case small")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds after which a case counts as hanging")
    parser.add_argument("--threads", type=int, default=2, help="PyTorch's threads, 2 so that lost ones are seen")
    parser.add_argument("--refusals", action="store_true", help="list every named refusal that was met, and how often")
    parser.add_argument("--known", nargs="*", default=[], help="signatures that are counted, not shrunk again")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    options.seed = int(time.time()) if options.seed is None else options.seed
    options.out = options.out or tempfile.mkdtemp(prefix="centroidkv-fuzz-")
    return options


def main(given: list[str] | None = None) -> int:
    """Run workers until the time is over; returns 1 if anything was found."""
    options = arguments(given)
    if options.worker:
        from tools.fuzz.work import Worker

        Worker(options).run()
        return 0
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("found.jsonl", "report.json", "now.json"):
        (folder / name).unlink(missing_ok=True)
    print(f"seed {options.seed}, {options.seconds:.0f} s, scripts in {folder}", flush=True)
    end, reports = time.monotonic() + options.seconds, []
    while (left := end - time.monotonic()) > 1:
        report = _worker(options, folder, left)
        if report is not None:
            reports.append(report)
            break
    return _account(options, folder, reports)


def _worker(options: argparse.Namespace, folder: Path, seconds: float) -> dict[str, Any] | None:
    """One worker; its report, or None if it died or hung, which is a finding of its own."""
    command = [
        *(sys.executable, "-m", "tools.fuzz", "--worker", "--seconds", str(seconds), "--seed", str(options.seed)),
        *("--start", str(options.start), "--cases", str(options.cases), "--out", str(folder)),
        *("--shrink", str(options.shrink), "--threads", str(options.threads), "--subjects", *options.subjects),
        *(["--known", *options.known] if options.known else []),
    ]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    now, born, hangs = folder / "now.json", time.time(), False
    try:
        while process.poll() is None:
            time.sleep(0.2)
            moved = now.stat().st_mtime if now.exists() else born
            if time.time() - max(moved, born) > options.patience:
                hangs = True
                process.kill()
                process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode == 0:
        return dict(json.loads((folder / "report.json").read_text()))
    from tools.fuzz.drive import Failure
    from tools.fuzz.work import keep, read_case

    what = f"no answer for {options.patience:.0f} s" if hangs else f"the process ended with status {process.returncode}"
    last = read_case(folder)
    if last is None:
        raise SystemExit(f"{what}, before its first case")
    number, case = last
    path = keep(folder, number, case, Failure("hang" if hangs else "crash", what, 0), options.threads)
    print(f"case {number}: {what}\n  {path} (not made smaller)", flush=True)
    options.start = number + 1
    now.unlink()
    return None


def _account(options: argparse.Namespace, folder: Path, reports: list[dict[str, Any]]) -> int:
    lines = folder / "found.jsonl"
    found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    again: Counter[str] = Counter()
    for report in reports:
        again.update(report["again"])
        of = ", ".join(f"{count} {name}" for name, count in report["subjects"].items())
        print(f"{report['cases']} cases ({of}), {report['operations']} operations; {report['line']}")
        print(f"{sum(report['refusals'].values())} named refusals of {len(report['refusals'])} kinds")
        if options.refusals:
            for text, count in sorted(report["refusals"].items(), key=lambda item: -item[1]):
                print(f"  {count:6} {text}")
        if report["growth"]:
            print(f"GROWTH: {report['growth']}")
    for one in found:
        print(f"FAILED {one['signature']} (met {max(again[one['signature']], 1)} times)\n  {one['script']}")
    grown = any(report["growth"] for report in reports)
    print("nothing found" if not found and not grown else f"{len(found)} failures")
    return int(bool(found or grown))


if __name__ == "__main__":
    sys.exit(main())
