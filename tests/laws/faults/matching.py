"""Planted faults of matching: plausible wrong implementations, under the law that must reject them."""

from __future__ import annotations

from dataclasses import replace

import torch

from centroidkv.matching import BipartiteSoftMatching, ThresholdMatching, WardMatching
from centroidkv.matching.candidates import best, best_targets
from centroidkv.records import Assignment, Block, Partition
from centroidkv.similarity import Cosine, Dot, NegativeEuclidean
from centroidkv.testing import bipartite_laws, matching_laws


class Wrapped:
    """Bipartite soft matching with one thing changed."""

    def __init__(self, change, **capabilities):
        self.change = change
        self.__dict__.update(capabilities)

    def __call__(self, keys, degree, partition, similarity, edges):
        return self.change(BipartiteSoftMatching(), keys, degree, partition, similarity, edges)


def saying(**attributes):
    return Wrapped(lambda good, *given: good(*given), **attributes)


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


def first_64_targets(good, keys, degree, partition, similarity, edges):
    """A tile bound left in: targets from the 65th of a chunk on are never chosen."""
    bounded = lambda a, b: torch.where(torch.arange(b.shape[-2]) < 64, similarity(a, b), -1e9)  # noqa: E731
    return good(keys, degree, partition, bounded, edges)


def first_256_sources(good, keys, degree, partition, similarity, edges):
    """Sources past the 256th of a head come last."""
    candidates = best_targets(keys, partition, similarity)
    late = torch.arange(candidates.score.shape[-1]) >= 256
    return candidates.accept(best(candidates.score - 1e9 * late, edges))


def first_channels(most):
    return lambda good, k, d, p, s, r: good(k[..., :most], d, p, s, r)


def heads_past_64(good, keys, degree, partition, similarity, edges):
    index = torch.arange(keys.shape[1]).clamp(max=63)
    return good(keys[:, index], degree, partition, similarity, edges)


def own_cosine(good, keys, degree, partition, similarity, edges):
    return good(keys, degree, partition, Cosine(), edges)


def heads_shifted(good, keys, degree, partition, similarity, edges):
    return good(keys + torch.arange(keys.shape[1])[:, None, None], degree, partition, similarity, edges)


def rows_shifted(good, keys, degree, partition, similarity, edges):
    return good(keys + torch.arange(keys.shape[0])[:, None, None, None], degree, partition, similarity, edges)


def keys_in_place(good, keys, degree, partition, similarity, edges):
    keys.sub_(keys.mean(2, keepdim=True))
    return good(keys, degree, partition, similarity, edges)


def degree_in_place(good, keys, degree, partition, similarity, edges):
    out = good(keys, degree, partition, similarity, edges)
    degree.fill_(1)
    return out


class LastKeys:
    """Keys of the last call are mixed in where they fit."""

    def __init__(self):
        self.last = None

    def __call__(self, good, keys, degree, partition, similarity, edges):
        mixed = keys if self.last is None or self.last.shape != keys.shape else self.last
        self.last = keys.clone()
        return good(mixed, degree, partition, similarity, edges)


