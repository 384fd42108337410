"""Every table and plot that the documents show, measured or drawn again by one command.

python -m analysis.tables                    # all of them; fidelity goes on from --results
python -m analysis.tables --results results  # all of them anew: a day of two cores
python -m analysis.tables --small            # all of them on tiny inputs, to see that they run
python -m analysis.tables --only 'bench_*'   # some

Each table is the output of one command, kept as ``RESULTS/tables/NAME.txt``; the command goes on after one that fails
and says at the end which did. What a document has between ``<!-- tables: NAME -->`` and ``<!-- end -->`` is that output
without its first paragraph; it is written anew when the figures are those in analysis/results.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.fidelity.texts import ADDRESSES
from analysis.splice import Documents
from centroidkv.cli.demo import format_table

ROOT = Path(__file__).resolve().parents[1]
QUIET = {"OMP_WAIT_POLICY": "passive"}
"""Threads that wait sleep: on a machine with other work, spinning is most of what would be measured."""


@dataclass(frozen=True)
class Table:
    """What one command prints and draws.

    ``arguments`` may name ``{results}``, ``{pictures}``, ``{texts}``, ``{essays}`` and ``{vllm}``; ``small`` follows
    them where the run is to be a small one, and the last of two equal options counts. ``needs`` is the environment that
    has what the command imports.
    """

    name: str
    command: str
    arguments: str = ""
    small: str = ""
    needs: str = "main"
    environment: Mapping[str, str] | None = None


def _fidelity(name: str, arguments: str, samples: int = 40, model: str = "smollm2") -> Table:
    return Table(
        name,
        "analysis.fidelity",
        f"--model {model} --texts {{texts}} --length 1000 --samples {samples} "
        f"--results {{results}}/{name}.json {arguments}",
        small="--length 600 --samples 2 --budgets 0.25",
        needs="peers",
    )


FEW = "balanced centroidkv quick distinctive Compactor LeverageScore SnapKV ExpectedAttention"
SIX = "balanced centroidkv Compactor LeverageScore SnapKV ExpectedAttention"
OTHERS = "needle_word needle_uuid multi_key multi_turn variable_tracking common_words"

TABLES = (
    Table("demo", "centroidkv.cli.main", "demo --picture {results}/demo.png", small="--tokens 1200"),
    Table("needle", "analysis.needle", small="--samples 1 --budgets 0.25"),
    _fidelity("fidelity_smollm2", "--without 'all pairs' --picture {pictures}/fidelity_smollm2.png"),
    _fidelity(
        "fidelity_gemma3-270m", f"--methods {SIX} --picture {{pictures}}/fidelity_gemma3-270m.png", model="gemma3-270m"
    ),
    _fidelity("tasks_smollm2", f"--methods {FEW} --tasks {OTHERS}"),
    _fidelity("aware_smollm2", f"--methods {FEW} --tasks needle_number --budgets 0.25 --protocol aware"),
    _fidelity("ablation_smollm2", "--ablation --budgets 0.25", samples=12),
    _fidelity(
        "clusterings_smollm2",
        "--methods centroidkv 'all pairs' kmeans 'random pairs' 'merge after eviction' --tasks prose --budgets 0.25",
        samples=12,
    ),
    Table(
        "ruler",
        "analysis.ruler",
        "--essays {essays} --samples 3 --presets full distinctive streaming_llm --budgets 0.25 "
        "--tasks niah_multikey_1 niah_multivalue niah_multiquery --output {results}/ruler.json",
        small="--samples 1 --presets full streaming_llm --tasks niah_single_1 --protocols query-agnostic",
    ),
    Table(
        "decode_quality",
        "analysis.decode_quality",
        "--presets balanced centroidkv streaming_llm --budgets 0.25 --free 0 --block 64 "
        "--json {results}/decode_quality.json --picture {pictures}/decode_quality.png",
        small="--prompt 320 --tokens 256 --window 128 --chats 1 --document 400",
    ),
    *(
        Table(
            f"similarity_{model}",
            "analysis.similarity",
            f"--model {model} --heatmap {{pictures}}/similarity_heatmap_{model}.png "
            f"--curves {{pictures}}/similarity_curves_{model}.png",
            small="--tokens 300 --longest 200",
        )
        for model in ("smollm2", "gemma3-270m")
    ),
    Table(
        "partition_optimality",
        "analysis.partition_optimality",
        "--picture {pictures}/partition_optimality.png",
        small="--tokens 320",
    ),
    Table("complexity", "analysis.complexity", small="--repeats 1"),
    Table("last_digits", "analysis.last_digits", small="--samples 1 --trials 1 --length 400 --presets quick"),
    Table(
        "attention_error",
        "analysis.attention_error",
        "--picture {pictures}/attention_error.png",
        small="--tokens 640",
    ),
    Table(
        "bench_round",
        "analysis.bench_round",
        "--json {results}/bench_round.json",
        small="--tokens 1024 2048 --slow 1024 --heads 2 --repeats 1",
        environment=QUIET,
    ),
    Table(
        "bench_decode",
        "analysis.bench_decode",
        "--variants enable_gqa sdpa --json {results}/bench_decode.json",
        small="--tokens 1024 --repeats 1",
        environment=QUIET,
    ),
    Table(
        "bench_generate",
        "analysis.bench_generate",
        "--preset quick --contexts 2048 8192 --json {results}/bench_generate.json",
        small="--contexts 512 --random 1024 --steps 2",
        environment=QUIET,
    ),
    Table(
        "bench_storage",
        "analysis.bench_storage",
        "--threads 1 --steps 100 --interval 32 --drift --json {results}/bench_storage.json",
        small="--tokens 400 --steps 40 --interval 20",
    ),
    Table(
        "compile_kernels",
        "analysis.compile_kernels",
        "--json {results}/compile_kernels.json",
        small="--targets sm_90 --only join",
    ),
    Table("kernel_bytes", "analysis.kernel_bytes"),
    Table("mutation", "analysis.mutation", small="--only schedule"),
    Table(
        "serve_bench",
        "analysis.serve_bench",
        "--python {vllm} --kv-mib 150 200 300 600 --preset quick centroidkv --threads 2 "
        "--json {results}/serve_bench.json --picture {pictures}/serve_bench.png",
        small="--kv-mib 40 --preset quick --prompt 600 --output 16 --requests 2",
        needs="vllm",
    ),
    Table(
        "serve_bench_short",
        "analysis.serve_bench",
        "--python {vllm} --kv-mib 200 --preset quick centroidkv --prompt 500 --output 64 --requests 16 --threads 2 "
        "--json {results}/serve_bench_short.json",
        small="--kv-mib 40 --preset quick --output 16 --requests 2",
        needs="vllm",
    ),
    Table("compat", "tools/compat.py", "", small="5.24.0 --pytest '-k greedy'"),
)


def command_of(table: Table, options: argparse.Namespace) -> list[str]:
    """The command line of a table, as a list for ``subprocess``."""
    python = str(options.peers) if table.needs == "peers" else sys.executable
    start = [python, table.command] if table.command.endswith(".py") else [python, "-m", table.command]
    places = {name: str(getattr(options, name)) for name in ("results", "pictures", "texts", "essays", "vllm")}
    filled = [word.format(**places) for word in shlex.split(table.arguments)]
    return start + filled + (shlex.split(table.small) if options.small else [])


def run(table: Table, options: argparse.Namespace) -> str | None:
    """What the command printed, shown as it comes; None if it failed. Kept only if it did not."""
    command = command_of(table, options)
    print(f"\n== {table.name}: {shlex.join(command[1:])}", flush=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(table.environment or {})}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    if process.wait():
        return None
    kept = options.results / "tables" / f"{table.name}.txt"
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
    parser.add_argument("--texts", default="heldout", help="of the fidelity tables; 'topics' needs no files")
    parser.add_argument("--essays", type=Path, default=ADDRESSES, help="prose for RULER's essay tasks")
    parser.add_argument(
        "--peers", type=Path, default=ROOT / ".venv-peers/bin/python", help="the Python that has kvpress"
    )
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm/bin/python", help="the Python that has vLLM")
    options = parser.parse_args(arguments)
    stored = ROOT / "analysis" / "results"
    options.results = (options.results or (ROOT / "results" / "small" if options.small else stored)).absolute()
    options.published = options.results == stored
    if options.published and options.small:
        parser.error(f"figures of a small run would be mixed with those in {stored}; name other --results")
    pictures = ROOT / "docs" / "pictures" if options.published else options.results / "pictures"
    options.pictures = (options.pictures or pictures).absolute()
    options.peers, options.vllm = options.peers.absolute(), options.vllm.absolute()
    options.wanted = [table for table in TABLES if any(fnmatch.fnmatch(table.name, word) for word in options.only)]
    for word in options.only:
        if not fnmatch.filter((table.name for table in TABLES), word):
            parser.error(f"no table is called {word!r}; there are {', '.join(table.name for table in TABLES)}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, keep, put into the documents, and say what failed."""
    options = parse(arguments)
    if options.list:
        print("\n".join(f"{table.name}: {shlex.join(command_of(table, options)[1:])}" for table in options.wanted))
        return
    for needed in sorted({table.needs for table in options.wanted} - {"main"}):
        python = getattr(options, needed)
        if not python.exists():
            target = {"peers": "peers", "vllm": "test-vllm"}[needed]
            sys.exit(f"some of these tables need the environment that `make {target}` makes, and {python} is not there")
    options.pictures.mkdir(parents=True, exist_ok=True)
    documents = Documents(ROOT)
    rows, failed = [], []
    for table in options.wanted:
        before = time.perf_counter()
        printed = run(table, options)
        if printed is None:
            failed.append(table.name)
        elif options.published:
            documents.put(table.name, printed)
        rows.append([table.name, f"{time.perf_counter() - before:.0f}", "failed" if printed is None else "done"])
    print("\n" + format_table(("table", "seconds", "state"), rows))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
