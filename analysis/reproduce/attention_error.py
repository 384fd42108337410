"""What compression does to attention outputs on real keys, and how tight the bound of one merge is.

python -m analysis attention_error [--tokens 1536] [--picture attention_error.png]

Error: |o' - o| / |o| of the last 64 queries of a text, attending to everything before them, compressed or not; mean
over queries and query heads, per layer and KV head.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from analysis.reproduce.capture import Layer, asked, capture
from centroidkv import KVState, Rotary, presets
from centroidkv.attention import degree_attention
from centroidkv.attention.bound import merge_error_bound
from centroidkv.cli.demo import format_table
from centroidkv.cli.needle import prose
from centroidkv.integrations.rope import rotary_of
from centroidkv.integrations.transformers import load_smollm2

QUERIES = 64
BUDGETS = (0.5, 0.25, 0.125)
PRESETS = tuple(presets.ALL)


def layer_error(layer: Layer, preset: str, budget: float, rotary: Rotary) -> Tensor:
    """Relative output error per KV head, ``[H]``."""
    keys, values = layer.keys[:, :, :-QUERIES], layer.values[:, :, :-QUERIES]
    query = layer.query[:, :, -QUERIES:]
    state = KVState.from_kv(keys, values, rotary=rotary)
    compressor = presets.ALL[preset](budget)
    smaller = compressor(
        asked(state, layer.query[:, :, :-QUERIES] * layer.scale) if compressor.needs_queries else state
    )

    def attend(s: KVState) -> Tensor:
        return degree_attention(query, s.keys, s.values, s.degree, scale=layer.scale, causal=False)

    full, less = attend(state), attend(smaller)
    error = (less - full).norm(dim=-1) / full.norm(dim=-1)
    return error.mean(-1).unflatten(1, (keys.shape[1], -1)).mean((0, 2))


def bound_tightness(layer: Layer, merges: int = 64) -> Tensor:
    """Error / bound of merging single neighbouring pairs, one at a time, for the last query of every head.

    ``[merges, 2]``: with the spread that holds for all queries of that length, and with this query's own.
    """
    ratios = []
    groups = layer.query.shape[1] // layer.keys.shape[1]
    for head in range(layer.query.shape[1]):
        q = layer.query[0, head, -1].double()
        k, v = (x[0, head // groups, :-QUERIES].double() for x in (layer.keys, layer.values))
        logits = layer.scale * k @ q
        weights = (logits - logits.max()).exp()
        total, output = weights.sum(), weights @ v / weights.sum()
        for i in range(4, len(k) - 1, max(1, len(k) // merges)):
            pair = slice(i, i + 2)
            key, value = k[pair].mean(0), v[pair].mean(0)
            own = 2 * (layer.scale * key @ q - logits.max()).exp()
            rest = total - weights[pair].sum()
            others = (output * total - weights[pair] @ v[pair]) / rest
            error = ((rest * others + own * value) / (rest + own) - output).norm()
            facts = own / (rest + own), (value - others).norm(), (v[pair] - value).norm(dim=-1).mean()
            spreads = (
                layer.scale * q.norm() * (k[pair] - key).norm(dim=-1).max(),
                (layer.scale * (k[pair] - key) @ q).abs().max(),
            )
            bounds = [merge_error_bound(spread, *facts) for spread in spreads]
            if bounds[1] > 1e-9 * output.norm():  # below, what is compared is the rounding of float64
                ratios.append([float(error / bound) for bound in bounds])
    return torch.tensor(ratios)


def main() -> None:
    """Measure all presets and budgets on one text; print the table, save the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--picture", type=Path, default=None)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    model, tokenizer = load_smollm2()
    ids = torch.tensor([tokenizer(prose(1)).input_ids[: options.tokens]])
    layers, rotary = capture(model, ids), rotary_of(model.config)
    errors: dict[tuple[str, float], Tensor] = {}
    for preset in tqdm(PRESETS, file=sys.stderr, leave=False):
        for budget in BUDGETS:
            errors[preset, budget] = torch.stack([layer_error(layer, preset, budget, rotary) for layer in layers])
    ratios = torch.cat([bound_tightness(layer) for layer in layers])
    print(f"SmolLM2-135M-Instruct, {options.tokens} tokens, last {QUERIES} queries; mean over layers and heads")
    print(f"One merge of two neighbours, error / bound over {len(ratios)} merges (1 = the bound is reached):")
    for name, column in zip(("any query of its length", "this query"), ratios.T, strict=True):
        middle, high, most = torch.quantile(column, torch.tensor([0.5, 0.9, 1.0])).tolist()
        print(f"- bound for {name}: median {middle:.2g}, 90 % below {high:.2g}, largest {most:.2g}")
    print()
    rows = []
    for preset in PRESETS:
        cells = [errors[preset, budget] for budget in BUDGETS]
        rows.append([preset, *(f"{c.mean():.3f} ({c.min():.3f} .. {c.max():.3f})" for c in cells)])
    print(format_table(("preset", *(f"{budget:.1%}" for budget in BUDGETS)), rows))
    if options.picture:
        draw(errors, options.picture)


def draw(errors: dict[tuple[str, float], Tensor], path: Path) -> None:
    """Error by layer for every preset, one panel per budget; the band spans the heads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(BUDGETS), figsize=(13, 4), sharey=True, layout="constrained")
    for panel, budget in zip(panels, BUDGETS, strict=True):
        for preset in PRESETS:
            error = errors[preset, budget].numpy()
            panel.plot(error.mean(1), label=preset)
            panel.fill_between(range(len(error)), error.min(1), error.max(1), alpha=0.12)
        panel.set(title=f"budget {budget:.1%}", xlabel="layer", yscale="log")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("relative error of attention outputs")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
