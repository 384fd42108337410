"""What clustering costs, in copies of the cache.

python -m analysis bench_round [--tokens 8192 16384 32768 65536 131072] [--device cpu] [--threads 2] [--json FILE]

Per length, one round (half of what is not preserved merges) and the whole compression of a prompt to a quarter, both
as users call them (``compressor(state)``: checks, preserved sinks and recent tokens, position-ordered result), against
``clone()`` of the same keys and values, all-pairs matching and k-means with 10 iterations to the same size. Calls take
turns. The slow ones are timed on one head, whose pairs alone are a gigabyte at 16k tokens, and multiplied by the number
of heads; ``--slow`` says up to which length.

Extra memory is the most bytes of tensors alive at once during the round, beyond its input and its result, as a share of
keys and values: on the CPU counted on one thread and multiplied by their number, on a GPU the allocator's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from analysis.benchmarks.timing import PeakBytes, seconds
from analysis.tools.store import environment, write_json
from centroidkv import Budget, Compressor, KVState, presets
from centroidkv.cli.demo import format_table
from centroidkv.cli.generate import DTYPES
from centroidkv.matching import AllPairsMatching, BipartiteSoftMatching, KMeans
from centroidkv.schedule import Constant, FewestRounds
from centroidkv.similarity import NegativeEuclidean

SINKS_AND_RECENT = 68


def one_round(tokens: int, rank: str = "sequence", backend: str = "auto") -> Compressor:
    """One round in which half of the compressible slots merge."""
    left = SINKS_AND_RECENT + (tokens - SINKS_AND_RECENT + 1) // 2
    builder = Compressor.builder().matching(BipartiteSoftMatching(rank)).schedule(Constant(0.5))
    return builder.budget(Budget.tokens(left)).build(backend)


def competitors(tokens: int) -> dict[str, Compressor]:
    """The slow ways to the same number of slots."""
    same = Compressor.builder().budget(one_round(tokens).budget)
    return {
        "all pairs": same.matching(AllPairsMatching()).schedule(Constant(0.5)).build(),
        "k-means": same.similarity(NegativeEuclidean()).matching(KMeans(10)).schedule(FewestRounds()).build(),
    }


def extra_memory(compressor: Compressor, state: KVState) -> float:
    """Peak bytes beyond input and result, as a share of the bytes of keys and values."""
    whole = sum(x.numel() * x.element_size() for x in (state.keys, state.values))
    if state.keys.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = compressor(state)
        return (torch.cuda.max_memory_allocated() - before - result.nbytes) / whole
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # other threads' tensors would not be seen
    try:
        with PeakBytes() as counter:
            result = compressor(state)
    finally:
        torch.set_num_threads(threads)
    return min(threads, state.batch * state.heads) * (counter.peak - result.nbytes) / whole


def measure(tokens: int, options: Any) -> dict[str, float]:
    """Seconds of every call at one length, and the extra memory of a round."""
    shape = (1, options.heads, tokens, options.size)
    generator = torch.Generator().manual_seed(0)
    # Neighbours share most of their direction, as real keys do.
    base = torch.randn(1, options.heads, tokens // 8 + 1, options.size, generator=generator).repeat_interleave(8, 2)
    keys = (base[:, :, :tokens] + 0.5 * torch.randn(shape, generator=generator)).to(DTYPES[options.dtype])
    state = KVState.from_kv(*(x.to(options.device) for x in (keys, torch.randn(shape, generator=generator).to(keys))))
    runs = {"round": one_round(tokens), "round, rank chunk": one_round(tokens, "chunk")}
    if tokens <= options.slow:
        runs["round, reference"] = one_round(tokens, backend="reference")
    prompts = {"prompt to 25 %": presets.centroidkv(0.25)}
    calls: dict[str, Any] = {"clone": lambda: (state.keys.clone(), state.values.clone())}
    for name, compressor in (runs | prompts).items():
        calls[name] = lambda compressor=compressor: compressor(state)
    taken = seconds(calls, options.repeats, options.device)
    if tokens <= options.slow:
        head = KVState.from_kv(state.keys[:, :1], state.values[:, :1])
        for name, compressor in competitors(tokens).items():
            slow = {name: lambda compressor=compressor: compressor(head), "round": calls["round"]}
            both = seconds(slow, 1, options.device)
            taken[name], taken[f"round beside {name}"] = options.heads * both[name], both["round"]
    taken["extra memory"] = extra_memory(runs["round"], state)
    return taken


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**n for n in range(13, 18)])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=128, help="key and value size")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slow", type=int, default=16384, help="longest length for all pairs, k-means, the reference")
    parser.add_argument("--json", type=Path, help="write the results there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure every length and print the table."""
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    results = {n: measure(n, options) for n in tqdm(options.tokens, file=sys.stderr, leave=False)}
    print(table(results))
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        write_json(options.json, {"environment": environment(options.device), "settings": settings, "seconds": results})


def table(results: dict[int, dict[str, float]]) -> str:
    """Milliseconds of the copy, and everything else in copies."""
    header = ("tokens", "clone ms", "round", "rank chunk", "reference", "all pairs / round", "k-means / round",
              "prompt to 25 %", "round / shortest", "extra memory")  # fmt: skip
    shortest = min(results)
    rows = []
    for tokens, taken in results.items():
        copy = taken["clone"]

        def copies(name: str, taken: dict[str, float] = taken, copy: float = copy) -> str:
            return f"{taken[name] / copy:.2f}x" if name in taken else "-"

        def beside(name: str, taken: dict[str, float] = taken) -> str:
            return f"{taken[name] / taken[f'round beside {name}']:.0f}x" if name in taken else "-"

        rows.append(
            (
                str(tokens), f"{1e3 * copy:.1f}", copies("round"), copies("round, rank chunk"),
                copies("round, reference"), beside("all pairs"), beside("k-means"), copies("prompt to 25 %"),
                f"{taken['round'] / results[shortest]['round']:.1f}x", f"{100 * taken['extra memory']:.1f} %",
            )
        )  # fmt: skip
    return format_table(header, rows)


if __name__ == "__main__":
    main()
