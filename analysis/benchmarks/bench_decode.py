"""How much faster attention over a compressed cache is: one new token, grouped queries, whole and smaller caches.

python -m analysis bench_decode [--tokens 4096 32768] [--device cuda] [--dtype bfloat16] [--threads 2] [--json FILE]

Every variant adds ln(degree) to its logits and reads a cache of all tokens, of half, and of a quarter as many slots.
"repeat" is what Hugging Face's models do: keys and values repeated for every query head, then PyTorch's attention.
"enable_gqa" leaves the repeating to PyTorch; the others are the back ends of ``degree_attention``. All of them take
turns, and medians are compared, so that a busy machine disturbs every ratio alike. Between two calls a buffer larger
than the processor's own caches is written: in a model, other layers' keys and values would have passed through.

On a machine that others use too, set OMP_WAIT_POLICY=passive: by default threads spin while they wait for one that is
not running, and with two of them that is most of what is measured.

Triton's interpreter is for tests, so on the CPU the kernel is "not measured".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from analysis.benchmarks.timing import seconds
from analysis.tools.store import device_name, environment, write_json
from centroidkv.attention import chosen_backend, degree_attention
from centroidkv.cli.demo import format_table
from centroidkv.cli.generate import DTYPES
from centroidkv.kernels import why_not_triton

SHARES = (1.0, 0.5, 0.25)
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def bias_per_query_head(query: Tensor, degree: Tensor) -> Tensor:
    """Ln N as ``[B, Hq, 1, T]``, in the query's dtype."""
    return degree.log().repeat_interleave(query.shape[1] // degree.shape[1], 1)[:, :, None].to(query.dtype)


def repeat(query: Tensor, keys: Tensor, values: Tensor, degree: Tensor) -> Tensor:
    """Every query head gets its own copy of the keys and values it reads."""
    batch, heads, slots, _ = keys.shape
    groups = query.shape[1] // heads
    keys, values = (
        x[:, :, None].expand(batch, heads, groups, slots, -1).reshape(batch, heads * groups, slots, -1)
        for x in (keys, values)
    )
    return scaled_dot_product_attention(query, keys, values, attn_mask=bias_per_query_head(query, degree))


def enable_gqa(query: Tensor, keys: Tensor, values: Tensor, degree: Tensor) -> Tensor:
    """PyTorch told that query heads share keys."""
    bias = bias_per_query_head(query, degree)
    return scaled_dot_product_attention(query, keys, values, attn_mask=bias, enable_gqa=True)


VARIANTS: dict[str, Attention] = {
    "repeat": repeat,
    "enable_gqa": enable_gqa,
    **{name: partial(degree_attention, backend=name) for name in ("reference", "sdpa", "triton")},
}


def why_not_measured(name: str, device: str) -> str | None:
    """The reason to leave a variant out on this device, or None."""
    if name != "triton":
        return None
    if torch.device(device).type == "cpu":
        return "on the CPU Triton only has an interpreter for tests"
    return why_not_triton(device)


def inputs(tokens: int, options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A query, and keys, values and degrees of ``tokens`` slots."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, options.heads, tokens, options.size)
    query = torch.randn(1, options.heads * options.groups, 1, options.size, generator=generator)
    # Slots of the smaller caches are slots of the larger one, so a large cache is drawn once, in its own dtype.
    keys, values = (torch.randn(shape, generator=generator, dtype=DTYPES[options.dtype]) for _ in range(2))
    degree = torch.randint(1, 9, shape[:3], generator=generator).float()
    query, keys, values, degree = (x.to(options.device) for x in (query.to(keys), keys, values, degree))
    return query, keys, values, degree


@torch.no_grad()
def measure(tokens: int, options: Any) -> dict[str, list[float] | None]:
    """Median seconds of every variant over every share of the cache; None: not measured."""
    query, keys, values, degree = inputs(tokens, options)
    caches = []
    for share in SHARES:
        slots = max(1, int(share * tokens))
        caches.append(tuple(x[:, :, :slots].contiguous() for x in (keys, values, degree)))
    names = [name for name in options.variants if why_not_measured(name, options.device) is None]
    calls = {
        (name, i): lambda name=name, cache=cache: VARIANTS[name](query, *cache)
        for name in names
        for i, cache in enumerate(caches)
    }
    medians = seconds(calls, options.repeats, options.device, flush=True)
    return {
        name: [medians[name, i] for i in range(len(SHARES))] if name in names else None for name in options.variants
    }


def table(results: dict[int, dict[str, list[float] | None]]) -> str:
    """Milliseconds over the whole cache, how much faster smaller ones are, and how much faster than "repeat"."""
    header = ("tokens", "variant", "full ms", "50 %: times faster", "25 %: times faster", "full: times repeat's speed")
    rows = []
    for tokens, by_name in results.items():
        baseline = by_name.get("repeat")
        for name, taken in by_name.items():
            if taken is None:
                rows.append((str(tokens), name, "not measured", "", "", ""))
                continue
            full, half, quarter = taken
            versus = f"{baseline[0] / full:.2f}" if baseline else ""
            rows.append((str(tokens), name, f"{1e3 * full:.3f}", f"{full / half:.2f}", f"{full / quarter:.2f}", versus))
    return format_table(header, rows)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options, with the dtype that fits the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**n for n in range(12, 18)])
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--groups", type=int, default=4, help="query heads per KV head")
    parser.add_argument("--size", type=int, default=128, help="key and value size")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on the CPU, bfloat16 on a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args(argv)
    options.dtype = options.dtype or ("float32" if torch.device(options.device).type == "cpu" else "bfloat16")
    return options


def main(argv: list[str] | None = None) -> None:
    """Measure every length and print the table."""
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    results = {n: measure(n, options) for n in tqdm(options.tokens, file=sys.stderr, leave=False)}
    name = device_name(options.device)
    chosen = chosen_backend(*inputs(1, options)[:3])
    shape = f"{options.heads} KV heads, {options.groups} queries each, size {options.size}, {options.dtype}"
    threads = f", {options.threads} threads" if torch.device(options.device).type == "cpu" else ""
    print(f"{name}{threads}; {shape}; degree_attention's backend='auto' is {chosen!r} here\n")
    print(table(results))
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        content = {
            "environment": environment(options.device),
            "settings": settings,
            "auto": chosen,
            "shares": SHARES,
            "seconds": results,
        }
        write_json(options.json, content)


if __name__ == "__main__":
    main()
