"""What one step asks of the attention: per request which slots it sees, and what is clustered in between.

Needs nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from centroidkv.paged.plan import Event, ServingPlan


@dataclass(frozen=True)
class Segment:
    """Tokens ``[start, stop)`` of the batch that see a request's slots from block ``first`` to their own token.

    Afterwards ``event`` is due, before the next segment of the same request may look at the cache. Only a request that
    was preempted, and now computes its prompt and its output again, has more than one segment in a step.
    """

    start: int
    stop: int
    first: int
    length: int
    event: Event | None = None


@dataclass(frozen=True)
class Chunk:
    """Several tokens of one request: a prompt or a part of it. ``blocks`` are its physical blocks, from the first."""

    blocks: Tensor
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Decode:
    """Requests that compute one token each.

    Args:
        rows: ``[R]`` int64, places of their tokens in the batch.
        table: ``[R, M]`` int32, physical blocks that hold something, in order.
        lengths: ``[R]`` int32, slots in use.
    """

    rows: Tensor
    table: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Batch:
    """One step: its requests with several tokens, and those with one."""

    tokens: int
    chunks: tuple[Chunk, ...] = ()
    decode: Decode | None = None


def segments(plan: ServingPlan, prompt: int, computed: int, start: int, new: int) -> tuple[Segment, ...]:
    """The segments of ``new`` tokens after ``computed`` ones of a request, at ``start`` in the batch.

    An event at the very end of the step is not among them: it is carried out after the step, in all layers at once.
    """
    found, done, region = [], computed, plan.region(prompt, computed)
    for event in plan.events(prompt, computed, computed + new - 1):
        found.append(_segment(plan, start + done - computed, done, event.tokens, region.first, event))
        done, region = event.tokens, event.after
    found.append(_segment(plan, start + done - computed, done, computed + new, region.first, None))
    return tuple(found)


def _segment(plan: ServingPlan, start: int, done: int, until: int, first: int, event: Event | None) -> Segment:
    return Segment(start, start + until - done, first, until - first * plan.block_size, event)


def lay_out(
    plan: ServingPlan, prompts: Sequence[int], starts: Sequence[int], lengths: Sequence[int], table: Tensor
) -> Batch:
    """The batch of a step.

    Args:
        plan: of the requests.
        prompts: prompt length per request.
        starts: first token in the batch per request, and the number of tokens last.
        lengths: tokens computed per request once the step is done.
        table: ``[requests, blocks]``, physical blocks per request from the first on.
    """
    chunks, rows, firsts, live = [], [], [], []
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        start, new = starts[row], starts[row + 1] - starts[row]
        if new == 0:
            continue
        parts = segments(plan, prompt, length - new, start, new)
        if new == 1:
            rows.append(row)
            firsts.append(parts[0].first)
            live.append(parts[0].length)
        else:
            chunks.append(Chunk(table[row, : -(-length // plan.block_size)], parts))
    decode = None
    if rows:
        decode = _decode(plan.block_size, rows, firsts, live, [starts[row] for row in rows], table)
    return Batch(starts[-1], tuple(chunks), decode)


def _decode(
    block_size: int, rows: list[int], firsts: list[int], live: list[int], places: list[int], table: Tensor
) -> Decode:
    device = table.device
    widest = -(-max(live) // block_size)
    # Reading a little to the right of a request's blocks is harmless: its length says what counts.
    columns = torch.arange(widest, device=device) + torch.tensor(firsts, device=device)[:, None]
    columns = columns.clamp_(max=table.shape[1] - 1)
    chosen = table[torch.tensor(rows, device=device)].gather(1, columns)
    return Decode(
        torch.tensor(places, device=device),
        chosen.int(),
        torch.tensor(live, dtype=torch.int32, device=device),
    )
