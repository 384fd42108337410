"""Planted faults of aggregate: plausible wrong implementations, under the law that must reject them."""

from __future__ import annotations

from dataclasses import replace

import torch

from centroidkv.aggregate import DegreeWeightedMean, KeepTargetKey
from centroidkv.state import KVState
from centroidkv.testing import aggregate_laws


class Averaged:
    """The right mean with one thing changed."""

    def __init__(self, change, base=None):
        self.change, self.base = change, base or DegreeWeightedMean()

    def __call__(self, state, assignment):
        return self.change(self.base(state, assignment), state, assignment)


def unweighted(merged, state, assignment):
    plain = DegreeWeightedMean()(replace(state, degree=torch.ones_like(state.degree)), assignment)
    return replace(merged, keys=plain.keys, values=plain.values)


def last_wins(merged, state, assignment):
    """A scatter that assigns instead of adding: one source per target counts."""
    moved = assignment.merges
    degree = state.degree.clone()
    for b, h, t in moved.nonzero().tolist():
        degree[b, h, assignment.joins[b, h, t]] = state.degree[b, h, assignment.joins[b, h, t]] + state.degree[b, h, t]
    return replace(merged, degree=degree)


def rounded(merged, state, assignment):
    return replace(merged, keys=merged.keys * 1.001, values=merged.values * 1.001)


def recomputed_everywhere(merged, state, assignment):
    """N k / n for every slot in half precision: lone slots move in the last bits."""
    weight = merged.degree[..., None] * 3
    return replace(merged, keys=((merged.keys * weight) / weight * (1 + 2**-12)).to(merged.keys.dtype),
                   values=((merged.values * weight) / weight * (1 + 2**-6)).to(merged.values.dtype))  # fmt: skip


def up_to_slots(most):
    """Slots past a tile keep what they had."""

    def change(merged, state, assignment):
        here = torch.arange(state.slots) < most
        return replace(
            merged,
            keys=torch.where(here[:, None], merged.keys, state.keys),
            values=torch.where(here[:, None], merged.values, state.values),
        )

    return change


def up_to_channels(most):
    """Channels past a tile keep what they had."""

    def change(merged, state, assignment):
        def cut(new, old):
            return torch.where(torch.arange(new.shape[-1]) < most, new, old)

        return replace(merged, keys=cut(merged.keys, state.keys), values=cut(merged.values, state.values))

    return change


def degrees_as(dtype):
    return lambda m, s, a: replace(m, degree=m.degree.to(dtype).float())


def positions_as(dtype):
    return lambda m, s, a: replace(m, positions=m.positions.to(dtype).to(m.positions.dtype))


def head_zeros_values(merged, state, assignment):
    return replace(merged, values=merged.values[:, :1].expand(merged.values.shape).contiguous())


def rows_of_the_first(merged, state, assignment):
    """Rows past the 64th are merged as the 64th is."""
    index = torch.arange(state.batch).clamp(max=63)
    return replace(merged, keys=merged.keys[index])


def heads_centred(merged, state, assignment):
    mean = state.values.float().mean(1, keepdim=True)
    return replace(
        merged, values=((merged.values.float() - mean) + mean.mean((0,), keepdim=True)).to(merged.values.dtype)
    )


def evicted_kept(merged, state, assignment):
    """Whoever is evicted joins the last slot: -1 as an index."""
    gone = torch.where(assignment.evicted, state.degree, 0.0).sum(-1)
    degree = merged.degree.clone()
    degree[..., -1] += gone
    return replace(merged, degree=degree)


class LastDegree:
    """A buffer of degrees that is not cleared for a state of the same shape."""

    def __init__(self):
        self.buffers = {}

    def __call__(self, merged, state, assignment):
        buffer = self.buffers.setdefault(state.degree.shape, torch.zeros_like(state.degree))
        out = merged.degree + buffer
        buffer += merged.degree - state.degree
        return replace(merged, degree=out)


