"""How a model rotates its keys, read off its configuration as transformers has it; vLLM and kvpress have the same."""

from __future__ import annotations

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from centroidkv.errors import RotaryError
from centroidkv.rotary import Rotary

HALF_LAYOUT = frozenset(
    (
        *("gemma", "gemma2", "gemma3", "gemma3_text", "granite", "llama", "mistral", "mixtral", "olmo", "olmo2"),
        *("phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"),
    )
)
"""Model types that pair channel i with i + h. Others are refused rather than guessed: a wrong pairing would not fail,
it would quietly compare scrambled keys."""

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""RoPE types whose frequencies change with the sequence length, so that cached keys do not share one rotation."""


def rotary_of(config: Any, layer_type: str = "full_attention") -> Rotary:
    """The rotation of a decoder's ``layer_type`` layers.

    Raises:
        RotaryError: the layout or the scaling of this model is not known; says how to pass it by hand.
    """
    by_hand = (
        "pass CentroidCache(..., rotary=Rotary(inv_freq, ...)), or choose a compressor that looks at keys as cached"
    )
    if config.model_type not in HALF_LAYOUT:
        raise RotaryError(f"the channel layout of RoPE in {config.model_type!r} models is not known here; {by_hand}")
    parameters = rope_parameters(config, layer_type)
    if not parameters or "rope_theta" not in parameters:
        raise RotaryError(f"the configuration of this {config.model_type!r} model has no rope_theta; {by_hand}")
    kind = parameters.get("rope_type", "default")
    if kind in LENGTH_DEPENDENT:
        raise RotaryError(f"RoPE of type {kind!r} changes with the sequence length; {by_hand}")
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    partial = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    if kind == "default":
        return Rotary.from_theta(parameters["rope_theta"], int(size * partial))
    if kind not in ROPE_INIT_FUNCTIONS:
        raise RotaryError(f"RoPE of type {kind!r} is not known to this transformers release; {by_hand}")
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, device="cpu", **rope_init_options(config, layer_type))
    return Rotary(inv_freq.float(), scaling=float(scaling))


def rope_parameters(config: Any, layer_type: str) -> dict[str, Any] | None:
    """What the configuration says of RoPE in ``layer_type`` layers: ``rope_theta``, ``rope_type`` and its parameters.

    From 5.0 it is one dict, or one per layer type. In 4.57 the base is a field of its own, the scaling a dict, and
    sliding layers of hybrid models have a base (``rope_local_base_freq``) and no scaling.

    Returns:
        A new dict; None if the configuration says nothing.
    """
    stated = getattr(config, "rope_parameters", None)
    if stated:
        return dict(stated.get(layer_type, stated))
    theta = getattr(config, "rope_theta", None)
    local = getattr(config, "rope_local_base_freq", None)
    if layer_type == "sliding_attention" and local is not None:
        return {"rope_theta": local, "rope_type": "default"}
    if theta is None:
        return None
    scaling = dict(getattr(config, "rope_scaling", None) or {})
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    return {**scaling, "rope_theta": theta, "rope_type": kind}


def rope_init_options(config: Any, layer_type: str) -> dict[str, Any]:
    """What ROPE_INIT_FUNCTIONS want besides the configuration, where it nests one dict per layer type."""
    return {"layer_type": layer_type} if layer_type in (getattr(config, "rope_parameters", None) or ()) else {}
