"""Inputs for laws: small descriptions that Hypothesis can shrink, and the tensors they stand for.

A case is a few integers and words, not a tensor: it prints in one line, shrinks well, and rebuilds the same tensors
anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from centroidkv.partition import Alternating, Halves, RandomSplit, Strided
from centroidkv.queries import QUERIES
from centroidkv.records import Partition
from centroidkv.rotary import Rotary
from centroidkv.state import KVState

KINDS = ("gaussian", "ties", "duplicates", "zeros", "extreme", "runs", "rotary", "equal")
"""gaussian: no structure. ties: few distinct similarities. duplicates: few distinct keys. zeros: some keys vanish.
extreme: norms from 1e-12 to 1e12. runs: near-identical neighbours. rotary: contents rotated by position, as real keys
are. equal: one key per head."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
PARTITIONS = {"alternating": Alternating, "halves": Halves, "strided": Strided, "random": RandomSplit}


def make_keys(kind: str, shape: tuple[int, int, int, int], generator: torch.Generator) -> Tensor:
    """Keys ``[B, H, T, D]`` of one of :data:`KINDS`, float32."""
    batch, heads, slots, size = shape
    normal = torch.randn(shape, generator=generator)
    if kind == "ties":
        return normal.round().clamp(-1, 1)
    if kind == "duplicates":
        few = torch.randn(batch, heads, 3, size, generator=generator)
        return few[:, :, torch.randint(3, (slots,), generator=generator)]
    if kind == "zeros":
        return normal * torch.randint(2, (batch, heads, slots, 1), generator=generator)
    if kind == "extreme":
        return normal * 10.0 ** (24 * torch.rand(batch, heads, slots, 1, generator=generator) - 12)
    if kind == "runs":
        run = torch.arange(slots) // 5
        return torch.randn(batch, heads, slots // 5 + 1, size, generator=generator)[:, :, run] + 1e-3 * normal
    if kind == "rotary":
        content = torch.randn(batch, heads, 1, size, generator=generator) + 0.3 * normal
        if size % 2:
            return content
        return Rotary.from_theta(1e4, size).rotate(content, torch.arange(slots).expand(batch, heads, slots))
    if kind == "equal":
        return torch.randn(batch, heads, 1, size, generator=generator).expand(shape).contiguous()
    return normal


@dataclass(frozen=True)
class StateCase:
    """A KVState in one line.

    ``merged``: degrees from 1 to ``spread``, times ``unit``, instead of all 1. ``pad``: left padding per row.
    ``values``: channels of a value. ``start``: position of the first slot. ``gaps``: every head has positions of
    its own, with holes, as after merging; ``narrow``: int32 ones, as caches have them.
    """

    slots: int
    kind: str = "gaussian"
    batch: int = 1
    heads: int = 1
    size: int = 4
    dtype: str = "float32"
    merged: bool = False
    strided: bool = False
    pad: tuple[int, ...] = ()
    seed: int = 0
    values: int = 3
    spread: int = 9
    unit: int = 1
    start: int = 0
    gaps: bool = False
    narrow: bool = False

    def generator(self) -> torch.Generator:
        """A generator that continues after the state's own draws would begin: for further random choices."""
        return torch.Generator().manual_seed(self.seed + 1)

    def state(self) -> KVState:
        """The state it stands for. Padded slots hold NaN: whoever reads them is found out."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.heads, self.slots, self.size)
        keys = make_keys(self.kind, shape, generator).to(DTYPES[self.dtype])
        values = torch.randn(*shape[:3], self.values, generator=generator).to(DTYPES[self.dtype])
        degree = torch.randint(1, self.spread + 1, shape[:3], generator=generator).float() if self.merged else None
        mask = torch.ones(self.batch, self.slots, dtype=torch.bool)
        for row, count in enumerate(self.pad[: self.batch]):
            mask[row, : min(count, self.slots)] = False
        keys = keys.masked_fill(~mask[:, None, :, None], float("nan"))
        values = values.masked_fill(~mask[:, None, :, None], float("nan"))
        if self.strided:  # the same numbers, laid out as projections lay them out
            keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
        rotary = Rotary.from_theta(1e4, self.size) if self.size % 2 == 0 else None
        state = KVState.from_kv(keys, values, mask, rotary=rotary)
        if self.start or self.gaps or self.narrow:
            draw = torch.Generator().manual_seed(self.seed + 3)
            step = torch.randint(1, 4, shape[:3], generator=draw).cumsum(-1) if self.gaps else 0
            places = (state.positions + step + self.start) * (state.degree > 0)
            state = replace(state, positions=places.int() if self.narrow else places)
        if rotary is not None:
            draw = torch.Generator().manual_seed(self.seed + 2)
            state = replace(state, head_data={QUERIES: torch.randn(*shape[:2], 6, self.size, generator=draw)})
        if degree is None:
            return state
        # One sum per row, as every head has seen the same; but not the same degrees in every head.
        order = torch.rand(shape[:3], generator=generator).argsort(-1)
        degree = (
            self.unit * degree[:, :1].expand(shape[:3]).gather(-1, order) if not self.pad else degree[:, :1] * self.unit
        )
        degree = degree.expand(shape[:3]) * state.degree
        return replace(state, degree=degree.contiguous(), seen=degree[:, 0].double().sum(-1).long())

    def other(self) -> KVState:
        """Another state of the same shape, types, degrees and positions: other keys, values and queries."""
        mine, other = self.state(), replace(self, seed=self.seed + 1009).state()
        return replace(other, degree=mine.degree, positions=mine.positions, seen=mine.seen)


def states(*, least: int = 0, most: int = 40, padded: bool = False, dtypes: tuple[str, ...] = ("float32", "bfloat16"),
           kinds: tuple[str, ...] = KINDS, gaps: bool = False) -> st.SearchStrategy[StateCase]:  # fmt: skip
    """Cases with ``least`` to ``most`` slots; ``gaps``: some with holes between positions."""
    return st.builds(
        StateCase,
        slots=st.integers(least, most),
        kind=st.sampled_from(kinds),
        batch=st.integers(1, 3),
        heads=st.integers(1, 3),
        size=st.sampled_from([2, 3, 8]),
        dtype=st.sampled_from(dtypes),
        merged=st.booleans(),
        strided=st.booleans(),
        pad=st.lists(st.integers(0, most), max_size=3).map(tuple) if padded else st.just(()),
        seed=st.integers(0, 999),
        values=st.sampled_from([1, 3, 5]),
        gaps=st.booleans() if gaps else st.just(False),
    )


SMALL_HEADS = StateCase(12, batch=2, heads=130, size=4, merged=True, seed=4)
"""More heads, and rows times heads, than any block of programs has."""
SMALL_ROWS = StateCase(12, batch=67, heads=2, size=4, merged=True, gaps=True, seed=5)
MANY_CHANNELS = StateCase(300, batch=2, heads=3, size=258, values=300, kind="rotary", merged=True, seed=2)
"""More slots and channels than any tile has, and more than two heads."""
MANY_SLOTS = StateCase(2100, heads=2, size=8, values=5, merged=True, spread=3000, gaps=True, seed=3)
"""More slots than are moved at once, and degrees that half precision does not hold."""
FAR_AND_HEAVY = StateCase(
    90, batch=2, heads=3, size=66, values=70, merged=True, unit=2**30, start=2**24 + 1, gaps=True, seed=6
)
"""Positions and degrees that float32, int32 or shorter types lose."""
BEYOND_TILES = (SMALL_HEADS, SMALL_ROWS, FAR_AND_HEAVY, MANY_CHANNELS, MANY_SLOTS)
"""Sizes past every tile, block, chunk and type in use: always tried. Tiles are 16 to 256 slots or channels, moves 2048
rows; in all directions one after the other, so that what is left out somewhere shows."""


@dataclass(frozen=True)
class MatchCase:
    """A state, a partition of its slots, how many edges are asked for (in hundredths of what is possible), and what
    the matcher is given to compare keys with.
    """

    state: StateCase
    split: str = "alternating"
    chunk_size: int | None = None
    percent: int = 50
    similarity: str = "cosine"

    def partition(self) -> Partition:
        """The partition of the state's slots."""
        return PARTITIONS[self.split](chunk_size=self.chunk_size)(self.state.slots)

    def edges(self, capacity: int) -> int:
        """How many edges to ask for."""
        return capacity * self.percent // 100


def matches(
    splits: tuple[str, ...] = tuple(sorted(PARTITIONS)), similarities: tuple[str, ...] = ("cosine",), **options: Any
) -> st.SearchStrategy[MatchCase]:
    """Cases for matchers: states of at least one slot, any partition of ``splits``, any number of edges."""
    return st.builds(
        MatchCase,
        state=states(**{"least": 1, "dtypes": ("float32",), **options}),
        split=st.sampled_from(splits),
        chunk_size=st.one_of(st.none(), st.integers(2, 9)),
        percent=st.integers(0, 100),
        similarity=st.sampled_from(similarities),
    )


BEYOND_MATCHES = (
    MatchCase(SMALL_HEADS, "halves", 5, 60, "dot"),
    MatchCase(SMALL_ROWS, "strided", None, 40, "distance"),
    MatchCase(replace(MANY_CHANNELS, dtype="float64"), "alternating", None, 70, "dot"),
    MatchCase(MANY_CHANNELS, "random", 140, 30, "distance"),
    MatchCase(MANY_SLOTS, "alternating", 7, 100, "cosine"),
    MatchCase(MANY_SLOTS, "alternating", None, 50, "dot"),
)
"""As BEYOND_TILES, with more than 64, 256 and 512 targets per chunk and more than 256 chunks: always tried."""


@dataclass(frozen=True)
class AttentionCase:
    """Queries, keys, values and degrees. ``holes``: some slots are empty."""

    slots: int
    length: int = 1
    batch: int = 1
    heads: int = 1
    groups: int = 1
    size: int = 4
    kind: str = "gaussian"
    dtype: str = "float32"
    holes: bool = False
    causal: bool = True
    seed: int = 0
    values: int = 3
    spread: int = 50

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """query, keys, values, degree."""
        generator = torch.Generator().manual_seed(self.seed)
        dtype = DTYPES[self.dtype]
        shape = (self.batch, self.heads, self.slots, self.size)
        keys = make_keys(self.kind, shape, generator).to(dtype)
        values = torch.randn(*shape[:3], self.values, generator=generator).to(dtype)
        query = torch.randn(self.batch, self.heads * self.groups, self.length, self.size, generator=generator).to(dtype)
        degree = torch.randint(0 if self.holes else 1, self.spread, shape[:3], generator=generator).float()
        return query, keys, values, degree


def attentions() -> st.SearchStrategy[AttentionCase]:
    """Cases for attention: at least as many slots as queries; no extreme norms (softmax would be one-hot)."""
    return st.builds(
        AttentionCase,
        slots=st.integers(4, 40),
        length=st.integers(1, 4),
        batch=st.integers(1, 2),
        heads=st.integers(1, 3),
        groups=st.integers(1, 3),
        size=st.sampled_from([2, 3, 8, 64]),
        kind=st.sampled_from([kind for kind in KINDS if kind != "extreme"]),
        dtype=st.sampled_from(sorted(DTYPES)),
        holes=st.booleans(),
        causal=st.booleans(),
        seed=st.integers(0, 999),
        values=st.sampled_from([1, 3, 16]),
        spread=st.sampled_from([50, 3000]),
    )


BEYOND_ATTENTIONS = (
    AttentionCase(12, 2, batch=2, heads=67, groups=2, seed=1),
    AttentionCase(12, 2, batch=67, heads=2, seed=2, holes=True, causal=False),
    AttentionCase(90, 70, heads=3, groups=2, size=66, values=70, seed=3),
    AttentionCase(300, 260, size=16, values=16, seed=4, dtype="float64"),
    AttentionCase(300, 3, batch=3, heads=3, groups=9, size=258, values=300, seed=5, spread=3000),
    AttentionCase(2100, 2, heads=3, groups=3, size=16, values=5, seed=6, spread=2**26, holes=True),
)
"""Sizes past every tile in use, also of queries: always tried."""
