from dataclasses import replace

import pytest
import torch

from analysis.evaluation.fidelity.clusterings import CLUSTERINGS, AtRandom, MergeAfterEviction
from centroidkv import Budget, testing
from centroidkv.records import Partition
from centroidkv.similarity import Cosine


@pytest.mark.parametrize("name", CLUSTERINGS)
def test_every_clustering_reaches_the_budget_and_keeps_all_mass(name, make_state):
    smaller = CLUSTERINGS[name](Budget.tokens(120))(make_state(400, queries=True))
    assert smaller.slots == 120
    assert (smaller.degree.sum(-1) == 400).all()


def test_the_least_attended_join_the_most_similar_survivor():
    keys = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])[None, None]
    mass = torch.tensor([[[5.0, 1.0, 5.0, 2.0]]])
    joins = MergeAfterEviction()(keys, mass, Partition(4, ()), Cosine(), 2).joins
    assert joins.tolist() == [[[0, 0, 2, 2]]]


def test_random_scores_do_not_look_at_the_keys():
    a, b = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 6, 4)
    assert AtRandom()(a, b).equal(AtRandom()(a * 0, b * 0))
    assert AtRandom()(a, b).unique().numel() == 30


def test_merging_after_eviction_is_a_lawful_matcher():
    class ByMass(MergeAfterEviction):
        mass = None
        needs_queries = False

        def prepare(self, state, free):
            return state

    testing.check_compressor(
        replace(CLUSTERINGS["merge after eviction"](Budget.ratio(0.4)), matching=ByMass()), examples=5
    )
