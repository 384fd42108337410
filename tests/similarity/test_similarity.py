import pytest
import torch

from centroidkv.errors import StageError
from centroidkv.similarity import Cosine, Dot, NegativeEuclidean


def test_values_by_hand():
    a, b = torch.tensor([[3.0, 4.0]]), torch.tensor([[4.0, 3.0], [0.0, 0.0], [-3.0, -4.0]])
    assert torch.allclose(Cosine()(a, b), torch.tensor([[0.96, 0.0, -1.0]]))
    assert torch.allclose(Dot()(a, b), torch.tensor([[24.0, 0.0, -25.0]]))
    assert torch.allclose(NegativeEuclidean()(a, b), -torch.tensor([[2**0.5, 5.0, 10.0]]))


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_cosine_ignores_scale_of_any_size(scale):
    a, b = torch.randn(5, 8), torch.randn(6, 8)
    assert torch.allclose(Cosine()(a * scale, b), Cosine()(a, b), atol=1e-6)


def test_euclidean_does_not_cancel_for_near_neighbours():
    a = torch.full((1, 64), 100.0)
    b = a.clone()
    b[0, 0] += 1e-3
    assert NegativeEuclidean()(a, b).item() == pytest.approx(-1e-3, rel=0.02)


@pytest.mark.parametrize("stage", [Cosine, Dot, NegativeEuclidean])
def test_bad_options_are_refused(stage):
    with pytest.raises(StageError, match="rope"):
        stage(rope="none")
    with pytest.raises(StageError, match="heads"):
        stage(heads="all")
