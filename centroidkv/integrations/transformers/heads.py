"""Tensor parallelism: each process holds some of a layer's KV heads."""

from __future__ import annotations

from typing import Any

import torch.distributed

from centroidkv.compressor import Compressor
from centroidkv.errors import BackendError


def check_heads(compressor: Compressor, heads: int, config: Any) -> None:
    """Refuse a compressor that decides for all heads together where this process sees only ``heads`` of them.

    Whatever is decided per KV head comes out as in one process: every head clusters, and attends to, its own slots, and
    sizes follow from lengths alone, so all ranks hold equally many. A decision pooled over heads would be pooled over
    each rank's own heads: another result for every number of ranks, and no error.

    Raises:
        BackendError: names the stages that decide per head instead.
    """
    everything = getattr(config, "num_key_value_heads", heads)
    if heads >= everything or not compressor.pools_heads or not _several_processes():
        return
    raise BackendError(
        f"this process holds {heads} of {everything} KV heads (tensor parallelism), and a stage of this compressor "
        "decides for all heads together (heads='mean', 'passages', or WardMatching(passage=...)), so the result would "
        "depend on the number of processes. Choose one that decides per head, such as presets.distinctive or "
        f"presets.centroidkv: {compressor!r}"
    )


def _several_processes() -> bool:
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )
