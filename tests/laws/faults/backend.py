"""Planted faults of backend: plausible wrong implementations, under the law that must reject them."""

from __future__ import annotations

import torch

from centroidkv.aggregate import DegreeWeightedMean
from centroidkv.matching import BipartiteSoftMatching
from centroidkv.testing import backend_laws
from tests.laws.faults.aggregate import Averaged, last_wins, unweighted
from tests.laws.faults.attention import attend, base
from tests.laws.faults.matching import Wrapped, least_similar
from tests.laws.stages import round_by_stages


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
