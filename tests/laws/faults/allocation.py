"""Planted faults of allocation: plausible wrong implementations, under the law that must reject them."""

from __future__ import annotations

import torch

from centroidkv.testing import allocation_laws


class Evened:
    """Says that it is even."""

    even = True

    def __init__(self, shares):
        self.shares = shares

    def __call__(self, depths):
        return self.shares(depths)


class ByOrder:
    """More for the layers that were asked for first, over all calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, depths):
        self.calls += 1
        return ones(depths) if self.calls == 1 else pyramid(depths)


def ones(depths):
    return [1.0] * len(depths)


def pyramid(depths):
    weights = [2 - depth for depth in depths]
    return [weight * len(weights) / sum(weights) for weight in weights] if weights else []


def emptied(depths):
    shares = pyramid(depths)
    depths.clear()
    return shares


def by_chance(depths):
    weights = (0.5 + torch.rand(len(depths))).tolist()
    return [weight * len(weights) / sum(weights) for weight in weights] if weights else []


def table(depths):
    """A table of 64 layers."""
    return pyramid(depths) if len(depths) <= 64 else ones(depths)[:64]


def last_gets_the_rest(depths):
    return [1.5] * (len(depths) - 1) + [len(depths) - 1.5 * (len(depths) - 1)] if depths else []


ALLOCATION = {
    allocation_laws.every_layer_gets_a_share: {
        "a table of 64 layers": table,
        "what is left for the last layer": last_gets_the_rest,
        "nothing for the lowest": lambda depths: [0.0 if depth < 0.1 else 1.0 for depth in depths],
    },
    allocation_laws.shares_are_one_on_average: {
        "weights as they are": lambda depths: [2 - depth for depth in depths],
        "shares of one": lambda depths: [1 / max(len(depths), 1)] * len(depths),
        "one too many past 512 layers": lambda depths: [1.0 if len(depths) < 513 else 1.01] * len(depths),
    },
    allocation_laws.is_pure: {
        "the first call is even": ByOrder(),
        "empties its list": emptied,
        "by chance": by_chance,
    },
    allocation_laws.even_means_even: {
        "says that it is even": Evened(pyramid),
        "twice as much for all": Evened(lambda depths: [2.0] * len(depths)),
    },
    allocation_laws.budgets_add_up: {
        "weights as they are": lambda depths: [2 - depth for depth in depths],
        "one layer left out": lambda depths: ones(depths)[1:],
    },
}  # fmt: skip
