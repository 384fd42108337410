"""Planted faults of partition: plausible wrong implementations, under the law that must reject them."""

from __future__ import annotations

import itertools

import torch

from centroidkv.partition import Alternating
from centroidkv.records import Block, Partition
from centroidkv.testing import partition_laws

good_split = Alternating(6)


def split(length, sources, targets):
    return Partition.whole(list(sources), list(targets), length)


class GlobalSplit:
    def __call__(self, length):
        order = torch.randperm(length)
        return split(length, order[: length // 2], order[length // 2 :])


class ConsumedSplit:
    def __init__(self):
        self.calls = itertools.count()

    def __call__(self, length):
        start = next(self.calls) % 2
        return split(length, range(start, length, 2), range(1 - start, length, 2))


class Remembers:
    """Splits as it did the longest sequence so far, cut off."""

    def __init__(self):
        self.longest = 0

    def __call__(self, length):
        self.longest = max(self.longest, length)
        start = (self.longest - length) % 2
        return split(length, range(start, length, 2), range(1 - start, length, 2))


class Declared:
    """Alternation that says by ``capacity`` how many slots a round removes."""

    def __init__(self, capacity):
        self.say = capacity

    def __call__(self, length):
        return good_split(length)

    def capacity(self, length):
        return self.say(good_split(length).capacity, length)


PARTITION = {
    partition_laws.names_no_slot_twice: {
        "odd lengths wrap round": lambda n: split(n, range(0, n, 2), [*range(1, n, 2), *([0] if n % 2 else [])]),
        "one past the end": lambda n: split(n, range(0, n, 2), range(1, n + 1, 2)),
        "chunks overlap past 2048 slots": lambda n: (
            good_split(n)
            if n <= 2048
            else split(n, range(0, n, 2), range(1, n + n % 2, 2))
            if n % 2 == 0
            else split(n, range(n - 1), range(n - 2, n))
        ),
    },
    partition_laws.long_sequences_merge_too: {
        "a tile of 256 slots left in": lambda n: split(n, range(0, min(n, 256), 2), range(1, min(n, 256), 2)),
        "the first chunk only": lambda n: (
            Partition(
                n, (Block(good_split(min(n, 6)).blocks[0].sources[:1], good_split(min(n, 6)).blocks[0].targets[:1]),)
            )
            if n
            else good_split(0)
        ),
        "a buffer of 2048 slots": lambda n: split(n, range(0, min(n, 2048), 2), range(1, min(n, 2048), 2)),
    },
    partition_laws.declared_capacity_is_the_partitions: {
        "one too many": Declared(lambda right, n: right + 1),
        "all but one": Declared(lambda right, n: max(n - 1, 0)),
        "wrong for sequences of many chunks": Declared(lambda right, n: right - (n > 3000)),
        "wrong at a power of two": Declared(lambda right, n: right - (n == 2048)),
        "not whole": Declared(lambda right, n: float(right)),
    },
    partition_laws.chunks_do_not_interleave: {
        "chunks by stride": lambda n: (
            Partition(
                n, (Block(torch.arange(n // 2 * 2).view(2, -1)[:, ::2], torch.arange(n // 2 * 2).view(2, -1)[:, 1::2]),)
            )
            if n % 4
            else Partition(n, (Block(torch.arange(n).view(-1, 2).T[:, ::2], torch.arange(n).view(-1, 2).T[:, 1::2]),))
        ),
        "chunks of every second slot": lambda n: Partition(
            n,
            tuple(Block(torch.arange(i, n, 2)[None, ::2], torch.arange(i, n, 2)[None, 1::2]) for i in range(min(n, 2))),
        ),
    },
    partition_laws.capacity_is_positive_and_at_most_half: {
        "all sources": lambda n: split(n, range(n), []),
        "all targets": lambda n: split(n, [], range(n)),
    },
    partition_laws.is_pure: {
        "draws from the global generator": GlobalSplit(),
        "alternates between calls": ConsumedSplit(),
        "remembers the longest sequence": Remembers(),
        "seeds the global generator": lambda n: (torch.manual_seed(n), GlobalSplit()(n))[1],
    },
}