def keys_in_place(merged, state, assignment):
    state.keys.copy_(merged.keys)
    return merged


AGGREGATE = {
    aggregate_laws.conserves_degree: {
        "degree of the target kept": Averaged(lambda m, s, a: replace(m, degree=s.degree)),
        "counts slots instead of tokens": Averaged(lambda m, s, a: replace(m, degree=m.degree - s.degree + 1)),
        "degree in bfloat16": Averaged(lambda m, s, a: replace(m, degree=(m.degree * 1000).bfloat16().float() / 1000)),
        "an assignment scatter": Averaged(last_wins),
        "degree in float16": Averaged(degrees_as(torch.float16)),
        "degree in int16": Averaged(degrees_as(torch.int16)),
        "degree in int32": Averaged(degrees_as(torch.int32)),
        "the evicted join the last slot": Averaged(evicted_kept),
    },
    aggregate_laws.values_are_weighted_means: {
        "mean without degree": Averaged(unweighted),
        "sum instead of mean": Averaged(lambda m, s, a: replace(m, values=m.values * (m.degree / s.degree)[..., None].to(m.values.dtype))),
        "target's value kept": Averaged(lambda m, s, a: replace(m, values=s.values)),
        "at most 64 slots": Averaged(up_to_slots(64)),
        "at most 2048 slots": Averaged(up_to_slots(2048)),
        "at most 64 channels": Averaged(up_to_channels(64)),
        "at most 256 channels": Averaged(up_to_channels(256)),
        "the first head's values": Averaged(head_zeros_values),
    },
    aggregate_laws.keys_are_weighted_means: {
        "mean without degree": Averaged(unweighted),
        "target's key kept": KeepTargetKey(),
        "at most 256 slots": Averaged(up_to_slots(256)),
        "rows past the 64th": Averaged(rows_of_the_first),
    },
    aggregate_laws.stays_inside_the_members: {
        "sum instead of mean": Averaged(lambda m, s, a: replace(m, keys=m.keys * (m.degree / s.degree)[..., None].to(m.keys.dtype))),
        "rescaled to the norm of the longest": Averaged(lambda m, s, a: replace(m, values=(m.values * 1.5).to(m.values.dtype))),
    },
    aggregate_laws.untouched_slots_are_identical: {
        "everything renormalised": Averaged(recomputed_everywhere),
        "everything scaled a little": Averaged(rounded),
    },
    aggregate_laws.positions_are_the_targets: {
        "mean position": Averaged(lambda m, s, a: replace(m, positions=(s.positions + a.joins) // 2 + (a.joins > 3).long())),
        "positions through float32": Averaged(positions_as(torch.float32)),
        "renumbered by slot": Averaged(lambda m, s, a: replace(m, positions=a.stays.long().cumsum(-1))),
    },
    aggregate_laws.rows_and_heads_merge_alone: {
        "the first head's values": Averaged(head_zeros_values),
        "values centred over heads": Averaged(heads_centred),
        "rows past the 64th": Averaged(rows_of_the_first),
    },
    aggregate_laws.carries_the_rest_on: {
        "a state of four tensors": Averaged(lambda m, s, a: KVState(m.keys, m.values, m.degree, m.positions)),
        "slot data left out": Averaged(lambda m, s, a: replace(m, slot_data={})),
        "head data averaged over heads": Averaged(lambda m, s, a: replace(m, head_data={n: d.mean(1, keepdim=True).expand(d.shape) for n, d in s.head_data.items()})),
    },
    aggregate_laws.remembers_nothing: {
        "a buffer that is not cleared": Averaged(LastDegree()),
        "merges in place": Averaged(keys_in_place),
    },
    aggregate_laws.two_steps_equal_one: {
        "mean without degree": Averaged(unweighted),
        "halfway to the target": Averaged(lambda m, s, a: replace(m, values=((m.values + s.values) / 2).to(m.values.dtype))),
    },
}  # fmt: skip
