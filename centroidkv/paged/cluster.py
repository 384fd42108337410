"""Compress the blocks of one request in place, for any number of layers at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from centroidkv.paged.pages import Pages
from centroidkv.paged.plan import Event, ServingPlan
from centroidkv.rotary import Rotary
from centroidkv.state import KVState

BYTES_AT_ONCE = 64 << 20
"""Keys and values that are gathered before they are compressed; more layers at once gain nothing."""


def cluster(
    layers: Sequence[Pages], blocks: Sequence[int], event: Event, plan: ServingPlan, rotary: Rotary | None
) -> None:
    """Carry out ``event`` of a request whose logical blocks are the physical ``blocks``, in every one of ``layers``.

    All sources are read before a target is written, layer by layer.

    Raises:
        ServingError: some layer holds other slot data than the compressor keeps; nothing was written.
    """
    if not layers:
        return
    device, block_size = layers[0].keys.device, layers[0].block_size
    at = torch.tensor(blocks[event.before.first : event.after.end], device=device)
    targets = at[-event.target_blocks :]
    slots = event.source_blocks * block_size
    heads, _, key_size = layers[0].keys.shape[1:]
    per_layer = slots * heads * (key_size + layers[0].values.shape[-1]) * layers[0].keys.element_size()
    step = max(1, BYTES_AT_ONCE // per_layer)
    # A server has the processor to itself and pays for every millisecond: with compiled rounds where they can be had.
    compressor = plan.sized(event.target_blocks * block_size).with_(backend="fastest")
    for start in range(0, len(layers), step):
        some = layers[start : start + step]
        result = compressor(_state(some, at, event, rotary))
        if start == 0:
            for pages in layers:  # before any of them is written
                pages.check_data(result)
        for row, pages in enumerate(some):
            pages.fill(targets, result, row)


def _state(layers: Sequence[Pages], at: Tensor, event: Event, rotary: Rotary | None) -> KVState:
    """The slots of blocks ``at``: layers are rows, because compressors treat rows independently."""
    keys, values, log_degree = (torch.stack(parts) for parts in zip(*(p.read(at) for p in layers), strict=True))
    block_size = layers[0].block_size
    raw = event.after.end - event.before.end
    clustered = (event.before.end - event.before.first) * block_size
    # Degrees are whole numbers; exp(ln N) misses them by rounding only.
    degree = log_degree.exp().round()
    first_raw = event.before.end * block_size
    numbers = torch.arange(first_raw, first_raw + raw * block_size, device=at.device, dtype=torch.int32)
    positions = numbers.expand(*degree.shape[:2], -1)
    if clustered:
        if layers[0].positions is None:
            # Only their order matters to this compressor.
            old = torch.arange(first_raw - clustered, first_raw, device=at.device, dtype=torch.int32)
            old = old.expand(*degree.shape[:2], -1)
        else:
            old = torch.stack([pages.read_positions(at)[:, :clustered] for pages in layers])
        positions = torch.cat((old, positions), -1)
    state = KVState(keys, values, degree, positions.contiguous(), rotary=rotary)
    if clustered:  # before the first event nothing is known of any slot
        for datum, _ in layers[0].data:
            data = torch.stack([pages.read_data(datum.name, at) for pages in layers])
            data[:, :, clustered:] = datum.rule.fill
            state = state.with_slot_data(datum.name, data, datum.rule)
    return state
