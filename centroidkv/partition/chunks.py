"""Chunks: the shared step of every partition. Not a stage itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from centroidkv.errors import StageError
from centroidkv.records import Block, Partition

Split = Callable[[int], Tensor]
"""Chunk length -> bool ``[chunk length]``, True where a slot is a source."""


def check_chunk_size(chunk_size: int | None) -> None:
    """Refuse chunk sizes in which nothing could merge."""
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 2):
        raise StageError(
            f"chunk_size is a whole number >= 2 (a source needs a target), or None for the whole sequence; "
            f"got {chunk_size!r}"
        )


def split_chunks(length: int, chunk_size: int | None, split: Split) -> Partition:
    """Apply one ``split`` to every full chunk, and to the shorter tail if there is one."""
    size = chunk_size or max(length, 1)
    full, tail = divmod(length, size)
    blocks = []
    if full:
        blocks.append(_block(torch.arange(full * size).view(full, size), split(size)))
    if tail:
        blocks.append(_block(torch.arange(full * size, length).view(1, tail), split(tail)))
    return Partition(length, tuple(blocks))


def _block(slots: Tensor, is_source: Tensor) -> Block:
    return Block(slots[:, is_source], slots[:, ~is_source])
