"""All rounds of a compression on the CPU, a few heads at a time, in blocks of chunks.

The stages run one after the other over whole states, which costs a copy of the cache for almost every step. Here a
group of heads (one, where rows are long) goes through all of its rounds on its own: similarities are taken a few chunks
at a time, so that products stay in the processor's caches; only slots that merge are computed anew; and survivors move
up within one buffer. Preserved slots stay where they are in between and take no part. Groups run side by side on the
threads PyTorch may use. Beyond the result, memory is a group's keys and values per thread (nothing, where there is one
round only) and its merged rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from centroidkv.errors import NonFiniteError
from centroidkv.matching.bipartite import share_out
from centroidkv.ranges import in_hull
from centroidkv.rounds.backend import Backend
from centroidkv.rounds.scorers import Scorer
from centroidkv.rounds.settings import Settings, why_no_settings
from centroidkv.rounds.stages import Stages
from centroidkv.rounds.threads import in_parallel
from centroidkv.state import KVState, accumulation_dtype, gather_slots

BLOCK = 2**18
"""Numbers in a block of keys: it and its products stay in a core's cache. Heads shorter than this share a group."""
MOVE = 2048
"""Rows moved at once when a buffer is compacted in place."""


@torch.no_grad()
def blocked_rounds(state: KVState, free: Tensor, sizes: Sequence[int], settings: Settings) -> KVState:
    """Bring the ``free [B, H, T]`` slots of ``state`` to ``sizes`` slots, one round per size; the others stay.

    Args:
        state: on the CPU, live slots only; every head has the same number of free ones.
        free: bool.
        sizes: free slots after each round; sizes[j-1] >= sizes[j] >= half of it.
        settings: see :class:`~centroidkv.rounds.settings.Settings`.
    """
    batch, heads, slots, size = state.keys.shape
    begin = int(free[0, 0].sum())
    steps = [left for before, left in pairwise((begin, *sizes)) if left < before]
    if not steps:
        return replace(state, rounds=state.rounds + len(sizes))
    lengths = [slots - begin + left for left in (begin, *steps)]
    final, count = lengths[-1], batch * heads
    summed = [name for name in state.slot_data if state.rule(name).merge == "sum"]
    weights = {"degree": state.degree} | {name: state.slot_data[name] for name in summed}

    def result(x: Tensor) -> Tensor:
        return x.new_empty(batch, heads, final, *x.shape[3:])

    keys, values = result(state.keys), result(state.values)
    origin = torch.empty(batch, heads, final, dtype=torch.long)
    totals = {name: result(weight) for name, weight in weights.items()}
    step = min(max(1, BLOCK // (slots * size)), count)

    def run(first: int) -> None:
        group = slice(first, min(first + step, count))
        walk = _Group(
            [_heads(x, group) for x in (state.keys, state.values)],
            {name: _heads(weight, group) for name, weight in weights.items()},
            free.flatten(0, 1)[group],
        )
        out = [x.flatten(0, 1)[group].flatten(0, 1) for x in (keys, values)]
        several = len(steps) > 1  # they share one buffer, whose first slots are the result after the last round
        room = [x.new_empty(walk.heads * lengths[1], x.shape[-1]) for x in out] if several else out
        scorer = settings.scorer(state, group)
        for before, after in pairwise(lengths):
            walk.round(before - after, scorer, settings, room)
        if several:
            for x, rows in zip(out, walk.rows, strict=True):
                x.copy_(rows)
        origin.flatten(0, 1)[group] = walk.origin.view(-1, final) - (torch.arange(walk.heads) * slots)[:, None]
        for name, total in totals.items():
            total.flatten(0, 1)[group] = walk.weights[name].view(-1, final)

    in_parallel(run, range(0, count, step))
    kept = {name: totals[name] if name in totals else gather_slots(x, origin) for name, x in state.slot_data.items()}
    return replace(
        state, keys=keys, values=values, degree=totals["degree"], positions=state.positions.gather(-1, origin),
        slot_data=kept, rounds=state.rounds + len(sizes),
    )  # fmt: skip


def _heads(x: Tensor, group: slice) -> Tensor:
    """The heads ``group`` (rows times heads) of ``x [B, H, T, ...]`` one below the other; one head is not copied."""
    parts = [x[divmod(head, x.shape[1])] for head in range(group.start, group.stop)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Group:
    """R heads of n slots on their way through the rounds, laid out as R * n rows.

    ``rows``: keys [R n, D] and values [R n, Dv]; ``weights``: numbers per slot that add up [R n]; ``free [R m]``: the
    slots that may merge, ascending; ``origin [R n]``: where each slot was at first.
    """

    def __init__(self, rows: list[Tensor], weights: dict[str, Tensor], free: Tensor) -> None:
        self.rows, self.weights, self.heads = rows, weights, free.shape[0]
        self.free = free.flatten().nonzero()[:, 0]
        self.origin = torch.arange(free.numel())
        self.noted: Tensor | None = None  # what the scorer noted of every slot's key
        first, second = (accumulation_dtype(x.dtype) for x in rows)
        self.dtype = torch.promote_types(first, second)  # scorers see keys and values in one type

    def round(self, edges: int, scorer: Scorer, settings: Settings, room: list[Tensor]) -> None:
        """Merge ``edges`` slots of every head; survivors go to the front of ``room``, which may be where they are."""
        if self.noted is None:
            keys = self.rows[0].split(MOVE)
            self.noted = torch.cat([scorer.note(part.to(self.dtype)) for part in keys])
        score, source, target = self._propose(self.noted, scorer, settings)
        chosen = best(score, edges) if settings.rank == "sequence" else best_of_chunks(score, edges, self._chunks)
        movers, targets = self.free[source.expand_as(score)[chosen]], self.free[target[chosen]]
        changed, which = targets.unique(return_inverse=True)
        before = self.weights["degree"]
        self.weights = {
            name: weight.index_copy(0, changed, weight[changed] + _sums(weight[movers], which, len(changed)))
            for name, weight in self.weights.items()
        }
        if len(movers) != edges * self.heads:
            raise NonFiniteError(
                f"similarities are NaN, so {edges} merges per head cannot be chosen: keys or values are so long that "
                f"comparing them leaves {self.dtype}. Look for an overflow upstream"
            )
        # In the wider type, if keys and values differ: rounded to the narrower one this is what it would give itself.
        share = before[movers].to(self.dtype) / self.weights["degree"][targets].to(self.dtype)
        stays = torch.ones(len(self.origin), dtype=torch.bool)
        stays[movers] = False
        keep = stays.nonzero()[:, 0]
        landing = changed - torch.searchsorted(movers, changed)
        for i, (x, into) in enumerate(zip(self.rows, room, strict=True)):
            merged = _centroids(x, movers, targets, share.to(accumulation_dtype(x.dtype)), changed, which)
            self.rows[i] = _move_up(x, keep, int(movers[0]), into).index_copy_(0, landing, merged)
            if i == 0 and self.noted is not None:
                self.noted = self.noted.index_select(0, keep)
                self.noted[landing] = scorer.note(merged.to(self.dtype))
            del merged  # before the values' are made
        self.weights = {name: weight.index_select(0, keep) for name, weight in self.weights.items()}
        self.origin = self.origin.index_select(0, keep)
        left = self.free[stays.index_select(0, self.free)]
        self.free = left - torch.searchsorted(movers, left)

    def _block(self, x: Tensor, where: slice | Tensor, shape: tuple[int, int, int]) -> Tensor:
        rows = x[where] if isinstance(where, slice) else x.index_select(0, where.flatten())
        return rows.to(self.dtype).view(*shape, *x.shape[1:])

    def _propose(self, noted: Tensor, scorer: Scorer, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
        """Per head and source: the score [R, S] of its best target; both as places among the free slots."""
        c, n, heads = settings.chunk, len(self.free) // self.heads, self.heads
        a, full, tail = (c + 1) // 2, n // c, n % c
        weight = self.weights[settings.mass or "degree"]
        sources = full * a + (tail + 1) // 2 * (tail > 1)
        score, target = torch.empty(heads, sources, dtype=self.dtype), torch.empty(heads, sources, dtype=torch.long)
        start = int(self.free[0])
        lined_up = heads == 1 and int(self.free[-1]) - start == n - 1
        step = max(1, BLOCK // (heads * c * self.rows[0].shape[-1]))
        parts = [(i, min(i + step, full), c) for i in range(0, full, step)]
        if tail > 1:
            parts.append((full, full + 1, tail))
        begin = torch.arange(heads)[:, None, None] * n
        for first, last, length in parts:
            span = slice(first * c, (last - 1) * c + length)
            # Neighbours in memory are read where they are; others are brought together.
            where = slice(start + span.start, start + span.stop) if lined_up else self.free.view(heads, n)[:, span]
            shape = (heads, last - first, length)
            found, which = scorer(*(self._block(x, where, shape) for x in (*self.rows, weight, noted)))
            spot = slice(first * a, first * a + found[0].numel())
            score[:, spot] = found.flatten(1)
            target[:, spot] = (which * 2 + 1 + torch.arange(first, last)[:, None] * c + begin).flatten(1)
        self._chunks = [a] * full + [(tail + 1) // 2] * (tail > 1)
        place = torch.arange(sources)
        source = place.div(a, rounding_mode="floor") * c + place % a * 2
        return score, source + begin[:, 0], target


def best(score: Tensor, count: int) -> Tensor:
    """Mark the ``count`` largest entries of every row of ``score [R, S]``; ties go to the earliest."""
    if count >= score.shape[-1]:
        return torch.ones_like(score, dtype=torch.bool)
    if count == 0:
        return torch.zeros_like(score, dtype=torch.bool)
    least = score.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, level = score > least, score == least
    return above | (level & (level.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


def best_of_chunks(score: Tensor, count: int, chunks: list[int]) -> Tensor:
    """The same within each chunk, by its share of ``count``; ``chunks`` are equally long but for the last."""
    quotas, length, full = torch.tensor(share_out(count, chunks)), chunks[0], score.shape[-1] // chunks[0]
    table = score[:, : full * length].unflatten(1, (full, length))
    place = table.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)  # 0 = best of its chunk
    chosen = (place < quotas[:full, None]).flatten(1)
    if full < len(chunks):
        chosen = torch.cat((chosen, best(score[:, full * length :], int(quotas[-1]))), -1)
    return chosen


def _sums(rows: Tensor, which: Tensor, count: int) -> Tensor:
    return rows.new_zeros(count, *rows.shape[1:]).index_add_(0, which, rows)


def _centroids(x: Tensor, movers: Tensor, targets: Tensor, share: Tensor, changed: Tensor, which: Tensor) -> Tensor:
    """x_b + sum over the movers t of b of share_t (x_t - x_b) for the slots b in ``changed``; a few rows at a time."""

    def some(slots: Tensor, part: slice, scale: float) -> Tensor:
        rows = x.index_select(0, slots[part])
        return rows if scale == 1 else rows.to(share.dtype) * scale

    def mean(scale: float) -> Tensor:
        sums = share.new_zeros(len(changed), x.shape[-1])
        for begin in range(0, len(movers), MOVE):
            part = slice(begin, begin + MOVE)
            pull = some(movers, part, scale).to(share.dtype)
            pull.sub_(some(targets, part, scale)).mul_(share[part, None])
            sums.index_add_(0, which[part], pull)
        for begin in range(0, len(changed), MOVE):
            part = slice(begin, begin + MOVE)
            sums[part].add_(some(changed, part, scale))
        return sums

    return in_hull(mean, x.dtype)


def _move_up(x: Tensor, keep: Tensor, first: int, into: Tensor) -> Tensor:
    """The rows ``keep`` of ``x`` at the front of ``into``; ``first`` is the first row that leaves."""
    result = into[: len(keep)]
    if x.data_ptr() != into.data_ptr():
        return torch.index_select(x, 0, keep, out=result)
    # In place: rows only ever move towards the front, so a block read before it is written loses nothing.
    for begin in range(first, len(keep), MOVE):
        part = keep[begin : begin + MOVE]
        result[begin : begin + len(part)] = x.index_select(0, part)
    return result


class Blocked(Backend):
    """The blocked rounds as a back end."""

    name = "blocked"

    def why_not(self, stages: Stages) -> str | None:
        return why_no_settings(stages)

    def why_not_on(self, device: torch.device) -> str | None:
        return None if device.type == "cpu" else f"it is for the CPU, the state is on {device}"

    def why_not_these(self, state: KVState) -> str | None:
        for name, data in state.slot_data.items():
            rule = state.rule(name).merge
            if rule == "mean" or (rule == "sum" and (data.ndim > 3 or data.dtype != torch.float32)):
                return f"of slot data that merges it adds up float32 numbers only, not {name!r}"
        return None

    def run(self, stages: Stages, state: KVState, free: Tensor, sizes: Sequence[int]) -> KVState:
        return blocked_rounds(state, free, sizes, Settings.of(stages))


BLOCKED = Blocked()
