"""What holding the compressed state in fewer bits, or elsewhere, saves and costs.

python -m analysis bench_storage [--tokens 1000] [--steps 200] [--budget 0.25] [--drift] [--json FILE]

A model reads ``--tokens`` tokens of CPython's help topics, every cache is compressed to the same budget, then the text
goes on for ``--steps`` tokens, which every cache reads one by one and in turns (teacher-forced), clustered again every
``--interval`` tokens. Per storage: bytes after the prompt, median time per token, and how far its logits are from those
over the same compressed cache in full precision (the storage's own error: largest difference, mean KL in nats), and
over the full cache (compression and storage together).

``--drift`` prints first what quantising again at every event does to preserved slots: the error of 16 sinks in standard
normal keys and values, 128 slots of 64 channels, after 1, 6, 21 and 61 events.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

from analysis.benchmarks.timing import synchronize
from analysis.evaluation.fidelity.texts import help_topics
from analysis.tools.store import environment, write_json
from centroidkv import Budget, Compressor, presets
from centroidkv.cache import GrowingState, Offloaded, Quantised, Storage
from centroidkv.cli.demo import format_table
from centroidkv.integrations.transformers import CentroidCache, enable, load_named
from centroidkv.preserve import Recent, Sinks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORAGES: dict[str, Storage | None] = {
    "full precision": None,
    "int8": Quantised(8),
    "int8, nested": Quantised(8, nested=True),
    "int4": Quantised(4),
    "int4, nested": Quantised(4, nested=True),
    "offloaded": Offloaded(),
    "offloaded int4": Offloaded(Quantised(4)),
}
FULL = "no compression"


def bytes_of(cache: Any) -> int:
    """Bytes of keys and values, and of degrees and positions where there are any."""
    if isinstance(cache, CentroidCache):
        return cache.stats().bytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def divergence(of: Tensor, to: Tensor) -> float:
    """KL(to || of) of next-token distributions, mean over tokens, nats."""
    p, q = (logits.double().log_softmax(-1) for logits in (to, of))
    return float((p.exp() * (p - q)).sum(-1).mean())


@torch.no_grad()
def run(model: Any, ids: Tensor, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The figures of every storage, over one text ``ids [1, tokens + steps]``."""
    compressor = presets.ALL[options.preset](options.budget)
    caches: dict[str, Any] = {FULL: DynamicCache(config=model.config)}
    caches |= {name: CentroidCache(compressor, options.interval, storage=storage) for name, storage in STORAGES.items()}
    prompt, rest = ids[:, : options.tokens], ids[:, options.tokens :]
    logits: dict[str, list[Tensor]] = {name: [] for name in caches}
    taken: dict[str, list[float]] = {name: [] for name in caches}
    found: dict[str, dict[str, float]] = {}
    with enable(model):
        for name, cache in caches.items():
            model(prompt, past_key_values=cache, logits_to_keep=1)
            found[name] = {"bytes": bytes_of(cache)}
        for token in tqdm(rest.split(1, 1), file=sys.stderr, leave=False):
            for name, cache in caches.items():
                synchronize(model.device)
                start = time.perf_counter()
                step = model(token, past_key_values=cache).logits
                synchronize(model.device)
                taken[name].append(time.perf_counter() - start)
                logits[name].append(step[0, 0].float().cpu())
    stacked = {name: torch.stack(steps) for name, steps in logits.items()}
    for name, figures in found.items():
        figures["ms per token"] = 1e3 * statistics.median(taken[name])
        exact = stacked["full precision"]
        figures["max |dlogit|"] = float((stacked[name] - exact).abs().max())
        figures["KL to full precision"] = divergence(stacked[name], exact)
        figures["KL to no compression"] = divergence(stacked[name], stacked[FULL])
        if name != FULL:
            figures["events"] = caches[name].stats().events
    return found


def drift(storage: Storage, events: tuple[int, ...] = (1, 6, 21, 61)) -> dict[str, list[tuple[float, float]]]:
    """Root mean square and largest error of 16 sinks' keys and values after so many events."""
    torch.manual_seed(0)
    compressor = Compressor.builder().preserve(Sinks(16), Recent(8)).budget(Budget.tokens(128)).build()
    layer = GrowingState(compressor, 16, storage=storage)
    first = torch.randn(2, 1, 2, 200, 64)
    layer.append(*first)
    found: dict[str, list[tuple[float, float]]] = {"keys": [], "values": []}
    for event in range(1, max(events) + 1):
        if event in events:
            state = layer.state
            for name, then in zip(found, first, strict=True):
                error = getattr(state, name)[:, :, :16] - then[:, :, :16]
                found[name].append((float(error.square().mean().sqrt()), float(error.abs().max())))
        layer.append(*torch.randn(2, 1, 2, 16, 64))
    return found


def drift_table() -> str:
    """One line per quantised storage."""
    rows = []
    for storage in (Quantised(8), Quantised(8, nested=True), Quantised(4), Quantised(4, nested=True)):
        for name, errors in drift(storage).items():
            rows.append((repr(storage), name, *(f"{rms:.4f}, {most:.3f}" for rms, most in errors)))
    return format_table(("storage", "of", "1 event", "6", "21", "61"), rows)


def table(found: dict[str, dict[str, float]]) -> str:
    """One line per storage."""
    header = (
        "storage",
        "MiB",
        "of full",
        "ms per token",
        "max |dlogit|",
        "KL to full precision",
        "KL to no compression",
    )
    whole = found[FULL]["bytes"]
    rows = []
    for name, f in found.items():
        own = ("", "") if name == FULL else (f"{f['max |dlogit|']:.3f}", f"{f['KL to full precision']:.2e}")
        rows.append(
            (name, f"{f['bytes'] / 2**20:.2f}", f"{f['bytes'] / whole:.1%}", f"{f['ms per token']:.1f}", *own,
             f"{f['KL to no compression']:.4f}")
        )  # fmt: skip
    return format_table(header, rows)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m or a model folder")
    parser.add_argument("--tokens", type=int, default=1000, help="length of the prompt")
    parser.add_argument("--steps", type=int, default=200, help="tokens after it")
    parser.add_argument("--interval", type=int, default=64, help="tokens between two compressions")
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--preset", default="centroidkv", choices=presets.ALL)
    parser.add_argument("--seed", type=int, default=0, help="which order of the help topics")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--drift", action="store_true", help="also show what 61 events do to preserved slots")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.drift:
        print(drift_table() + "\n", flush=True)
    model, tokenizer = load_named(options.model, DTYPES[options.dtype])
    text = help_topics(options.seed + 1)[options.seed]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : options.tokens + options.steps]
    if ids.shape[1] < options.tokens + options.steps:
        raise SystemExit(f"the text holds {ids.shape[1]} tokens, fewer than the {options.tokens + options.steps} asked")
    found = run(model.to(options.device), ids.to(options.device), options)
    print(
        f"{options.model}, {options.dtype}, preset {options.preset} at {options.budget:.0%}, {options.tokens} + "
        f"{options.steps} tokens, {found['int8']['events']:.0f} events, {options.threads} threads\n"
    )
    print(table(found))
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        write_json(options.json, {"environment": environment(), "settings": settings, "storages": found})


if __name__ == "__main__":
    main()