class Neighbours:
    """Of all slots, every second one joins its right neighbour, or none."""

    needs_partition = False

    def __init__(self, capacity, most=10**9, exact=True):
        self.say, self.most, self.exact = capacity, most, exact

    def capacity(self, length):
        return self.say(length)

    def __call__(self, keys, degree, partition, similarity, edges):
        joins = torch.arange(keys.shape[2]).repeat(*keys.shape[:2], 1)
        count = min(edges, keys.shape[2] // 2, self.most)
        joins[..., : 2 * count : 2] += 1
        return Assignment(joins)


class Weighing(WardMatching):
    """Ward's criterion with another weight than it says, or one that it does not use."""

    def __init__(self, weigh=None, run=None, prepare=None, **declared):
        super().__init__("degree")
        for name, value in {"_weigh": weigh, "_run": run, "_prepare": prepare, **declared}.items():
            object.__setattr__(self, name, value)

    def weigh(self, scores, source, target):
        return super().weigh(scores, source, target) if self._weigh is None else self._weigh(scores, source, target)

    def prepare(self, state, free):
        return state if self._prepare is None else self._prepare(state, free)

    def __call__(self, keys, degree, partition, similarity, edges):
        if self._run is None:
            return super().__call__(keys, degree, partition, similarity, edges)
        return self._run(BipartiteSoftMatching(), keys, degree, partition, similarity, edges)


class Bent(Wrapped):
    """Soft matching of keys that ``prepare`` bent by what it should not know."""

    mass = "bend"

    def __init__(self, bend, **capabilities):
        super().__init__(lambda good, k, d, p, s, r: good(k * d[..., None], d, p, s, r), **capabilities)
        self.bend = bend

    def prepare(self, state, free):
        return replace(state, slot_data={**state.slot_data, "bend": self.bend(state)})


class RankedByChunk(BipartiteSoftMatching):
    """Says that it ranks within chunks."""

    def __init__(self, run):
        super().__init__("chunk")
        object.__setattr__(self, "run", run)

    def __call__(self, *asked):
        return self.run(*asked)


def first_chunks(keys, degree, partition, similarity, edges):
    candidates = best_targets(keys, partition, similarity)
    return candidates.accept((torch.arange(candidates.score.shape[-1]) < edges).expand(candidates.score.shape))


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
        "keys of the last call": Wrapped(LastKeys()),
        "centres the keys in place": Wrapped(keys_in_place),
        "clears the degrees in place": Wrapped(degree_in_place),
        "random ties": Wrapped(lambda good, k, d, p, s, r: good(k, d, p, lambda a, b: s(a, b) + torch.rand(()) * a[..., :1], r)),
    },
    matching_laws.rows_and_heads_are_independent: {
        "the last head decides for all": Wrapped(from_first_head),
        "keys centred over rows and heads": Wrapped(over_rows),
        "heads past the 64th decide as it does": Wrapped(heads_past_64),
        "heads pooled without saying so": Bent(lambda s: s.keys.float().square().sum(-1).mean(1, keepdim=True).expand(s.degree.shape)),
    },
    matching_laws.uses_the_similarity_it_is_given: {
        "brings its own dot product": Wrapped(own_similarity),
        "brings its own distance": Wrapped(distance_similarity),
    },
    bipartite_laws.stays_within_sides_and_chunks: {
        "sources and targets swapped": Wrapped(ignores_sides),
        "chunks ignored": Wrapped(ignores_chunks),
    },
    bipartite_laws.joins_the_best_target: {
        "least similar": Wrapped(least_similar),
        "a tile of 64 targets left in": Wrapped(first_64_targets),
        "at most 64 channels": Wrapped(first_channels(64)),
        "at most 256 channels": Wrapped(first_channels(256)),
        "cosine, whatever is given": Wrapped(own_cosine),
        "a weight that is not used": Weighing(run=lambda good, *asked: good(*asked)),
        "first target": Wrapped(nearest_neighbour),
    },
    bipartite_laws.carries_out_the_best_edges: {
        "sorted the wrong way": Wrapped(lowest_rank),
        "ranked within chunks": BipartiteSoftMatching("chunk"),
        "256 sources first": Wrapped(first_256_sources),
    },
    bipartite_laws.ties_go_to_the_earliest: {
        "ties to the last": Wrapped(last_ties),
        "ties by hash": Wrapped(hashed_ties),
    },
    bipartite_laws.chunks_decide_alone: {
        "ranked over the sequence": RankedByChunk(BipartiteSoftMatching()),
        "the first chunks give all": RankedByChunk(first_chunks),
    },
    matching_laws.rows_and_heads_are_treated_alike: {
        "heads shifted by their number": Wrapped(heads_shifted),
        "rows shifted by their number": Wrapped(rows_shifted),
    },
    matching_laws.equal_slots_merge: {
        "not exact, and merges nothing": Wrapped(lambda good, k, d, p, s, r: good(k, d, p, s, 0), exact=False),
        "refuses equals": Wrapped(lambda good, k, d, p, s, r: good(k, d, p, s, 0 if bool((s(k, k) > 0.99).all()) else r), exact=False),
    },
    matching_laws.declared_capacity_is_kept: {
        "more than it can": Neighbours(lambda n: max(n - 1, 0)),
        "more than it can of 256 slots": Neighbours(lambda n: n // 2, most=100),
        "not whole": Neighbours(lambda n: n / 2),
        "all slots, without evicting": Neighbours(lambda n: n, exact=False),
        "nothing": Neighbours(lambda n: 0),
    },
    matching_laws.needs_only_what_it_says: {
        "un-rotates without saying so": Bent(lambda s: s.keys_before_rope("bend")[..., 0]),
        "looks at queries where there are some": Bent(lambda s: s.keys.float()[..., 0] * (s.head_data["queries"][:, :, :1, 0] if s.head_data else 1)),
    },
    matching_laws.declares_what_exists: {
        "a need misspelt": saying(need_partition=False),
        "a word for a yes": saying(exact="no"),
        "a number in place of a name": saying(mass=3),
        "a method that is none": saying(capacity=5),
    },
    matching_laws.weights_are_sound: {
        "weights of the source alone, as a column": Weighing(lambda scores, source, target: (scores * source[..., None]).sum(-1)),
        "in units of the largest": Weighing(lambda scores, source, target: scores * source[..., None] / (source.amax(-1, keepdim=True) + target.amax(-1, keepdim=True))[..., None]),
    },
}  # fmt: skip
