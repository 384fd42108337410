"""Attention of a batch over pages, and the clustering that is due within it. Needs nothing of vLLM."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from centroidkv.attention import degree_attention, paged_degree_attention
from centroidkv.attention.paged.native import paged_degree_attention_native, why_not
from centroidkv.paged.batch import Batch, Chunk, Decode, Segment
from centroidkv.paged.pages import Pages
from centroidkv.paged.plan import Event

Clusterer = Callable[[Tensor, Event], None]
"""Carries out an event on the blocks of one request, in the layer that attends."""
Prompts = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Causal attention of ``query [L, Hq, D]`` over the raw tokens ``keys [H, T, D]``, ``values [H, T, Dv]``, of which the
last L are its own; returns ``[L, Hq, Dv]``."""


def attend(
    query: Tensor, pages: Pages, batch: Batch, scale: float, out: Tensor, cluster: Clusterer, prompts: Prompts
) -> None:
    """softmax(scale q.k + ln N) v for the ``query [T, Hq, D]`` of a step, into ``out [T, Hq, Dv]``.

    The step's own keys and values must have been written to the pages.
    """
    if batch.decode is not None:
        out[batch.decode.rows] = attend_one_each(query[batch.decode.rows], pages, batch.decode, scale)
    for chunk in batch.chunks:
        for segment in chunk.segments:
            part = slice(segment.start, segment.stop)
            out[part] = attend_segment(query[part], pages, chunk, segment, scale, prompts)
            if segment.event is not None:
                cluster(chunk.blocks, segment.event)


def attend_one_each(query: Tensor, pages: Pages, decode: Decode, scale: float) -> Tensor:
    """``query [R, Hq, D]``, one token per request, over the blocks of each."""
    keys, values, log_degree = (x.transpose(1, 2) for x in (pages.keys, pages.values, pages.log_degree))
    if why_not(query, keys, values) is None:
        # Not through the checks: tables are made here, and looking at them again would cost every layer of every step.
        return paged_degree_attention_native(query, keys, values, log_degree, decode.table, decode.lengths, scale=scale)
    return paged_degree_attention(query, keys, values, log_degree, decode.table, decode.lengths, scale=scale)


def attend_segment(
    query: Tensor, pages: Pages, chunk: Chunk, segment: Segment, scale: float, prompts: Prompts
) -> Tensor:
    """``query [L, Hq, D]`` of one request; token i sees the last slot but L - 1 - i."""
    keys, values, log_degree = pages.read(chunk.blocks[segment.first :])
    keys, values, log_degree = keys[:, : segment.length], values[:, : segment.length], log_degree[:, : segment.length]
    if segment.first == 0:  # nothing was clustered yet
        return prompts(query, keys, values, scale)
    asked = query.transpose(0, 1)[None]
    found = degree_attention(
        asked, keys[None], values[None], log_degree[None].exp(), scale=scale, causal=True, backend="sdpa"
    )
    return found[0].transpose(0, 1)


def causal_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention over a prompt, or the part of it that there is, by PyTorch; see :data:`Prompts`."""
    new, slots = query.shape[0], keys.shape[1]
    mask = None
    if new < slots:
        place = torch.arange(slots, device=keys.device)
        mask = place <= place[slots - new :, None]
    found = scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None, scale=scale,
        enable_gqa=True,
    )  # fmt: skip
    return found[0].transpose(0, 1)
