"""The queries a layer has asked since it was last compressed."""

from __future__ import annotations

import torch
from torch import Tensor

from centroidkv.cache.storage import Held, own
from centroidkv.queries import SAMPLE, evenly, sample_queries
from centroidkv.rotary import Rotary
from centroidkv.state import gather_slots


class QueryLog:
    """Collects queries step by step and hands out an even sample per row.

    Holds at most 2 * SAMPLE positions: long steps are thinned as they come, many short ones once they add up. A row is
    forgotten when it is compressed, so between two events at most the interval's queries are held.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[Tensor, Tensor]] = []
        """(queries ``[B, Hq, L, D]`` before RoPE and scaled, which of them count ``[B, L]``)"""

    def copy(self) -> QueryLog:
        """A log that can be changed without touching this one; tensors are shared, as none is ever written to."""
        twin = QueryLog()
        twin._steps = list(self._steps)
        return twin

    def extended(self, queries: Tensor, positions: Tensor, real: Tensor | None, rotary: Rotary) -> QueryLog:
        """A log with one more step's queries, as they were before RoPE; this one is not changed, the step may yet fail.

        Args:
            queries: ``[B, Hq, L, D]``, after RoPE.
            positions: of everything held, these tokens' last: ``[B, H, T]``.
            real: which of them count, ``[B, L]``; None: all.
            rotary: how they were rotated.
        """
        log = self.copy()
        positions = positions[:, :1, -queries.shape[2] :].expand(queries.shape[:3])
        counts = queries.new_ones(queries.shape[0], queries.shape[2], dtype=torch.bool) if real is None else real != 0
        # Thinned first: of a long prompt only the sample is un-rotated, not every query.
        counts, queries, positions = thin(counts, queries, positions)
        log.add(rotary.unrotate(queries, positions).to(queries.dtype), counts)
        return log

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(queries.nbytes + counts.nbytes for queries, counts in self._steps)

    @property
    def steps(self) -> list[tuple[Tensor, Tensor]]:
        """(queries, which of them count) of every step."""
        return list(self._steps)

    def add(self, queries: Tensor, real: Tensor) -> None:
        """Note one step's ``queries [B, Hq, L, D]``, of which ``real [B, L]`` are not padding."""
        counts, queries = thin(real, queries)
        self._steps.append((queries, counts))
        if sum(step.shape[2] for step, _ in self._steps) > 2 * SAMPLE:
            queries, counts = self._together()
            counts, queries = thin(counts, queries)
            self._steps = [(queries, counts)]

    def sample(self, rows: list[int], heads: int) -> Tensor:
        """``[len(rows), H, G * SAMPLE, D]`` for ``head_data["queries"]``; rows that asked nothing get zeros."""
        queries, counts = self._together()
        picked = [
            sample_queries(queries[row : row + 1, :, counts[row]], heads)
            if bool(counts[row].any())
            else queries.new_zeros(1, heads, queries.shape[1] // heads * SAMPLE, queries.shape[-1])
            for row in rows
        ]
        return torch.cat(picked)

    def forget(self, rows: list[int]) -> None:
        """Start anew for ``rows``; steps that no row needs any more are freed."""
        if not rows or not self._steps:
            return
        stays = torch.ones(self._steps[0][1].shape[0], 1, dtype=torch.bool, device=self._steps[0][1].device)
        stays[rows] = False
        left = [(queries, counts & stays) for queries, counts in self._steps]
        self._steps = [(queries, counts) for queries, counts in left if bool(counts.any())]

    def reorder(self, rows: Tensor) -> None:
        """Keep, repeat or permute rows."""
        self._steps = [
            (queries[rows.to(queries.device)], counts[rows.to(counts.device)]) for queries, counts in self._steps
        ]

    def crop(self, tokens: int) -> None:
        """Take back the last ``tokens`` columns, as far as they were not thinned."""
        while tokens > 0 and self._steps:
            queries, counts = self._steps.pop()
            left = queries.shape[2] - tokens
            if left > 0:
                self._steps.append((queries[:, :, :left], counts[:, :left]))
            tokens -= queries.shape[2]

    def pack(self) -> Held:
        """The steps as they are."""
        return Held(
            {
                f"{number}.{name}": own(tensor)
                for number, step in enumerate(self._steps)
                for name, tensor in zip(("queries", "counts"), step, strict=True)
            }
        )

    @classmethod
    def unpack(cls, held: Held, device: torch.device) -> QueryLog:
        """What :meth:`pack` returned, on ``device``."""
        log, near = cls(), held.map(lambda tensor: tensor.to(device)).tensors
        log._steps = [(near[f"{n}.queries"], near[f"{n}.counts"]) for n in range(len(near) // 2)]
        return log

    def _together(self) -> tuple[Tensor, Tensor]:
        return torch.cat([step for step, _ in self._steps], 2), torch.cat([counts for _, counts in self._steps], 1)


def thin(counts: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
    """SAMPLE columns per row, spread evenly over those that count: ``counts [B, L]`` and every ``[B, n, L, ...]``.

    Up to SAMPLE columns come back as they are; a row in which none counts stays without.
    """
    width = counts.shape[1]
    if width <= SAMPLE:
        return counts, *columns
    # Columns that count, in order, then the others: index j of a row with c of them is column order[j * c // SAMPLE].
    order = counts.byte().argsort(dim=-1, descending=True, stable=True)
    total = counts.sum(-1).tolist()
    index = torch.stack(
        [row[evenly(max(n, 1)).clamp(max=width - 1).to(row.device)] for row, n in zip(order, total, strict=True)]
    )
    some = torch.tensor(total, device=counts.device) > 0
    kept = (gather_slots(x, index[:, None].expand(-1, x.shape[1], -1)) for x in columns)
    return some[:, None].expand(-1, SAMPLE).clone(), *kept
