"""Our reading of a configuration's RoPE against the model's own rotary module."""

import pytest
import torch
import transformers

from centroidkv.errors import RotaryError
from centroidkv.integrations.rope import rotary_of

KINDS = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}  # fmt: skip


NESTED = int(transformers.__version__.split(".")[0]) >= 5  # before, the base and the scaling were two fields


def stated(rope):
    """``rope`` as this release's configurations take it."""
    if NESTED:
        return {"rope_parameters": dict(rope)}
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    return {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
    }


def config(rope, **others):
    return transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=2048, **stated(rope), **others
    )


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_scaling_are_the_models(kind):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(config(KINDS[kind]))
    ours = rotary_of(theirs.config)
    assert torch.allclose(ours.inv_freq, theirs.inv_freq)
    assert ours.scaling == pytest.approx(theirs.attention_scaling)


def test_partial_rotation_is_read(monkeypatch):
    phi = transformers.Phi3Config(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0,
        **stated({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    )  # fmt: skip
    assert rotary_of(phi).inv_freq.shape == (8,)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_length_dependent_rotation_is_refused(kind):
    odd = config(KINDS["default"])
    if NESTED:
        odd.rope_parameters = {"rope_type": kind, "rope_theta": 1e4}
    else:
        odd.rope_scaling = {"rope_type": kind}
    with pytest.raises(RotaryError, match="sequence length"):
        rotary_of(odd)
