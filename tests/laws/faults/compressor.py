"""Planted faults of compressor: plausible wrong implementations, under the law that must reject them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from centroidkv.testing import compressor_laws
from tests.laws.faults.aggregate import Averaged, unweighted
from tests.laws.stages import small


class Tampered:
    """A good compressor with its call changed; everything else is what the good one says."""

    def __init__(self, change, good=None):
        self.change, self.good = change, good or small()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.good, name)

    def __call__(self, state, *, strict=True):
        return self.change(self.good, state, strict)


def after(change, good=None):
    return Tampered(lambda c, state, strict: change(c(state, strict=strict)), good)


def fewer(state):
    return state.map_slots(lambda x: x[:, :, : max(state.slots - 1, 0)])


def in_place(c, state, strict):
    state.keys.mul_(2)
    return c(state, strict=strict)


def clears(c, state, strict):
    out = c(state, strict=strict).map_slots(torch.clone)
    state.degree.zero_()
    return out


class Remembers:
    def __init__(self):
        self.last = 0

    def __call__(self, c, state, strict):
        out = c(state, strict=strict)
        out = replace(out, values=out.values + self.last * 1e-2)
        self.last = state.slots
        return out


def row_dependent(c, state, strict):
    out = c(state, strict=strict)
    return replace(out, values=out.values * torch.arange(1, state.batch + 1)[:, None, None, None].to(out.values.dtype))


def one_head_decides(c, state, strict):
    out = c(state, strict=strict)
    return replace(out, keys=out.keys[:, :1].expand(out.keys.shape).contiguous())


def pads_right(c, state, strict):
    out = c(state, strict=strict)
    order = (~out.live).byte().argsort(dim=-1, stable=True)
    return out.select(order)


def counts_padding(c, state, strict):
    filled = replace(state, keys=state.keys.nan_to_num(0), values=state.values.nan_to_num(0),
                     degree=torch.ones_like(state.degree), positions=torch.arange(state.slots).expand(state.positions.shape),
                     seen=torch.full_like(state.seen, state.slots))  # fmt: skip
    return c(filled, strict=strict)


def noisy(c, state, strict):
    out = c(state, strict=strict)
    return replace(out, values=out.values + 1e-3 * torch.rand(()))


class UsedUp:
    def __init__(self, *rates):
        self.rates = iter(rates)

    def __call__(self, index):
        return next(self.rates, 0.05)


def past(most, change):
    """A fault that shows in states of more than so many slots only."""
    return Tampered(
        lambda c, state, strict: change(c(state, strict=strict)) if state.slots > most else c(state, strict=strict)
    )


def heads_mixed(c, state, strict):
    keys = state.keys + 0.3 * state.keys.mean(1, keepdim=True)
    smaller = c(replace(state, keys=keys), strict=strict)
    return smaller if smaller.slots == state.slots else replace(smaller, values=smaller.values + 0)


def other_rows(c, state, strict):
    smaller = c(state, strict=strict)
    return replace(smaller, values=smaller.values + 1e-2 * state.values.nan_to_num(0).mean().to(smaller.values.dtype))


class Pooling:
    """Keeps the slots that are largest over all heads, and does not say that heads look at each other."""

    share = None

    def count(self, budget):
        return 2

    def select(self, state, free, count):
        score = (
            state.keys.float().square().sum((1, 3), keepdim=False)[:, None].expand(free.shape).masked_fill(~free, -1)
        )
        order = score.argsort(-1, descending=True, stable=True)[..., :count]
        return free & torch.zeros_like(free).scatter(-1, order, True)


COMPRESSOR = {
    compressor_laws.plans_are_repeated: {
        "a schedule that is used up": small(schedule=UsedUp(0.3, 0.2, 0.1)),
        "rates by chance": small(schedule=lambda j: 0.1 + 0.3 * float(torch.rand(()))),
    },
    compressor_laws.rows_and_heads_are_compressed_alone: {
        "a preserver that pools heads": small(preserve=Pooling()),
        "keys of the other heads": Tampered(heads_mixed),
        "values of the other rows": Tampered(other_rows),
    },
    compressor_laws.length_equals_the_plan: {
        "one slot short": after(fewer),
        "does nothing": Tampered(lambda c, state, strict: state),
        "one slot short past 256": past(256, fewer),
        "rounds not counted": after(lambda s: replace(s, rounds=0)),
        "one round more": after(lambda s: replace(s, rounds=s.rounds + 1)),
    },
    compressor_laws.conserves_degree: {
        "degrees reset": after(lambda s: replace(s, degree=s.live.float())),
        "a token lost past 2048 slots": past(2048, lambda s: replace(s, degree=s.degree - (torch.arange(s.slots) == 7))),
        "degrees in bfloat16": after(lambda s: replace(s, degree=s.degree.bfloat16().float())),
        "degrees doubled": after(lambda s: replace(s, degree=s.degree * 2)),
        "drops the tail": after(fewer),
    },
    compressor_laws.keeps_order: {
        "positions through float32": after(lambda s: replace(s, positions=s.positions.float().to(s.positions.dtype))),
        "sorted by score": after(lambda s: s.map_slots(lambda x: x.flip(2))),
        "positions renumbered from one": after(lambda s: replace(s, positions=torch.arange(1, s.slots + 1).expand(s.positions.shape) * 3)),
    },
    compressor_laws.preserved_slots_are_identical: {
        "merges protected slots": Tampered(lambda c, state, strict: small(preserve=lambda s: s.positions < 0)(state, strict=strict)),
        "everything goes through half precision": after(lambda s: replace(s, values=(s.values.half() * 1.01).to(s.values.dtype))),
    },
    compressor_laws.within_budget_nothing_changes: {
        "always one fewer": after(fewer),
        "touches the values": after(lambda s: replace(s, values=s.values * 1.01)),
    },
    compressor_laws.leaves_its_input_alone: {
        "scales in place": Tampered(in_place),
        "clears the input": Tampered(clears),
        "slot data left out": after(lambda s: replace(s, slot_data={})),
        "head data left out": after(lambda s: replace(s, head_data={})),
    },
    compressor_laws.is_deterministic_and_stateless: {
        "state leaks between calls": Tampered(Remembers()),
        "a schedule that is used up": small(schedule=UsedUp(0.3, 0.2, 0.1)),
        "random noise": Tampered(noisy),
    },
    compressor_laws.permuting_rows_and_heads_commutes: {
        "scaled by row number": Tampered(row_dependent),
        "the first head's keys for all": Tampered(one_head_decides),
    },
    compressor_laws.padding_does_not_matter: {
        "padding counted as tokens": Tampered(counts_padding),
        "empty slots at the end": Tampered(pads_right),
    },
    compressor_laws.merging_equal_keys_leaves_attention: {
        "mean without degree": Tampered(lambda c, state, strict: small(aggregate=Averaged(unweighted))(state, strict=strict)),
        "degrees forgotten": after(lambda s: replace(s, degree=s.live.float())),
    },
}  # fmt: skip
