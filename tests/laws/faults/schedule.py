"""Planted faults of schedule: plausible wrong implementations, under the law that must reject them."""

from __future__ import annotations

import torch

from centroidkv.testing import schedule_laws


class Consumed:
    def __init__(self):
        self.rate = 0.5

    def __call__(self, index):
        self.rate *= 0.9
        return self.rate


class UsedUp:
    """Rates from an iterator that the first sequence uses up."""

    def __init__(self, *rates):
        self.rates = iter(rates)

    def __call__(self, index):
        return next(self.rates, 0.05)


class Slower:
    """Lower rates once a long run was seen."""

    def __init__(self):
        self.most = 0

    def __call__(self, index):
        self.most = max(self.most, index)
        return 0.2 if self.most < 12 else 0.1


SCHEDULE = {
    schedule_laws.rates_are_shares: {
        "goes negative": lambda j: 0.5 - 0.1 * j,
        "in per cent": lambda j: 50.0,
        "a table of 512 rounds": lambda j: ([0.1] * 512)[j] if j < 600 else 0.1,
        "yes": lambda j: True,
    },
    schedule_laws.is_not_consumed: {
        "consumed by asking": Consumed(),
        "random": lambda j: float(torch.rand(())),
        "an iterator": UsedUp(0.3, 0.2, 0.1),
        "an iterator of many rates": UsedUp(*[0.1] * 500),
    },
    schedule_laws.plans_are_repeated: {
        "an iterator": UsedUp(0.3, 0.2, 0.1),
        "slower after a long run": Slower(),
    },
    schedule_laws.sizes_fall_within_capacity: {
        "a rate above one": lambda j: 2.0,
        "not a number": lambda j: float("nan"),
    },
    schedule_laws.stops_only_for_a_reason: {
        "negative": lambda j: -0.1,
        "a word": lambda j: "0.1",
    },
    schedule_laws.rates_never_rise: {
        "annealing with the sign wrong": lambda j: min(0.1 + 0.05 * j, 0.5),
        "restarts": lambda j: 0.5 - 0.1 * (j % 4),
        "restarts after 512 rounds": lambda j: 0.5 / (1 + j % 512),
    },
}
