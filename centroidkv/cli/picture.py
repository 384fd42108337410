"""One picture of why clustering works: keys are alike, and most alike to their neighbours."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def key_cosines(keys: Tensor) -> Tensor:
    """Cosine similarity of all pairs of ``keys [H, T, D]``: ``[H, T, T]`` float32."""
    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    return unit @ unit.mT


def similarity_by_distance(cosines: Tensor, longest: int) -> Tensor:
    """Mean cosine of tokens at distance 1, ..., ``longest``: ``[H, longest]`` from ``[H, T, T]``."""
    means = [cosines.diagonal(distance, dim1=-2, dim2=-1).mean(-1) for distance in range(1, longest + 1)]
    return torch.stack(means, -1)


def draw_similarity(keys: Tensor, path: Path, title: str) -> None:
    """Heat map of the first head's key similarity, and similarity by distance of every head; in the suffix's format."""
    from matplotlib.figure import Figure  # not pyplot, which keeps a back end and figures for the whole process

    cosines = key_cosines(keys)
    window = min(256, cosines.shape[-1])
    longest = min(256, cosines.shape[-1] - 1)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    image = left.imshow(cosines[0, -window:, -window:].numpy(), vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
    figure.colorbar(image, ax=left, label="cosine similarity")
    left.set(title=f"Keys of head 0, last {window} tokens", xlabel="token", ylabel="token")
    for head, curve in enumerate(similarity_by_distance(cosines, longest)):
        right.plot(range(1, longest + 1), curve.numpy(), label=f"KV head {head}")
    right.set(title="Mean similarity by distance", xlabel="distance in tokens", ylabel="mean cosine similarity")
    right.set_xscale("log", base=2)
    right.grid(alpha=0.3)
    right.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
