import pytest
import torch

from centroidkv import Rotary
from centroidkv.errors import RotaryError


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scaling", [1.0, 1.3])
def test_unrotate_undoes_rotate_at_large_positions(interleaved, scaling):
    rotary = Rotary(Rotary.from_theta(1e5, 32).inv_freq, scaling, interleaved)
    keys = torch.randn(1, 2, 6, 40)
    positions = torch.tensor([0, 1, 2, 1000, 100_000, 1_000_000]).expand(1, 2, 6)
    assert torch.allclose(rotary.unrotate(rotary.rotate(keys, positions), positions), keys, atol=2e-6)


def test_rotation_is_the_one_of_llama():
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    keys, positions = torch.randn(1, 2, 50, 32), torch.arange(50)[None]
    cos, sin = LlamaRotaryEmbedding(config)(keys, positions)
    rotated = apply_rotary_pos_emb(keys, keys, cos, sin)[1]
    ours = Rotary.from_theta(1e4, 32).rotate(keys, positions.expand(1, 2, 50))
    assert torch.allclose(ours, rotated, atol=1e-5)


def test_too_few_channels_are_refused():
    with pytest.raises(RotaryError, match="only 4"):
        Rotary.from_theta(1e4, 8).rotate(torch.randn(1, 1, 2, 4), torch.zeros(1, 1, 2))
    with pytest.raises(RotaryError, match="even"):
        Rotary.from_theta(1e4, 7)
