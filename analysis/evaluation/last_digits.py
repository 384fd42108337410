"""How much the last digits of the keys decide: a cache is compressed again with keys that differ by rounding errors.

python -m analysis last_digits [--presets quick centroidkv distinctive] [--samples 10] [--noise 1e-6]

Two implementations of a model in float32 differ by about 1e-6 of every key, and so does one from itself in float64.
Clustering takes the better one of two pairs however close they are; where a pair falls otherwise, one head holds other
clusters. Every sample is a text; its first tokens are compressed as they are and with every number of the keys changed
by ``noise`` of itself (normal), and the rest is read after both. Told are

- heads that hold other clusters;
- the largest change in the log-probability of the best token: its largest value, and how often it is above .001, .02;

of the preset, and of the preset as servers run it (similarities and scores rounded: ``ServingOptions.compressor``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from analysis.evaluation.fidelity.prefill import Prefill, cache_of, prefill, read
from analysis.evaluation.fidelity.texts import SPLITS, help_topics, load_texts
from centroidkv import Compressor, KVState, presets
from centroidkv.cli.demo import format_table
from centroidkv.integrations.transformers import load_named
from centroidkv.integrations.vllm import ServingOptions

TAIL = 100
"""Tokens that are read after a compressed cache."""


@dataclass(frozen=True)
class Trial:
    """What one set of rounding errors changed: heads, of how many, and the largest |dlogprob| of the best tokens."""

    heads: int
    of: int
    largest: float


def compressors(names: Sequence[str], budget: float) -> dict[str, Compressor]:
    """The presets, and as servers run them."""
    found = {}
    for name in names:
        found[name] = presets.ALL[name](budget)
        found[f"{name}, served"] = ServingOptions(preset=name, budget=budget).compressor(torch.float32)
    return found


def states_of(filled: Prefill, compressor: Compressor, noise: float, seed: int) -> list[KVState]:
    """Every layer compressed, its keys changed by ``noise`` of themselves."""
    chance = torch.Generator().manual_seed(seed)
    states = []
    for layer in filled.layers:
        keys = layer.keys * (1 + noise * torch.randn(layer.keys.shape, generator=chance))
        state = KVState.from_kv(keys, layer.values, rotary=filled.rotary)
        states.append(compressor.with_(backend="fastest")(state))
    return states


def trial(model: Any, filled: Prefill, tail: Tensor, compressor: Compressor, noise: float, seeds: range) -> list[Trial]:
    """One trial per seed."""
    plain = states_of(filled, compressor, 0, 0)
    right = read(model, cache_of(model, filled, plain), tail).log_softmax(-1)
    best = right.argmax(-1, keepdim=True)
    found = []
    for seed in seeds:
        states = states_of(filled, compressor, noise, seed)
        other = torch.cat([(a.degree != b.degree).any(-1).flatten() for a, b in zip(plain, states, strict=True)])
        ours = read(model, cache_of(model, filled, states), tail).log_softmax(-1)
        largest = float((ours - right).gather(-1, best).abs().max())
        found.append(Trial(int(other.sum()), other.numel(), largest))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m or a model folder")
    parser.add_argument("--presets", nargs="+", default=["quick", "centroidkv", "distinctive"], choices=presets.ALL)
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--texts", choices=(*SPLITS, "topics"), default="topics")
    parser.add_argument("--samples", type=int, default=10, help="texts")
    parser.add_argument("--trials", type=int, default=2, help="sets of rounding errors per text")
    parser.add_argument("--length", type=int, default=900, help="tokens that are compressed")
    parser.add_argument("--noise", type=float, default=1e-6)
    options = parser.parse_args()
    model, tokenizer = load_named(options.model, torch.float32)
    texts = help_topics() if options.texts == "topics" else load_texts(options.texts)
    tokens = tokenizer("\n\n".join(texts), return_tensors="pt")["input_ids"]
    least = options.samples * (options.length + TAIL)
    if tokens.shape[1] < least:
        sys.exit(f"{options.samples} samples take {least} tokens, the texts have {tokens.shape[1]}")
    methods = compressors(options.presets, options.budget)
    found: dict[str, list[Trial]] = {name: [] for name in methods}
    for sample in tqdm(range(options.samples), file=sys.stderr):
        piece = tokens[:, sample * (options.length + TAIL) :][:, : options.length + TAIL]
        filled, tail = prefill(model, piece[:, :-TAIL]), piece[:, -TAIL:]
        for name, compressor in methods.items():
            found[name] += trial(model, filled, tail, compressor, options.noise, range(1, options.trials + 1))
    rows = [
        [
            name, f"{sum(t.heads for t in trials) / len(trials):.1f} of {trials[0].of}",
            *(f"{sum(t.largest > limit for t in trials) / len(trials):.0%}" for limit in (1e-3, 0.02)),
            f"{max(t.largest for t in trials):.3f}",
        ]
        for name, trials in found.items()
    ]  # fmt: skip
    print(
        f"{options.model}, {options.length} tokens compressed to {options.budget:.0%}, keys changed by "
        f"{options.noise:g} of themselves, {options.samples * options.trials} trials of {TAIL} tokens\n"
    )
    print(format_table(["preset", "heads that differ", "dlogprob > .001", "> .02", "largest"], rows))


if __name__ == "__main__":
    main()
