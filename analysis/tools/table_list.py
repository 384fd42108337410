"""What the documents show: every table and plot, and the command that makes it (``tables.py`` runs them)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
        "analysis.evaluation.fidelity",
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
    Table("needle", "analysis.evaluation.needle", small="--samples 1 --budgets 0.25"),
    _fidelity("fidelity_smollm2", "--without 'all pairs' --picture {pictures}/fidelity_smollm2.png"),
    _fidelity(
        "fidelity_gemma3-270m", f"--methods {SIX} --picture {{pictures}}/fidelity_gemma3-270m.png", model="gemma3-270m"
    ),
    Table(
        "choosing",
        "analysis.evaluation.choosing",
        "{results}/fidelity_smollm2.json {results}/fidelity_gemma3-270m.json",
        small="--budgets 0.25",
    ),
    _fidelity("tasks_smollm2", f"--methods {FEW} --tasks {OTHERS}"),
    _fidelity("aware_smollm2", f"--methods {FEW} --tasks needle_number --budgets 0.25 --protocol aware"),
    _fidelity("ablation_smollm2", "--ablation --budgets 0.25", samples=12),
    _fidelity(
        "clusterings_smollm2",
        "--methods centroidkv 'all pairs' kmeans 'random pairs' 'merge after eviction' --tasks prose --budgets 0.25",
    ),
    Table(
        "ruler",
        "analysis.evaluation.ruler",
        "--essays {essays} --samples 3 --presets full distinctive streaming_llm --budgets 0.25 "
        "--tasks niah_multikey_1 niah_multivalue niah_multiquery --output {results}/ruler.json",
        small="--samples 1 --presets full streaming_llm --tasks niah_single_1 --protocols query-agnostic",
    ),
    Table(
        "decode_quality",
        "analysis.evaluation.decode_quality",
        "--presets balanced centroidkv streaming_llm --budgets 0.25 --free 0 --block 64 "
        "--json {results}/decode_quality.json --picture {pictures}/decode_quality.png",
        small="--prompt 320 --tokens 256 --window 128 --chats 1 --document 400",
    ),
    *(
        Table(
            f"similarity_{model}",
            "analysis.reproduce.similarity",
            f"--model {model} --heatmap {{pictures}}/similarity_heatmap_{model}.png "
            f"--curves {{pictures}}/similarity_curves_{model}.png",
            small="--tokens 300 --longest 200",
        )
        for model in ("smollm2", "gemma3-270m")
    ),
    Table(
        "partition_optimality",
        "analysis.reproduce.partition_optimality",
        "--picture {pictures}/partition_optimality.png",
        small="--tokens 320",
    ),
    Table("complexity", "analysis.reproduce.complexity", small="--repeats 1"),
    Table(
        "last_digits", "analysis.evaluation.last_digits", small="--samples 1 --trials 1 --length 400 --presets quick"
    ),
    Table(
        "attention_error",
        "analysis.reproduce.attention_error",
        "--picture {pictures}/attention_error.png",
        small="--tokens 640",
    ),
    Table(
        "bench_round",
        "analysis.benchmarks.bench_round",
        "--json {results}/bench_round.json",
        small="--tokens 1024 2048 --slow 1024 --heads 2 --repeats 1",
        environment=QUIET,
    ),
    Table(
        "bench_decode",
        "analysis.benchmarks.bench_decode",
        "--variants enable_gqa sdpa --json {results}/bench_decode.json",
        small="--tokens 1024 --repeats 1",
        environment=QUIET,
    ),
    Table(
        "bench_generate",
        "analysis.benchmarks.bench_generate",
        "--preset quick --contexts 2048 8192 --json {results}/bench_generate.json",
        small="--contexts 512 --random 1024 --steps 2",
        environment=QUIET,
    ),
    Table(
        "bench_storage",
        "analysis.benchmarks.bench_storage",
        "--threads 1 --steps 100 --interval 32 --drift --json {results}/bench_storage.json",
        small="--tokens 400 --steps 40 --interval 20",
    ),
    Table(
        "compile_kernels",
        "analysis.tools.compile_kernels",
        "--json {results}/compile_kernels.json",
        small="--targets sm_90 --only join",
    ),
    Table("kernel_bytes", "analysis.tools.kernel_bytes"),
    Table("mutation", "analysis.tools.mutation", small="--only schedule"),
    Table(
        "serve_bench",
        "analysis.benchmarks.serve_bench",
        "--python {vllm} --kv-mib 150 200 300 600 --preset quick centroidkv --threads 2 "
        "--json {results}/serve_bench.json --picture {pictures}/serve_bench.png",
        small="--kv-mib 40 --preset quick --prompt 600 --output 16 --requests 2",
        needs="vllm",
    ),
    Table(
        "serve_bench_short",
        "analysis.benchmarks.serve_bench",
        "--python {vllm} --kv-mib 200 --preset quick centroidkv --prompt 500 --output 64 --requests 16 --threads 2 "
        "--json {results}/serve_bench_short.json",
        small="--kv-mib 40 --preset quick --output 16 --requests 2",
        needs="vllm",
    ),
    Table("compat", "tools/compat.py", "", small="5.24.0 --pytest '-k greedy'"),
)
