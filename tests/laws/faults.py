"""Planted faults: plausible wrong implementations, listed under the law that must reject them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from centroidkv.aggregate import DegreeWeightedMean, KeepTargetKey
from centroidkv.attention import degree_attention
from centroidkv.matching import BipartiteSoftMatching, ThresholdMatching
from centroidkv.matching.candidates import best, best_targets
from centroidkv.partition import Alternating
from centroidkv.records import Assignment, Block, Partition
from centroidkv.similarity import Cosine, Dot, NegativeEuclidean
from centroidkv.testing import (
    aggregate_laws,
    attention_laws,
    backend_laws,
    compressor_laws,
    matching_laws,
    partition_laws,
    preserve_laws,
    similarity_laws,
)
from tests.laws.stages import round_by_stages, small

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


PARTITION = {
    partition_laws.covers_every_slot_once: {
        "drops the odd tail": lambda n: split(n, range(0, n - n % 2, 2), range(1, n, 2)),
        "forgets the last chunk": lambda n: Partition(n, good_split(n).blocks[:1]),
        "starts at one": lambda n: split(n, range(1, n, 2), range(2, n, 2)),
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
    },
}


class Consumed:
    def __init__(self):
        self.rate = 0.5

    def __call__(self, index):
        self.rate *= 0.9
        return self.rate


SCHEDULE = {
    partition_laws.rates_are_shares: {
        "goes negative": lambda j: 0.5 - 0.1 * j,
        "in per cent": lambda j: 50.0,
    },
    partition_laws.is_not_consumed: {
        "consumed by asking": Consumed(),
        "random": lambda j: float(torch.rand(())),
    },
    partition_laws.sizes_fall_within_capacity: {
        "a rate above one": lambda j: 2.0,
        "not a number": lambda j: float("nan"),
    },
    partition_laws.stops_only_for_a_reason: {
        "negative": lambda j: -0.1,
        "a word": lambda j: "0.1",
    },
    partition_laws.rates_never_rise: {
        "annealing with the sign wrong": lambda j: min(0.1 + 0.05 * j, 0.5),
        "restarts": lambda j: 0.5 - 0.1 * (j % 4),
    },
}


def normalised_by_mean(a, b):
    scores = a @ b.mT
    return scores - scores.mean((-1, -2), keepdim=True)


SIMILARITY = {
    similarity_laws.scores_are_finite: {
        "divides by zero norms": lambda a, b: (a / a.norm(dim=-1, keepdim=True)) @ (b / b.norm(dim=-1, keepdim=True)).mT,
        "squares overflow": lambda a, b: ((a**4).sum(-1, keepdim=True) * (b**4).sum(-1)[..., None, :]).log(),
        "transposed": lambda a, b: Cosine()(b, a),
    },
    similarity_laws.is_symmetric: {
        "normalises one side": lambda a, b: (a / (a.norm(dim=-1, keepdim=True) + 1)) @ b.mT,
        "adds the column's norm": lambda a, b: Cosine()(a, b) + b.norm(dim=-1)[..., None, :].clamp(max=1),
    },
    similarity_laws.pairs_are_scored_alone: {
        "centred over the batch": normalised_by_mean,
        "softmax over the row": lambda a, b: Cosine()(a, b).softmax(-1),
    },
    similarity_laws.a_copy_is_most_similar: {
        "dot": Dot(),
        "squared cosine of the first channel": lambda a, b: a[..., :1] @ b[..., :1].mT,
    },
    similarity_laws.ignores_scale: {
        "dot": Dot(),
        "distance": NegativeEuclidean(),
    },
    similarity_laws.prefers_the_same_direction: {
        "distance with the sign wrong": lambda a, b: torch.cdist(a, b),
        "negated cosine": lambda a, b: -Cosine()(a, b),
    },
}  # fmt: skip


class Wrapped:
    """Bipartite soft matching with one thing changed."""

    def __init__(self, change, **capabilities):
        self.change = change
        self.__dict__.update(capabilities)

    def __call__(self, keys, degree, partition, similarity, edges):
        return self.change(BipartiteSoftMatching(), keys, degree, partition, similarity, edges)


def reassigned(change):
    def run(good, keys, degree, partition, similarity, edges):
        assignment = good(keys, degree, partition, similarity, edges)
        return Assignment(change(assignment.joins.clone(), partition, edges))

    return Wrapped(run)


def next_slot(joins, partition, edges):
    """Every leaver joins its right neighbour, whether that stays or not."""
    moved = joins != torch.arange(joins.shape[-1])
    return torch.where(moved, (joins * 0 + torch.arange(joins.shape[-1]) + 1).clamp(max=joins.shape[-1] - 1), joins)


def chained(joins, partition, edges):
    for head in joins.flatten(0, 1):
        moved = (head != torch.arange(len(head))).nonzero().flatten()
        if len(moved) > 1:
            head[moved[0]] = moved[1]
    return joins


def first_targets(joins, partition, edges):
    moved = joins != torch.arange(joins.shape[-1])
    return torch.where(moved, partition.targets[0], joins) if len(partition.targets) else joins


class Random:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, good, keys, degree, partition, similarity, edges):
        return good(keys + torch.randn(keys.shape, generator=self.generator), degree, partition, similarity, edges)


def from_first_head(good, keys, degree, partition, similarity, edges):
    shared = keys[-1:, -1:].expand(keys.shape)
    return good(shared, degree, partition, similarity, edges)


def over_rows(good, keys, degree, partition, similarity, edges):
    return good(keys - keys.mean((0, 1), keepdim=True), degree, partition, similarity, edges)


def own_similarity(good, keys, degree, partition, similarity, edges):
    return good(keys, degree, partition, Dot(), edges)


def distance_similarity(good, keys, degree, partition, similarity, edges):
    return good(keys, degree, partition, NegativeEuclidean(), edges)


def ignores_sides(good, keys, degree, partition, similarity, edges):
    flipped = Partition(partition.length, tuple(Block(b.targets, b.sources) for b in partition.blocks))
    return good(keys, degree, flipped, similarity, min(edges, flipped.capacity))


def ignores_chunks(good, keys, degree, partition, similarity, edges):
    whole = Partition.whole(partition.sources, partition.targets, partition.length)
    return good(keys, degree, whole, similarity, edges)


def least_similar(good, keys, degree, partition, similarity, edges):
    return good(keys, degree, partition, lambda a, b: -similarity(a, b), edges)


def nearest_neighbour(good, keys, degree, partition, similarity, edges):
    assignment = good(keys, degree, partition, similarity, edges)
    return Assignment(first_targets(assignment.joins.clone(), partition, edges))


def lowest_rank(good, keys, degree, partition, similarity, edges):
    """Takes the worst proposals: a sort in the wrong direction."""
    candidates = best_targets(keys, partition, similarity)
    return candidates.accept(best(-candidates.score, edges))


def last_ties(good, keys, degree, partition, similarity, edges):
    candidates = best_targets(keys, partition, similarity)
    return candidates.accept(best(candidates.score.flip(-1), edges).flip(-1))


def hashed_ties(good, keys, degree, partition, similarity, edges):
    candidates = best_targets(keys, partition, similarity)
    noise = torch.sin(12.9898 * torch.arange(candidates.score.shape[-1])) * 1e-6
    return candidates.accept(best(candidates.score + noise, edges))


MATCHING = {
    matching_laws.removes_as_many_as_asked: {
        "one too few": Wrapped(lambda good, k, d, p, s, r: good(k, d, p, s, r - 1)),
        "one too many": Wrapped(lambda good, k, d, p, s, r: good(k, d, p, s, min(r + 1, p.capacity + 1))),
        "a threshold that calls itself exact": Wrapped(lambda good, k, d, p, s, r: ThresholdMatching(0.5)(k, d, p, s, r)),
    },
    matching_laws.joins_slots_that_stay: {
        "joins whatever is next": reassigned(next_slot),
        "chains of merges": reassigned(chained),
    },
    matching_laws.is_deterministic: {
        "random noise": Wrapped(Random()),
        "random ties": Wrapped(lambda good, k, d, p, s, r: good(k, d, p, lambda a, b: s(a, b) + torch.rand(()) * a[..., :1], r)),
    },
    matching_laws.rows_and_heads_are_independent: {
        "the last head decides for all": Wrapped(from_first_head),
        "keys centred over rows and heads": Wrapped(over_rows),
    },
    matching_laws.uses_the_similarity_it_is_given: {
        "brings its own dot product": Wrapped(own_similarity),
        "brings its own distance": Wrapped(distance_similarity),
    },
    matching_laws.stays_within_sides_and_chunks: {
        "sources and targets swapped": Wrapped(ignores_sides),
        "chunks ignored": Wrapped(ignores_chunks),
    },
    matching_laws.joins_the_best_target: {
        "least similar": Wrapped(least_similar),
        "first target": Wrapped(nearest_neighbour),
    },
    matching_laws.carries_out_the_best_edges: {
        "sorted the wrong way": Wrapped(lowest_rank),
        "ranked within chunks": BipartiteSoftMatching("chunk"),
    },
    matching_laws.ties_go_to_the_earliest: {
        "ties to the last": Wrapped(last_ties),
        "ties by hash": Wrapped(hashed_ties),
    },
}  # fmt: skip


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


AGGREGATE = {
    aggregate_laws.conserves_degree: {
        "degree of the target kept": Averaged(lambda m, s, a: replace(m, degree=s.degree)),
        "counts slots instead of tokens": Averaged(lambda m, s, a: replace(m, degree=m.degree - s.degree + 1)),
        "degree in bfloat16": Averaged(lambda m, s, a: replace(m, degree=(m.degree * 1000).bfloat16().float() / 1000)),
        "an assignment scatter": Averaged(last_wins),
    },
    aggregate_laws.values_are_weighted_means: {
        "mean without degree": Averaged(unweighted),
        "sum instead of mean": Averaged(lambda m, s, a: replace(m, values=m.values * (m.degree / s.degree)[..., None].to(m.values.dtype))),
        "target's value kept": Averaged(lambda m, s, a: replace(m, values=s.values)),
    },
    aggregate_laws.keys_are_weighted_means: {
        "mean without degree": Averaged(unweighted),
        "target's key kept": KeepTargetKey(),
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
        "renumbered by slot": Averaged(lambda m, s, a: replace(m, positions=a.stays.long().cumsum(-1))),
    },
    aggregate_laws.two_steps_equal_one: {
        "mean without degree": Averaged(unweighted),
        "halfway to the target": Averaged(lambda m, s, a: replace(m, values=((m.values + s.values) / 2).to(m.values.dtype))),
    },
}  # fmt: skip


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


COMPRESSOR = {
    compressor_laws.length_equals_the_plan: {
        "one slot short": after(fewer),
        "does nothing": Tampered(lambda c, state, strict: state),
    },
    compressor_laws.conserves_degree: {
        "degrees reset": after(lambda s: replace(s, degree=s.live.float())),
        "degrees doubled": after(lambda s: replace(s, degree=s.degree * 2)),
        "drops the tail": after(fewer),
    },
    compressor_laws.keeps_order: {
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
    },
    compressor_laws.is_deterministic_and_stateless: {
        "state leaks between calls": Tampered(Remembers()),
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


def attend(change):
    def run(query, keys, values, degree, *, causal=True):
        return change(query, keys, values, degree, causal)

    return run


def base(q, k, v, n, causal):
    return degree_attention(q, k, v, n, causal=causal, backend="reference")


ATTENTION = {
    attention_laws.equals_the_definition: {
        "bias forgotten": attend(lambda q, k, v, n, c: base(q, k, v, (n > 0).float(), c)),
        "bias sign wrong": attend(lambda q, k, v, n, c: base(q, k, v, torch.where(n > 0, 1 / n, 0.0), c)),
        "scale forgotten": attend(lambda q, k, v, n, c: base(q * q.shape[-1] ** 0.5, k, v, n, c)),
        "heads interleaved": attend(lambda q, k, v, n, c: base(q.flip(1), k, v, n, c)),
        "causal off by one": attend(lambda q, k, v, n, c: base(q, k, v, n, False)),
    },
    attention_laws.degree_counts_copies: {
        "bias forgotten": attend(lambda q, k, v, n, c: base(q, k, v, (n > 0).float(), c)),
        "square root of the degree": attend(lambda q, k, v, n, c: base(q, k, v, n.sqrt(), c)),
    },
    attention_laws.empty_slots_are_absent: {
        "log of degree plus one": attend(lambda q, k, v, n, c: base(q, k, v, n + 1, c)),
        "empty slots clamped to one": attend(lambda q, k, v, n, c: base(q, k, v, n.clamp(min=1), c)),
    },
    attention_laws.slots_are_a_set: {
        "the last slot counts double": attend(lambda q, k, v, n, c: base(q, k, v, torch.cat((n[..., :-1], n[..., -1:] * 2), -1), c)),
        "recency bias": attend(lambda q, k, v, n, c: base(q, k, v, n * (1 + torch.arange(n.shape[-1])), c)),
    },
    attention_laws.only_ratios_of_degrees_matter: {
        "degree plus one": attend(lambda q, k, v, n, c: base(q, k, v, torch.where(n > 0, n + 1, n), c)),
        "degree clamped": attend(lambda q, k, v, n, c: base(q, k, v, n.clamp(max=64), c)),
    },
}  # fmt: skip


def changed_round(change):
    """A pair of the round as the stages do it, with one thing changed, and that round itself."""

    def run(keys, values, degree, positions, chunk, quotas):
        return change(keys, values, degree, positions, chunk, quotas)

    return backend_laws.Pair(run, round_by_stages)


def unweighted_round(keys, values, degree, positions, chunk, quotas):
    plain = round_by_stages(keys, values, torch.ones_like(degree), positions, chunk, quotas)
    return (*plain[:2], *round_by_stages(keys, values, degree, positions, chunk, quotas)[2:])


def first_sources_round(keys, values, degree, positions, chunk, quotas):
    """Ranks by place instead of similarity: equal keys make every source as good as any."""
    alike = round_by_stages(torch.ones_like(keys), values, degree, positions, chunk, quotas)
    return (round_by_stages(keys, values, degree, positions, chunk, quotas)[0], *alike[1:])


def shorter_chunk_round(keys, values, degree, positions, chunk, quotas):
    """Chunks one slot off."""
    return round_by_stages(keys, values, degree, positions, chunk + 1, quotas)


def swapped_round(keys, values, degree, positions, chunk, quotas):
    """Stays and leavers compacted one after the other: the first two slots change places."""
    out = round_by_stages(keys, values, degree, positions, chunk, quotas)
    order = torch.arange(out[0].shape[2])
    order[:2] = order[:2].flip(0)
    return tuple(x[:, :, order] for x in out)


def coarse_round(keys, values, degree, positions, chunk, quotas):
    """Everything written through the mean, in half precision: slots that nothing joined move in the last bits."""
    out = round_by_stages(keys, values, degree, positions, chunk, quotas)
    return (out[0], (out[1].float() * (1 + 2**-6)).to(values.dtype), *out[2:])


BACKEND = {
    backend_laws.matches_as_well: {
        "least similar": backend_laws.Pair(Wrapped(least_similar), BipartiteSoftMatching()),
        "one too few": backend_laws.Pair(Wrapped(lambda good, k, d, p, s, r: good(k, d, p, s, r - 1)), BipartiteSoftMatching()),
    },
    backend_laws.merges_as_the_reference: {
        "mean without degree": backend_laws.Pair(Averaged(unweighted), DegreeWeightedMean()),
        "an assignment scatter": backend_laws.Pair(Averaged(last_wins), DegreeWeightedMean()),
    },
    backend_laws.attends_as_the_reference: {
        "bias forgotten": backend_laws.Pair(attend(lambda q, k, v, n, c: base(q, k, v, (n > 0).float(), c)), attend(base)),
        "always causal": backend_laws.Pair(attend(lambda q, k, v, n, c: base(q, k, v, n, True)), attend(base)),
    },
    backend_laws.rounds_as_the_reference: {
        "mean without degree": changed_round(unweighted_round),
        "the first sources leave": changed_round(first_sources_round),
        "chunks one slot off": changed_round(shorter_chunk_round),
        "two slots out of order": changed_round(swapped_round),
        "lone slots rewritten": changed_round(coarse_round),
    },
}  # fmt: skip


class Choosing:
    """A preserver made of two functions."""

    share = None

    def __init__(self, select, count=lambda budget: 3, share=None):
        self._select, self.count, self.share = select, count, share

    def select(self, state, free, count):
        return self._select(state, free, count)


def noisy_choice(state, free, count):
    return free & (torch.rand(free.shape).masked_fill(~free, -1).argsort(-1, descending=True).argsort(-1) < count)


def by_batch_mean(state, free, count):
    score = (state.keys.float() - state.keys.float().mean((0, 1), keepdim=True)).norm(dim=-1)
    return free & (score.masked_fill(~free, -1).argsort(-1, descending=True).argsort(-1) < count)


PRESERVE = {
    preserve_laws.chooses_that_many_free_slots: {
        "the first slots, free or not": Choosing(lambda s, free, n: torch.arange(s.slots).expand(free.shape) < n),
        "one too few": Choosing(lambda s, free, n: free & (free.cumsum(-1) < n)),
        "a threshold": Choosing(lambda s, free, n: free & (s.keys[..., 0] > 0)),
    },
    preserve_laws.rows_and_heads_choose_alone: {
        "random": Choosing(noisy_choice),
        "keys centred over rows and heads": Choosing(by_batch_mean),
    },
    preserve_laws.counts_are_sound: {
        "a share that rounds up and adds one": Choosing(None, lambda budget: int(budget * 0.5) + 1, share=0.5),
        "not whole": Choosing(None, lambda budget: budget / 2, share=0.5),
    },
}

FAULTS = PRESERVE | PARTITION | SCHEDULE | SIMILARITY | MATCHING | AGGREGATE | COMPRESSOR | ATTENTION | BACKEND
