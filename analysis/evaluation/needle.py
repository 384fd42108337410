"""Several needles, several compressors: the table of README, "Choosing".

python -m analysis needle [--samples 5] [--budgets 0.5 0.25] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from statistics import mean

import torch
from tqdm import tqdm

from centroidkv import Budget, Compressor, presets
from centroidkv.cli.demo import format_table
from centroidkv.cli.generate import DTYPES
from centroidkv.cli.needle import ask, make_needle
from centroidkv.integrations.transformers import load_smollm2
from centroidkv.preserve import Distinctive, Recent, Sinks
from centroidkv.schedule import FewestRounds, LinearAnnealing


def with_schedule(schedule: object) -> Callable[[Budget], Compressor]:
    """The `centroidkv` preset under another schedule."""
    return lambda budget: Compressor.builder().schedule(schedule).budget(budget).build()


def with_share(share: float) -> Callable[[Budget], Compressor]:
    """The `distinctive` preset with another share."""
    return lambda budget: (
        Compressor.builder()
        .preserve(Sinks(4), Recent(64), Distinctive(share=share))
        .schedule(presets.SMALL_STEPS)
        .budget(budget)
        .build()
    )


VARIANTS: dict[str, Callable[[Budget], Compressor]] = {
    "streaming_llm": presets.streaming_llm,
    "keydiff": presets.keydiff,
    "centroidkv, fewest rounds": with_schedule(FewestRounds()),
    "centroidkv, r = .5 falling by .05": with_schedule(LinearAnnealing(0.5, 0.05)),
    "centroidkv (r = .1 falling by .005)": presets.centroidkv,
    "distinctive, share .25": with_share(0.25),
    "distinctive (share .5)": presets.distinctive,
    "distinctive, share .75": with_share(0.75),
}


def main() -> None:
    """Run all variants on the same needles and print mean NLL, exact answers and compression time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
    model, tokenizer = load_smollm2(DTYPES[options.dtype])
    depths = [(index + 0.5) / options.samples for index in range(options.samples)]
    needles = [make_needle(tokenizer, depth=depth, seed=seed) for seed, depth in enumerate(depths)]
    runs = [("full cache", 1.0)] + [(name, budget) for name in VARIANTS for budget in options.budgets]
    rows = []
    for name, budget in tqdm(runs, file=sys.stderr, leave=False):
        compressor = VARIANTS[name](Budget.ratio(budget)) if name in VARIANTS else None
        outcomes = [ask(model, tokenizer, needle, compressor) for needle in needles]
        rows.append(
            (
                name,
                f"{budget:.1%}".replace(".0%", "%"),
                f"{mean(outcome.nll for outcome in outcomes):.3f}",
                f"{sum(outcome.exact for outcome in outcomes)}/{len(outcomes)}",
                f"{mean(outcome.stats.seconds for outcome in outcomes):.2f}",
            )
        )
    lengths = [needle.context.shape[1] for needle in needles]
    print(
        f"SmolLM2-135M-Instruct, {options.dtype}, {torch.get_num_threads()} threads; {options.samples} needles in "
        f"{min(lengths)} to {max(lengths)} tokens\n"
    )
    print(format_table(("compressor", "budget", "NLL", "exact", "compress s"), rows))


if __name__ == "__main__":
    main()
