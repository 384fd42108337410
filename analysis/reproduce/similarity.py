"""The two observations behind clustering, on any model and text: keys are alike locally, and the less the further.

python -m analysis similarity [--model smollm2] [--text FILE] [--tokens 2048] [--longest 1024] [--json FILE]

Cosine similarity of the keys of one text within a head, before and after RoPE: as a heat map, and its mean by distance.
Only layers with full attention are looked at: sliding windows see no long distances, and the cache leaves them alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from analysis.reproduce.curves import Keys, bends_down, curves, keys_of, octave_shares, octaves, rises, shape_shares
from analysis.reproduce.similarity_pictures import draw_curves, draw_heatmaps
from analysis.tools.store import environment, write_json
from centroidkv.cli.demo import format_table
from centroidkv.cli.needle import prose
from centroidkv.errors import EvaluationError
from centroidkv.integrations.transformers import load_named

RANGES = (8, 64, 256)
PLACES = ((1, 1), (2, 2), (3, 3), (4, 4), (5, 8), (9, 32), (33, 256), (257, None))
"""Distances, first and last, for which the share of failures is counted together."""


def read_ids(tokenizer: object, text: str, tokens: int) -> Tensor:
    """The first ``tokens`` tokens of the text, ``[1, tokens]``, with whatever the tokenizer puts in front."""
    ids = torch.tensor([tokenizer(text).input_ids])  # type: ignore[operator]
    if ids.shape[1] < tokens:
        raise EvaluationError(f"the text has {ids.shape[1]} tokens, not {tokens}; ask for fewer or give a longer one")
    return ids[:, :tokens]


def level_row(name: str, curve: Tensor) -> list[str]:
    """Similarity by distance: mean over layers and heads of f(1), f(2), f(4), ..."""
    points = [2**k for k in range(0, curve.shape[-1].bit_length(), 2)]
    return [name, *(f"{curve[..., d - 1].mean():.3f}" for d in points)]


def shape_rows(name: str, curve: Tensor) -> list[list[str]]:
    """Per range of distances: the share of layers and heads whose curve is monotone, convex, both."""
    ends = [end for end in RANGES if end < curve.shape[-1]] + [curve.shape[-1]]
    found = [(f"1..{end}", shape_shares(curve[..., :end])) for end in ends]
    found.append((f"octaves of 1..{2 ** len(octaves(curve)[0]) - 1}", octave_shares(curve)))
    return [[name, span, *(f"{share:.0%}" for share in shares)] for span, shares in found]


def failure_shares(curve: Tensor) -> dict[str, tuple[float, float]]:
    """By place: how often f rises from d to d + 1, and how often it bends down at d, d + 1, d + 2.

    Shares of layers, heads and distances d.
    """
    up, down = rises(curve).float(), bends_down(curve).float()
    shares = {}
    for first, last in PLACES:
        here = slice(first - 1, last)
        if first <= down.shape[-1] and (last is None or last <= down.shape[-1]):
            name = str(first) if first == last else f"{first}..{last or curve.shape[-1]}"
            shares[name] = (up[..., here].mean().item(), down[..., here].mean().item())
    return shares


def summary(keys: Keys, measured: dict[str, Tensor]) -> dict[str, object]:
    """The tables in numbers, and every layer and head's curve: its first 16 distances and its octaves."""
    found: dict[str, object] = {"layers": list(keys.layers), "heads": keys.after.shape[1]}
    for name, curve in measured.items():
        distance, mean = octaves(curve)
        found[name] = {
            "monotone, convex, both by range": {str(end): shape_shares(curve[..., :end]) for end in RANGES},
            "monotone, convex, both of octaves": octave_shares(curve),
            "rises, bends down by distance": failure_shares(curve),
            "first": [[[round(x, 4) for x in head] for head in layer] for layer in curve[..., :16].tolist()],
            "octave distances": distance.tolist(),
            "octaves": [[[round(x, 4) for x in head] for head in layer] for layer in mean.tolist()],
        }
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with the defaults that depend on others filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m or a model folder")
    parser.add_argument("--text", type=Path, help="a text file (default: prose of the standard library)")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--longest", type=int, default=1024, help="largest distance, below --tokens")
    parser.add_argument("--layers", type=int, nargs="+", help="layers of the heat maps (default: four, evenly spaced)")
    parser.add_argument("--heads", type=int, nargs="+", default=[0], help="KV heads of the heat maps")
    parser.add_argument("--window", type=int, default=128, help="tokens of the heat maps, the last ones of the text")
    parser.add_argument("--heatmap", type=Path, help="picture (default docs/pictures/similarity_heatmap_MODEL.png)")
    parser.add_argument("--curves", type=Path, help="picture (default docs/pictures/similarity_curves_MODEL.png)")
    parser.add_argument("--json", type=Path, help="where to write the numbers, with versions and commit")
    options = parser.parse_args(arguments)
    options.name = Path(options.model).name
    for picture in ("heatmap", "curves"):
        if getattr(options, picture) is None:
            setattr(options, picture, Path(f"docs/pictures/similarity_{picture}_{options.name}.png"))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one model on one text; save both pictures; print the tables."""
    options = parse(arguments)
    text = options.text.read_text() if options.text else prose(1)
    model, tokenizer = load_named(options.model)
    keys = keys_of(model, read_ids(tokenizer, text, options.tokens))
    measured = {
        "before RoPE": curves(keys.before, options.longest),
        "after RoPE": curves(keys.after, options.longest),
    }
    layers = options.layers or [keys.layers[i * (len(keys.layers) - 1) // 3] for i in range(4)]
    places = [(layer, head) for layer in dict.fromkeys(layers) for head in options.heads]
    of_model = model.config.get_text_config().num_hidden_layers
    print(
        f"{options.name}, {options.tokens} tokens, {len(keys.layers)} of {of_model} layers (full attention) x "
        f"{keys.after.shape[1]} KV heads\n\nMean cosine similarity by distance, mean over layers and heads:\n"
    )
    level = [level_row(name, curve) for name, curve in measured.items()]
    print(format_table(("keys", *(f"f({4**k})" for k in range(len(level[0]) - 1))), level))
    failures = {name: failure_shares(curve) for name, curve in measured.items()}
    rows = []
    for kind, column in (("rises", 0), ("bends down", 1)):
        rows += [[name, kind, *(f"{x[column]:.0%}" for x in shares.values())] for name, shares in failures.items()]
    print("\nWhere the curve rises (f(d) < f(d+1)) or is not convex (f(d) - 2 f(d+1) + f(d+2) < 0), by d:\n")
    print(format_table(("keys", "failure", *failures["after RoPE"]), rows))
    print("\nShare of layers and heads whose curve is monotone, convex, and both, at every distance of the range:\n")
    rows = [row for name, curve in measured.items() for row in shape_rows(name, curve)]
    print(format_table(("keys", "distances", "monotone", "convex", "both"), rows))
    draw_heatmaps(keys, places, options.window, f"{options.name}: cosine similarity of keys", options.heatmap)
    draw_curves(keys, measured, f"{options.name}: mean cosine similarity of keys by distance", options.curves)
    if options.json:
        settings = {"model": options.name, "text": options.text.name if options.text else "prose(1)"}
        settings |= {"tokens": options.tokens, "longest": options.longest}
        write_json(options.json, {"settings": settings, **summary(keys, measured), "environment": environment()})


if __name__ == "__main__":
    main()
