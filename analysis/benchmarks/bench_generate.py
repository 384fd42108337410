"""What a user waits for: time per output token over the full cache and over a quarter, and what compressing adds.

python -m analysis bench_generate [--contexts 2048 4096 8192] [--random 8192 32768] [--json FILE]

Two models. SmolLM2 reads real text, then both caches take turns, token by token; "compressing / prefill" is the time
spent in the compressor as a share of the prefill without it. And a random model shaped like Llama (grouped queries, 8
KV heads of 128) whose caches are filled with random keys and values, because reading a long prompt with random weights
would take minutes and say nothing: there the cache is most of what a step reads. Its caches are read by stock sdpa and,
in further columns, by the model after ``enable(model)``, whose attention packs the queries of a group.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from analysis.benchmarks.timing import synchronize
from analysis.tools.store import environment, write_json
from centroidkv import presets
from centroidkv.cli.demo import format_table
from centroidkv.cli.generate import DTYPES
from centroidkv.integrations.transformers import CentroidCache, enable, load_named

NEVER = 10**9


def random_llama(layers: int, dtype: torch.dtype, longest: int) -> Any:
    """Grouped queries over 8 KV heads of 128, and few other weights, so that long caches dominate a step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=1024, intermediate_size=2048, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=2 * longest,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def filled(model: Any, cache: Any, tokens: int) -> Any:
    """``cache`` after ``tokens`` random keys and values in every layer."""
    config = model.config
    generator = torch.Generator().manual_seed(1)
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    for layer in range(config.num_hidden_layers):
        keys, values = (torch.randn(shape, generator=generator).to(model.dtype).to(model.device) for _ in range(2))
        if isinstance(cache, CentroidCache):  # not through update(), which wants to see the model that will read it
            cache.layers[layer].growing.append(keys, values)
        else:
            cache.update(keys, values, layer)
    return cache


def compressed(model: Any, preset: str) -> CentroidCache:
    """A cache that compresses its prompt to a quarter and then grows."""
    return CentroidCache(presets.ALL[preset](0.25), interval=NEVER, config=model.config)


@torch.no_grad()
def steps(model: Any, caches: dict[str, Any], count: int) -> dict[str, float]:
    """Median seconds per token of each cache, taking turns; names that end in "enabled" run inside ``enable``."""
    token = torch.ones(1, 1, dtype=torch.long, device=model.device)
    taken: dict[str, list[float]] = {name: [] for name in caches}
    for turn in range(count + 2):
        for name, cache in caches.items():
            with enable(model) if name.endswith("enabled") else contextlib.nullcontext():
                synchronize(model.device)
                start = time.perf_counter()
                model(token, past_key_values=cache)
                synchronize(model.device)
                if turn > 1:
                    taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


@torch.no_grad()
def prefill(model: Any, ids: Tensor, cache: Any) -> float:
    """Seconds to read ``ids`` into ``cache``."""
    synchronize(model.device)
    start = time.perf_counter()
    model(ids, past_key_values=cache, logits_to_keep=1)
    synchronize(model.device)
    return time.perf_counter() - start


def four(make_full: Callable[[], Any], make_small: Callable[[], Any]) -> dict[str, Any]:
    """Both caches, for stock attention and for ``enable``."""
    made = {"full": make_full(), "quarter": make_small()}
    # Steps only append, so the second pair may start from the same tensors.
    return made | {"full enabled": make_full(), "quarter enabled": make_small()}


def run_random(tokens: int, options: Any) -> dict[str, float]:
    """Seconds per token over random caches."""
    model = random_llama(options.layers, DTYPES[options.dtype], tokens).to(options.device)
    caches = four(
        lambda: filled(model, DynamicCache(config=model.config), tokens),
        lambda: filled(model, compressed(model, options.preset), tokens),
    )
    return steps(model, caches, options.steps)


def run_real(model: Any, tokenizer: Any, text: str, tokens: int, options: Any) -> dict[str, float]:
    """Seconds of prefill, of compressing, and per token, on real text."""
    ids = torch.tensor([tokenizer(text).input_ids[:tokens]], device=model.device)
    if ids.shape[1] < tokens:
        raise SystemExit(f"the text holds {ids.shape[1]} tokens, fewer than the {tokens} asked for; pass --text FILE")
    prefill(model, ids[:, :64], DynamicCache(config=model.config))  # warm up
    full, small = DynamicCache(config=model.config), compressed(model, options.preset)
    taken = {"prefill": prefill(model, ids, full), "prefill and compress": prefill(model, ids, small)}
    taken["compress"] = small.stats().seconds
    return taken | steps(model, {"full": full, "quarter": small}, options.steps)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m or a model folder")
    parser.add_argument(
        "--text", type=Path, help="what the model reads; default: the documentation of Python's library"
    )
    parser.add_argument("--contexts", type=int, nargs="*", default=[2048, 4096, 8192])
    parser.add_argument("--random", type=int, nargs="*", default=[8192, 32768])
    parser.add_argument("--layers", type=int, default=2, help="layers of the random model")
    parser.add_argument("--preset", default="centroidkv", choices=presets.ALL)
    parser.add_argument("--steps", type=int, default=10, help="tokens to time")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the results there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure and print both tables."""
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    real, random = {}, {}
    if options.contexts:
        model, tokenizer = load_named(options.model, DTYPES[options.dtype])
        text = options.text.read_text() if options.text else library_text()
        for tokens in tqdm(options.contexts, file=sys.stderr, leave=False):
            real[tokens] = run_real(model.to(options.device), tokenizer, text, tokens, options)
    for tokens in tqdm(options.random, file=sys.stderr, leave=False):
        random[tokens] = run_random(tokens, options)
    if real:
        print(f"{options.model}, preset {options.preset}\n\n{real_table(real)}\n")
    if random:
        print(f"random Llama, {options.layers} layers, preset {options.preset}\n\n{random_table(random)}")
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key not in ("json", "text")}
        write_json(
            options.json,
            {"environment": environment(options.device), "settings": settings, "real": real, "random": random},
        )


def library_text() -> str:
    """Plain text that every Python has: its help topics."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def real_table(results: dict[int, dict[str, float]]) -> str:
    """Prefill, compressing and time per token."""
    header = (
        "tokens",
        "prefill s",
        "compressing s",
        "compressing / prefill",
        "ms per token, full",
        "quarter",
        "faster",
    )
    return format_table(
        header,
        [
            (
                str(tokens), f"{t['prefill']:.2f}", f"{t['compress']:.2f}",
                f"{100 * t['compress'] / t['prefill']:.1f} %", f"{1e3 * t['full']:.1f}", f"{1e3 * t['quarter']:.1f}",
                f"{t['full'] / t['quarter']:.2f}x",
            )
            for tokens, t in results.items()
        ],
    )  # fmt: skip


def random_table(results: dict[int, dict[str, float]]) -> str:
    """Time per token with stock attention and with ours."""
    header = ("tokens", "ms per token, full", "quarter", "faster", "enabled: full", "enabled: quarter", "faster")
    return format_table(
        header,
        [
            (
                str(tokens), f"{1e3 * t['full']:.1f}", f"{1e3 * t['quarter']:.1f}", f"{t['full'] / t['quarter']:.2f}x",
                f"{1e3 * t['full enabled']:.1f}", f"{1e3 * t['quarter enabled']:.1f}",
                f"{t['full enabled'] / t['quarter enabled']:.2f}x",
            )
            for tokens, t in results.items()
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
