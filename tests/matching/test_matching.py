import itertools
from dataclasses import replace

import pytest
import torch

from centroidkv import Compressor, presets
from centroidkv.errors import StageError
from centroidkv.matching import AllPairsMatching, BipartiteSoftMatching, Evict, KMeans, ThresholdMatching, WardMatching
from centroidkv.matching.bipartite import share_out
from centroidkv.partition import Alternating
from centroidkv.queries import expected_attention
from centroidkv.records import Partition
from centroidkv.similarity import Cosine, ExpectedLogits, NegativeEuclidean


def match(stage, keys, edges, similarity=None, partition=None):
    keys = torch.as_tensor(keys, dtype=torch.float32)
    keys = keys.view(1, 1, *keys.shape) if keys.ndim == 2 else keys
    partition = (partition or Alternating(None))(keys.shape[2])
    return stage(keys, torch.ones(keys.shape[:3]), partition, similarity or NegativeEuclidean(), edges)


def test_the_closest_pairs_merge_first():
    joins = match(BipartiteSoftMatching(), [[0.0], [5.0], [5.1], [9.0], [9.05], [20.0]], 2).joins
    # sources 0, 2, 4 propose 1 (5.0 away), 1 (0.1 away), 3 (0.05 away)
    assert joins[0, 0].tolist() == [0, 1, 1, 3, 3, 5]


def test_ties_go_to_the_earliest_source_and_target():
    joins = match(BipartiteSoftMatching(), torch.zeros(8, 2), 2).joins
    assert joins[0, 0].tolist() == [1, 1, 1, 3, 4, 5, 6, 7]


def test_ranking_per_chunk_spreads_the_merges():
    keys = torch.arange(16.0)[:, None]
    keys[8:] *= 100  # far apart in the second chunk
    sequence = match(BipartiteSoftMatching("sequence"), keys, 4, partition=Alternating(8))
    chunk = match(BipartiteSoftMatching("chunk"), keys, 4, partition=Alternating(8))
    assert sequence.merges[0, 0, :8].sum() == 4
    assert chunk.merges[0, 0, :8].sum() == chunk.merges[0, 0, 8:].sum() == 2


def test_share_out_adds_up_and_respects_sizes():
    for sizes in itertools.product(range(4), repeat=3):
        for total in range(sum(sizes) + 1):
            parts = share_out(total, list(sizes))
            assert sum(parts) == total
            assert all(part <= size for part, size in zip(parts, sizes, strict=True))


def test_threshold_refuses_distant_pairs():
    keys = [[0.0], [0.1], [5.0], [7.0]]
    assert match(ThresholdMatching(-1.0), keys, 2).merges.sum() == 1
    assert match(ThresholdMatching(-3.0), keys, 2).merges.sum() == 2
    assert match(ThresholdMatching(-3.0), keys, 1).merges.sum() == 1


def greedy_pairs(scores, edges):
    """The definition, pair by pair."""
    order = sorted(itertools.combinations(range(len(scores)), 2), key=lambda pair: (-scores[pair[0]][pair[1]], pair))
    used, accepted = set(), []
    for i, j in order:
        if len(accepted) < edges and not used & {i, j}:
            accepted.append((i, j))
            used |= {i, j}
    return accepted


@pytest.mark.parametrize("edges", [1, 3, 5])
def test_all_pairs_is_the_greedy_matching(edges):
    keys = torch.randn(11, 4)
    joins = match(AllPairsMatching(), keys, edges, Cosine()).joins[0, 0]
    found = {(i, j) for i, j in enumerate(joins.tolist()) if i != j}
    assert found == set(greedy_pairs(Cosine()(keys, keys).tolist(), edges))


def test_all_pairs_finds_as_many_as_asked_among_equal_keys():
    assert match(AllPairsMatching(), torch.zeros(7, 2), 3).merges.sum() == 3


def test_kmeans_finds_separated_clusters():
    centres = torch.tensor([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0]])
    label = torch.arange(3).repeat_interleave(20)
    assignment = match(KMeans(), centres[label] + torch.randn(60, 2), 57)
    joins = assignment.joins[0, 0]
    assert assignment.stays.sum() == 3
    assert torch.equal(label[joins], label)


def test_kmeans_refills_clusters_that_lost_their_members():
    assignment = match(KMeans(), torch.zeros(10, 2), 6).validate()
    assert assignment.stays.sum() == 4


def test_evict_drops_the_earliest():
    assert match(Evict(), torch.randn(5, 2), 3).joins[0, 0].tolist() == [-1, -1, -1, 3, 4]


@pytest.mark.parametrize(
    "build",
    [lambda: BipartiteSoftMatching("head"), lambda: ThresholdMatching(float("nan")), lambda: KMeans(0)],
)
def test_bad_arguments_are_refused(build):
    with pytest.raises(StageError):
        build()


def test_ward_moves_light_slots_and_leaves_heavy_ones():
    # Sources 0 and 2 are equally far from their targets; the heavy pair costs more to merge.
    keys = torch.tensor([[[[0.0], [1.0], [10.0], [11.0]]]])
    mass = torch.tensor([[[5.0, 5.0, 1.0, 1.0]]])
    split = Partition.whole([0, 2], [1, 3], 4)
    assert WardMatching("degree")(keys, mass, split, NegativeEuclidean(), 1).joins.tolist() == [[[0, 1, 3, 3]]]
    assert WardMatching("degree")(keys, mass.flip(-1), split, NegativeEuclidean(), 1).joins.tolist() == [[[1, 1, 2, 3]]]


def test_the_weighted_squared_distance_is_the_growth_of_the_sum_of_squares():
    a, b = torch.randn(1, 3, dtype=torch.float64), torch.randn(1, 3, dtype=torch.float64)
    wa, wb = 3.0, 5.0
    mean = (wa * a + wb * b) / (wa + wb)
    growth = wa * (a - mean).square().sum() + wb * (b - mean).square().sum()
    square = -(a - b).square().sum().view(1, 1)
    cost = -WardMatching("degree").weigh(square, torch.tensor([wa]), torch.tensor([wb]))
    assert torch.allclose(cost, growth)


def test_importance_is_expected_attention_over_its_mean_plus_the_floor(make_state):
    state = make_state(30, queries=True)
    free = torch.ones_like(state.live)
    free[..., :3] = False
    importance = WardMatching(floor=0.2).prepare(state, free).slot_data["importance"]
    attention = expected_attention(state, None)
    wanted = attention / attention[..., 3:].mean(-1, keepdim=True) + 0.2
    assert torch.allclose(importance, wanted)


def test_importance_set_by_the_caller_is_used_summed_and_kept(make_state):
    state = make_state(30, queries=True)
    importance = torch.rand(state.degree.shape)
    state = replace(state, slot_data={"importance": importance, "tag": state.positions})
    compressor = (
        Compressor.builder().preserve().matching(WardMatching()).similarity(ExpectedLogits()).budget(0.5).build()
    )
    after = compressor(state)
    assert torch.allclose(after.slot_data["importance"].sum(-1), importance.sum(-1), rtol=1e-5)
    assert after.slot_data["tag"].equal(after.positions)
    assert set(after.head_data) == {"queries"}


def test_without_queries_the_error_says_what_to_do(make_state):
    with pytest.raises(StageError, match=r"sample_queries.*presets\.distinctive"):
        presets.balanced(80)(make_state(90))
