"""Right but unusual stages: what the protocols allow and the laws must let pass."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import numpy
import torch
from torch.nn.functional import normalize

from centroidkv.aggregate import DegreeWeightedMean
from centroidkv.cache import Exact
from centroidkv.matching import BipartiteSoftMatching
from centroidkv.partition import Alternating
from centroidkv.records import Assignment, Block, Partition
from centroidkv.similarity import Cosine, NegativeEuclidean


class Slotted:
    """A class without a dictionary, of a numpy count."""

    __slots__ = ("many",)
    share = None

    def __init__(self, many):
        self.many = many

    def count(self, free_budget):
        return numpy.int64(self.many)

    def select(self, state, free, count):
        return free & (free.cumsum(-1) <= count)


class OfShare:
    """A share as a Fraction, rounded down to blocks of 8."""

    share = Fraction(1, 3)

    def count(self, free_budget):
        return numpy.int32(int(self.share * free_budget) // 8 * 8)

    def select(self, state, free, count):
        score = state.values.float().square().sum(-1).masked_fill(~free, -1)
        return free & (score.argsort(dim=-1, descending=True, stable=True).argsort(-1) < count)

    def rate(self, index):
        return Fraction(1, 5 + index)


PRESERVERS = {
    "a class with slots": Slotted(3),
    "a share in blocks of eight": OfShare(),
    "a function of positions": lambda state: state.positions < 2,
    "a function of nothing": lambda state: torch.zeros_like(state.live),
}


def but_last_chunk(length):
    whole = Alternating(6)(length)
    return Partition(length, whole.blocks[:1])


def but_the_recent(length):
    older = max(length - 20, min(length, 2))
    return range(0, older - older % 2, 2), range(1, older, 2)


class Counted:
    """Says its capacity as numpy does."""

    def __call__(self, length):
        return Alternating(8)(length)

    def capacity(self, length):
        return numpy.int64(Alternating(8).capacity(length))


class Overridden(Alternating):
    """Splits another way than the class it is made from, whose capacity nobody asks."""

    def __call__(self, length):
        return list(range(0, length - 1, 3)), list(range(1, length, 3))


def separate_blocks(length):
    """Every pair a block of its own, in any order."""
    pairs = [Block(torch.tensor([[i]]), torch.tensor([[i + 1]])) for i in range(0, min(length, 400) - 1, 2)]
    rest = range(min(length, 400) // 2 * 2, length)
    tail = Block(torch.tensor([list(rest[::2])]).long(), torch.tensor([list(rest[1::2])]).long())
    return Partition(length, (tail, *pairs[::-1])) if len(rest) > 1 else Partition(length, tuple(pairs[::-1]))


PARTITIONS = {
    "leaves the odd slot at the end out": lambda n: (range(0, n - n % 2, 2), range(1, n, 2)),
    "leaves the last chunk out": but_last_chunk,
    "starts at one": lambda n: ([0], [1]) if n in (2, 3) else (range(1, n - 1, 2), range(2, n, 2)),
    "numpy arrays": lambda n: (numpy.arange(0, n, 2), numpy.arange(1, n, 2)),
    "a list of tensors": lambda n: [torch.arange(n)[::2], torch.arange(n)[1::2].int()],
    "numpy's capacity": Counted(),
    "a subclass that splits another way": Overridden(8),
    "pairs in any order": separate_blocks,
    "keeps every slot but two of ten": lambda n: (range(0, n - 1, 10), range(1, n, 10)),
    "the recent window left out": but_the_recent,
}


class Halving:
    __slots__ = ()

    def __call__(self, index):
        return 2.0 ** -(index + 1)


SCHEDULES = {
    "numpy.float32": lambda j: numpy.float32(0.1),
    "numpy.float64": lambda j: numpy.float64(0.5) / (1 + j),
    "a whole number": lambda j: 1,
    "numpy's zero": lambda j: numpy.int64(0),
    "a Fraction": OfShare().rate,
    "a class with slots": Halving(),
    "a partial": partial(lambda rate, j: rate, 0.25),
    "a table that ends": lambda j: [0.5, 0.25, 0.1][j] if j < 3 else 0.0,
}


def cosine(a, b):
    return normalize(a, dim=-1) @ normalize(b, dim=-1).mT


SIMILARITIES = {
    "minus torch.cdist": lambda a, b: -torch.cdist(a, b),
    "normalised products": cosine,
    "in float64": lambda a, b: Cosine()(a, b).double(),
    "a radial kernel": lambda a, b: torch.exp(-0.1 * NegativeEuclidean()(a, b).square()),
    "one over the distance": lambda a, b: 1 / (1 - NegativeEuclidean()(a, b)),
    "a bound method": Cosine().__call__,
}


class Timid:
    """Merges at most one pair a head."""

    exact = False

    def __call__(self, keys, degree, partition, similarity, edges):
        return BipartiteSoftMatching()(keys, degree, partition, similarity, min(edges, 1))


class Positional:
    """Of all slots, every second one joins its neighbour, whatever the keys are."""

    needs_partition = False

    def capacity(self, length):
        return numpy.int64(length // 2)

    def __call__(self, keys, degree, partition, similarity, edges):
        joins = torch.arange(keys.shape[2]).repeat(*keys.shape[:2], 1)
        joins[..., : 2 * edges : 2] += 1
        return Assignment(joins)


class EvictsWorst:
    """Gives up the sources that resemble their targets least."""

    evicts = True
    needs_partition = False

    def capacity(self, length):
        return length

    def __call__(self, keys, degree, partition, similarity, edges):
        score = -keys.double().square().sum(-1)
        order = score.argsort(dim=-1, stable=True)[..., :edges]
        joins = torch.arange(keys.shape[2]).repeat(*keys.shape[:2], 1)
        return Assignment(joins.scatter(-1, order, -1))


MATCHERS = {
    "one pair a head": (Timid(), {"greedy": False}),
    "by position": (Positional(), {}),
    "evicts what it likes": (EvictsWorst(), {}),
    "a bound method": (BipartiteSoftMatching().__call__, {}),
    "a function": (lambda *asked: BipartiteSoftMatching()(*asked), {}),
}


def in_float64(state, assignment):
    """A loop over slots, in float64."""
    from dataclasses import replace

    keys, values, degree = state.keys.double(), state.values.double(), state.degree.double()
    index = torch.where(assignment.evicted, torch.arange(state.slots), assignment.joins)
    weight = torch.where(assignment.evicted, 0.0, degree)
    total = torch.zeros_like(degree).scatter_add(2, index, weight)

    def mean(x, old):
        wide = index[..., None].expand(x.shape)
        out = torch.zeros_like(x).scatter_add(2, wide, weight[..., None] * x) / total.clamp(min=1e-300)[..., None]
        lone = torch.zeros_like(degree).scatter_add(2, index, (weight > 0).double()) < 2
        return torch.where(lone[..., None], old, out.to(old.dtype))

    return replace(state, keys=mean(keys, state.keys), values=mean(values, state.values), degree=total.float())


AGGREGATORS = {
    "a loop in float64": in_float64,
    "laid out the other way": lambda s, a: DegreeWeightedMean()(s, a).map_slots(
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)
    ),
}

ALLOCATIONS = {
    "a tuple": lambda depths: (1.0,) * len(depths),
    "a numpy array": lambda depths: numpy.ones(len(depths), dtype=numpy.float32),
    "a tensor": lambda depths: torch.ones(len(depths)),
    "Fractions": lambda depths: [Fraction(1)] * len(depths),
    "falling with depth": lambda depths: [(2 - d) * len(depths) / math.fsum(2 - e for e in depths) for d in depths],
    "whole numbers": lambda depths: [1] * len(depths),
}


class PutAndGet:
    """Only what the protocol asks for."""

    def put(self, state):
        return Exact().put(state)

    def get(self, held, device):
        return Exact().get(held, device)


class Slow(PutAndGet):
    """Has one of the optional methods, and a form."""

    __slots__ = ()
    form = "slow"

    def fetch(self, held, device):
        return held.map(torch.clone)


STORAGES = {"put and get": PutAndGet(), "with fetch": Slow()}
