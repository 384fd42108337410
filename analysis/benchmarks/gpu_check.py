"""Every kernel against its reference, then every time that matters, on the device at hand; about six minutes at most.

python -m analysis gpu_check [--json FILE] [--small]

On a GPU: kernels are compiled, compared with the PyTorch reference over types, sizes, strides and tails, and timed in
copies of the same keys and values on that device. Without one the same comparisons run through Triton's interpreter on
small inputs, and the times are those of the CPU paths: this shows that the script works, not what a GPU does.
The exit status is 1 if a comparison fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from analysis.benchmarks import bench_decode, bench_generate, bench_round
from analysis.tools.store import device_name, environment, write_json
from centroidkv import Budget, Compressor, KVState
from centroidkv.attention import degree_attention, paged_degree_attention
from centroidkv.cli.demo import format_table
from centroidkv.kernels import INTERPRET
from centroidkv.matching import BipartiteSoftMatching
from centroidkv.partition import Alternating
from centroidkv.preserve import Recent, Sinks
from centroidkv.schedule import Constant

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest relative error of a kernel: a few roundings of the storage type on numbers of order one."""

Check = tuple[str, Callable[[], float], float]
"""What is compared, how far apart the two are, and how far they may be."""


def apart(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest number."""
    scale = max(float(theirs.float().abs().max()), 1e-6) if theirs.numel() else 1.0
    return float((ours.float() - theirs.float()).abs().max()) / scale if theirs.numel() else 0.0


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def round_error(rank: str, tokens: int, size: int, dtype: torch.dtype, device: str, strided: bool) -> float:
    """One round by kernels and by the stages: 1 if another slot stayed, else the largest error of keys and values.

    Neighbours are close in pairs of their own, so that every decision has one clear answer whatever the rounding.
    """
    shape = (2, 3, tokens, size)
    keys, values = drawn(shape, torch.float32, "cpu", 1), drawn(shape, torch.float32, "cpu", 2)
    level = torch.rand(2, 3, (tokens + 1) // 2, generator=torch.Generator().manual_seed(3)).argsort(-1).float()
    near = (0.02 + 0.5 * level / level.shape[-1])[..., : tokens // 2, None]
    twin = keys[:, :, 1::2][:, :, : tokens // 2]
    keys[:, :, 0::2][:, :, : tokens // 2] = twin + near * keys[:, :, 0::2][:, :, : tokens // 2]
    keys, values = (x.to(dtype).to(device) for x in (keys, values))
    if strided:
        keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
    builder = Compressor.builder().preserve(Sinks(4), Recent(5)).partition(Alternating(64))
    builder = builder.matching(BipartiteSoftMatching(rank)).schedule(Constant(0.25)).budget(Budget.ratio(0.8))
    state, kernels = KVState.from_kv(keys, values), builder.build("triton")
    ours, theirs = kernels(state), replace(kernels, backend="reference")(state)
    if not (ours.positions.equal(theirs.positions) and ours.degree.equal(theirs.degree)):
        return 1.0
    return max(apart(ours.keys, theirs.keys), apart(ours.values, theirs.values))


def attention_error(length: int, tokens: int, size: int, groups: int, dtype: torch.dtype, device: str) -> float:
    """Decode attention by the kernel and by the reference in float32."""
    query = drawn((2, 2 * groups, length, size), dtype, device, 4)
    keys, values = (drawn((2, 2, tokens, size), dtype, device, seed) for seed in (5, 6))
    degree = (drawn((2, 2, tokens), torch.float32, device, 7).abs() * 4).ceil()
    degree[:, :, ::7] = 0
    degree[:, :, -length:] = 1
    ours = degree_attention(query, keys, values, degree, backend="triton")
    theirs = degree_attention(query.float(), keys.float(), values.float(), degree, backend="reference")
    return apart(ours, theirs)


def paged_error(tokens: int, size: int, dtype: torch.dtype, device: str) -> float:
    """Attention through a block table, by the kernel and by the reference."""
    block, heads, groups, rows = 16, 2, 4, 3
    per_row = -(-tokens // block)
    order = torch.randperm(rows * per_row, generator=torch.Generator().manual_seed(8))
    table = order.view(rows, per_row).int().to(device)
    keys, values = (drawn((rows * per_row, block, heads, size), dtype, device, seed) for seed in (9, 10))
    log_degree = (drawn((rows * per_row, block, heads), torch.float32, device, 11).abs() * 4).ceil().clamp(min=1).log()
    lengths = torch.tensor([tokens, max(tokens // 2, 1), 1], dtype=torch.int32, device=device)
    query = drawn((rows, heads * groups, size), dtype, device, 12)
    ours = paged_degree_attention(query, keys, values, log_degree, table, lengths, backend="triton")
    whole = (x.float() for x in (query, keys, values))
    return apart(ours, paged_degree_attention(*whole, log_degree, table, lengths, backend="reference"))


def checks(device: str, small: bool) -> Iterator[Check]:
    """Every comparison."""
    lengths = (1, 63, 200) if small else (1, 2, 63, 1000, 8191)
    sizes = (16, 24) if small else (64, 96, 128, 256)
    for dtype, tolerance in TOLERANCE.items():
        kind = str(dtype).removeprefix("torch.")
        for size in sizes:
            for tokens in lengths:
                if tokens > 20:
                    for rank in ("sequence", "chunk"):
                        strided = size == sizes[1]
                        yield (
                            f"round {rank} T{tokens} D{size} {kind}",
                            lambda a=(rank, tokens, size, dtype, device, strided): round_error(*a),
                            tolerance,
                        )
                for length in (1, 3):
                    if tokens >= length:
                        yield (
                            f"attention L{length} T{tokens} D{size} {kind}",
                            lambda a=(length, tokens, size, 4, dtype, device): attention_error(*a),
                            tolerance,
                        )
                yield (
                    f"paged T{tokens} D{size} {kind}",
                    lambda a=(tokens, size, dtype, device): paged_error(*a),
                    tolerance,
                )


def run_checks(device: str, small: bool) -> list[dict[str, Any]]:
    """All comparisons; one that raises is a failure, not the end."""
    found = []
    for name, measure, tolerance in checks(device, small):
        try:
            error, problem = measure(), ""
        except Exception as exception:  # whatever a compiler or driver may raise
            error, problem = float("nan"), f"{type(exception).__name__}: {exception}"
        found.append({"check": name, "error": error, "tolerance": tolerance, "problem": problem})
    return found


def benchmarks(device: str, small: bool) -> dict[str, str]:
    """The tables of the benchmarks on this device."""
    gpu = device.startswith("cuda")
    dtype = "bfloat16" if gpu else "float32"
    lengths = ["512", "1024"] if small else ["8192", "32768", "131072"]
    shared = ["--device", device, "--dtype", dtype]
    slow = "512" if small else "8192"
    rounds = bench_round.arguments([*shared, "--tokens", *lengths, "--slow", slow, "--repeats", "2" if small else "5"])
    decode = bench_decode.arguments([*shared, "--tokens", *lengths, "--repeats", "2" if small else "20"])
    generate = bench_generate.arguments([*shared, "--steps", "2" if small else "10"])
    contexts = [512] if small else [8192, 32768, 131072]
    return {
        "a round, in copies of keys and values": bench_round.table(
            {int(n): bench_round.measure(int(n), rounds) for n in lengths}
        ),
        "decode attention": bench_decode.table({int(n): bench_decode.measure(int(n), decode) for n in lengths}),
        "time per token, random Llama": bench_generate.random_table(
            {n: bench_generate.run_random(n, generate) for n in contexts}
        ),
    }


def main(argv: list[str] | None = None) -> int:
    """Compare, time, print; 1 if a comparison failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="small inputs, as without a GPU")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args(argv)
    small = options.small or not options.device.startswith("cuda")
    if options.device == "cpu" and os.environ.get(INTERPRET) != "1":
        # Triton reads this when it is imported, which other packages have long done by now: begin again.
        command = [sys.executable, "-m", "analysis.benchmarks.gpu_check", *(sys.argv[1:] if argv is None else argv)]
        return subprocess.run(command, env={**os.environ, INTERPRET: "1"}).returncode
    start = time.perf_counter()
    found = run_checks(options.device, small)
    failed = [row for row in found if row["problem"] or not row["error"] <= row["tolerance"]]
    checked = time.perf_counter() - start
    tables = benchmarks(options.device, small)
    for title, table in tables.items():
        print(f"{title}\n\n{table}\n")
    families: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        families.setdefault(row["check"].split()[0] + " " + row["check"].split()[-1], []).append(row)
    header = ("kernel", "comparisons", "failed", "largest error", "allowed")
    print(
        format_table(
            header,
            [
                (
                    name, str(len(rows)), str(sum(row in failed for row in rows)),
                    f"{max(row['error'] for row in rows):.1e}", f"{rows[0]['tolerance']:.0e}",
                )
                for name, rows in families.items()
            ],
        )
    )  # fmt: skip
    for row in failed[:10]:
        print(f"FAILED {row['check']}: {row['problem'] or row['error']}")
    total = time.perf_counter() - start
    print(
        f"\n{device_name(options.device)}: {len(found) - len(failed)} of {len(found)} comparisons hold; "
        f"{checked:.0f} s comparing, {total - checked:.0f} s timing"
    )
    if options.json:
        write_json(
            options.json,
            {"environment": environment(options.device), "checks": found, "tables": tables, "seconds": total},
        )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
