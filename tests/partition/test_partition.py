import pytest
import torch

from centroidkv.errors import StageError
from centroidkv.partition import Alternating, Halves, RandomSplit, Strided


def test_alternating_pairs_neighbours_in_chunks():
    partition = Alternating(4)(10)
    assert [block.sources.tolist() for block in partition.blocks] == [[[0, 2], [4, 6]], [[8]]]
    assert [block.targets.tolist() for block in partition.blocks] == [[[1, 3], [5, 7]], [[9]]]


def test_halves_and_strided():
    assert Halves(None)(5).sources.tolist() == [0, 1]
    assert Strided(4, 8)(8).targets.tolist() == [3, 7]
    assert Strided(2, None)(8).sources.tolist() == Alternating(None)(8).sources.tolist()
    assert Strided(4, 8)(6).targets.tolist() == [3, 5]


def test_random_split_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    RandomSplit(seed=1)(64)
    assert torch.equal(torch.rand(3), expected)
    assert RandomSplit(seed=1)(64).sources.tolist() != RandomSplit(seed=2)(64).sources.tolist()


@pytest.mark.parametrize("stage", [Alternating(4), Halves(4), Strided(3, 4), RandomSplit(0, 4)])
def test_a_lone_tail_slot_is_kept(stage):
    partition = stage(9)
    assert 8 in (*partition.sources.tolist(), *partition.targets.tolist())
    assert partition.capacity == 4


@pytest.mark.parametrize("chunk_size", [1, 0, -3, 2.5, "all"])
@pytest.mark.parametrize("family", [Alternating, Halves])
def test_bad_chunk_sizes_are_refused(family, chunk_size):
    with pytest.raises(StageError, match="chunk_size"):
        family(chunk_size)


def test_bad_stride_is_refused():
    with pytest.raises(StageError, match="stride"):
        Strided(stride=1)
