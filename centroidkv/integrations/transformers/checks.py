"""What a CentroidCache refuses, and why."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from centroidkv.cache import Storage
from centroidkv.compressor import Compressor
from centroidkv.errors import BackendError, CacheError, CentroidKVError, StageError
from centroidkv.integrations.transformers.attention import attention_of, is_ours
from centroidkv.integrations.transformers.caller import Caller
from centroidkv.integrations.transformers.flow import REGROUPS, feeds_a_cache, why_not_straight
from centroidkv.integrations.transformers.handover import LOST, POOLED, Handover, Step
from centroidkv.integrations.transformers.release import STOCK_BIAS_BACKENDS, STOCK_TAKES_BIAS, tokens_to_remove

TORN = (
    "the layers have seen different numbers of tokens, so an earlier forward pass stopped half-way; reset() the cache "
    "and process the prompt again"
)


def check_arguments(compressor: Compressor, capacity: str, storage: Storage | None) -> None:
    """Refuse arguments that cannot work, or not together."""
    if not isinstance(compressor, Compressor):
        raise StageError(
            f"CentroidCache takes a Compressor, such as presets.centroidkv(0.25), got {type(compressor).__name__}"
        )
    if not compressor.plannable:
        raise StageError(
            "how long a layer of a cache becomes must be known ahead of the data, because masks are made before it; "
            f"the sizes of this compressor depend on the data: {compressor!r}"
        )
    if capacity not in ("growing", "fixed"):
        raise CacheError(f"capacity is 'growing' or 'fixed', got {capacity!r}")
    if capacity == "fixed" and not compressor.even:
        raise CacheError(
            "with capacity='fixed' one mask serves all layers, so they must be equally large, not shared out by "
            f"{compressor.allocation!r}; use capacity='growing', or build with allocation(Even())"
        )
    if capacity == "fixed" and storage is not None:
        raise CacheError(f"capacity='fixed' attends to its buffers as they are; leave storage={storage!r} out")


def check_level(tokens: set[int]) -> None:
    """Refuse to go on where layers stand at different numbers of tokens."""
    if len(tokens) > 1:
        raise CacheError(TORN)


def check_in_step(layers: Sequence[Any], leading: int, new: int) -> None:
    """Refuse to go on after a forward pass that stopped half-way, also in a sliding window.

    Windows ahead of the ``leading`` compressed layer have seen this step's ``new`` tokens already, others have not.
    """
    ahead = {layer.get_seq_length() - new for layer in layers[:leading]}
    check_level(ahead | {_tokens(layer) for layer in layers[leading:]})


def say_if_torn(error: CentroidKVError, layers: Sequence[Any]) -> None:
    """Add to a refusal in the middle of a forward pass that some layers have taken its tokens, so reset() is due."""
    message = str(error)
    if len({_tokens(layer) for layer in layers}) > 1 and "reset()" not in message:
        error.args = (f"{message}. Some layers have seen this step's tokens by now: reset() the cache first",)


def _tokens(layer: Any) -> int:
    return layer.growing.logical if hasattr(layer, "growing") else layer.get_seq_length()


def check_switch(before: str, config: Any) -> None:
    """Refuse a model that was given another attention than ``before`` while a layer took its tokens.

    Our function around ``before`` is none: it does what ``before`` does with degrees it was not handed.
    """
    now = attention_of(config)
    if now != before and (is_ours(before) or not is_ours(now)):
        raise BackendError(
            f"the model's attention was switched from {before!r} to {now!r} while a layer took its tokens (the last "
            "user of enable(model) left, or another thread chose it), and would ignore the degrees, or apply a mask "
            "that is not by slot. Switch after the forward pass; reset() the cache and process the prompt again"
        )


def check_sent(handover: Handover, before: str) -> None:
    """Refuse a handover to a model that does not attend with ``before``, one of ours, any more.

    It is open by now: whoever leaves ``enable`` meanwhile sees an open handover, or has switched the model and is seen
    here.
    """
    try:
        check_switch(before, handover.config)
    except BackendError:
        handover.close()
        raise


def check_stock(name: str, shared: dict[str, Any] | None) -> dict[str, Any]:
    """Refuse attention ``name`` if it would ignore the degrees, before the first token.

    Returns:
        ``shared``, which is what the degrees can be put into.
    """
    if shared is not None and STOCK_TAKES_BIAS and name in STOCK_BIAS_BACKENDS:
        return shared
    reason = (
        f"attention {name!r} would ignore the degrees of merged tokens"
        if name not in STOCK_BIAS_BACKENDS
        else "in this transformers release or model a cache cannot hand the degrees to the attention"
    )
    raise BackendError(
        f"{reason}, and the text would be silently wrong. Call enable(model) from "
        "centroidkv.integrations.transformers around generate (for 'sdpa', 'eager', flash), or choose another "
        "attn_implementation"
    )


def check_received(
    pending: Handover | None,
    name: str = "the previous attention module",
    remedy: str = "reset() the cache and process the prompt again",
) -> None:
    """Refuse to go on where attention did not take what the layer handed over, which is then on its way no longer."""
    if pending is not None and not pending.received:
        pending.close()
        raise BackendError(
            f"{name} attended without the degrees it was handed. Either the forward pass was interrupted there, or the "
            f"model was given another attention meanwhile: {remedy}. Or attention in this model does not go through "
            "transformers' AttentionInterface, which enable(model) switches: then it is not served, please report it"
        )


def check_own_tokens(caller: Caller) -> None:
    """Refuse to hold the keys of cross-attention, which stand for something else than the sequence's tokens."""
    if caller.crosses:
        raise CacheError(
            f"{type(caller.module).__name__} is cross-attention: its keys belong to an encoder's or image's states, "
            "not to the tokens of the sequence. Give a model with an encoder the pair "
            "EncoderDecoderCache(CentroidCache(...), DynamicCache()); models that put both into one cache (Mllama) are "
            f"not served. {LOST}"
        )


def check_straight(kind: Any, one_decision: bool) -> bool:
    """Refuse stock attention in modules of class ``kind`` that do not hand on what the cache returns.

    Returns:
        Whether they regroup heads, which does no harm as long as all heads hold the same clusters.
    """
    reason = why_not_straight(kind)
    if reason is None or (reason == REGROUPS and one_decision):
        return reason is not None
    remedy = f" or choose {POOLED}" if reason == REGROUPS else ""
    raise BackendError(
        f"{kind.__name__} {reason}, so degrees could meet the wrong keys and the text would be silently wrong. Call "
        f"enable(model) from centroidkv.integrations.transformers around generate, which looks at what arrives,{remedy}"
    )


def check_one_decision(degree: Any) -> None:
    """Refuse heads of unlike degrees where a model regroups heads."""
    if not bool((degree == degree[:, :1]).all()):
        raise BackendError(
            f"this model regroups heads after the cache, and its heads hold different clusters; choose {POOLED}. {LOST}"
        )


def check_stock_mask(mask: Any, old: int, step: Step) -> None:
    """Refuse a mask that stock attention would apply to other slots of a layer of ``old`` slots than it means."""
    if mask is None or not (isinstance(mask, Tensor) and mask.ndim == 4):
        return
    slots = old + step.new
    if mask.shape[-1] != slots:
        raise CacheError(
            f"the attention mask has {mask.shape[-1]} columns, this layer {slots} slots for {step.total} tokens, and "
            "stock attention takes a mask by slot. Call enable(model) from centroidkv.integrations.transformers, which "
            f"takes a mask with a column per token, or pass one with a column per slot. {LOST}"
        )
    step.old_slots(mask, slots, bool_per_slot=False)


def check_padding_mask(mask: Tensor | None, padding: Tensor | None, old: int) -> None:
    """Refuse a 2-D mask that says something else of the first ``old`` columns than what was padding when they came."""
    if mask is None or mask.shape[1] < old:
        return
    hides = mask[:, :old] == 0
    if bool((hides if padding is None else hides != padding.to(hides.device)).any()):
        raise CacheError(
            "the attention mask hides or shows other tokens before this step than when they came, and some of them are "
            "clustered by now. Pass the mask as it was, with 1 for every new token (generate makes one of its own from "
            f"pad tokens among the ids unless it is given one). {LOST}"
        )


def attention_classes(config: Any) -> list[Any]:
    """The attention modules of a model that cannot be seen at work, by its configuration: those that feed a cache."""
    modelling = sys.modules.get(type(config).__module__.replace("configuration_", "modeling_"))
    return [kind for kind in vars(modelling).values() if feeds_a_cache(kind)] if modelling else []


def check_rows(layer: Any, rows: int) -> None:
    """Refuse another number of rows than a layer holds, before it or any other changes."""
    if not layer.is_initialized:
        return
    held = (layer.growing.like if hasattr(layer, "growing") else layer).keys.shape[0]
    if held != rows:
        raise CacheError(
            f"the cache holds {held} rows, the new tokens have {rows}; one cache serves one batch: reset() it for the "
            "next one, select rows with batch_select_indices(...), or make another cache"
        )


def check_padding(inner: bool) -> None:
    """Refuse stock attention over padding between real tokens."""
    if inner:
        raise CacheError(
            "the batch holds padding between real tokens, whose mask columns no longer fit the compressed slots; "
            "call enable(model) from centroidkv.integrations.transformers, which masks by slot"
        )


def check_lengths(sizes: set[int], compressor: Compressor, config: Any) -> None:
    """Refuse stock attention's mask, which is one for all layers, where they hold different numbers of slots."""
    if len(sizes) < 2:
        return
    remedy = (
        "call enable(model) from centroidkv.integrations.transformers, which masks by slot"
        if config._attn_implementation == "sdpa"
        else "call model.set_attn_implementation('sdpa')"
    )
    raise BackendError(
        f"the layers hold {min(sizes)} to {max(sizes)} slots ({compressor.allocation!r}), and the one mask that stock "
        f"attention {config._attn_implementation!r} has in this step (padding, or several new tokens) fits only one of "
        f"them; {remedy}, or build with allocation(Even()). If layers of sliding windows have seen the step's tokens "
        "by now, reset() the cache first"
    )


def check_crop(layers: Sequence[Any], length: int) -> None:
    """Raise what the crop of any layer would raise, before one of them is changed."""
    for layer in layers:
        if hasattr(layer, "growing"):
            layer.growing.check_crop(tokens_to_remove(length, layer.growing.logical))
        else:
            _check_window(layer, tokens_to_remove(length, layer.get_seq_length()))


def _check_window(layer: Any, tokens: int) -> None:
    """Refuse to take more back from a sliding window than it has kept for that; transformers would tear it."""
    if not getattr(layer, "record_past", False) or not layer.is_initialized:
        return
    left, held = layer.get_seq_length() - tokens, layer.keys.shape[-2]
    if held - tokens < min(left, layer.sliding_window - 1):
        raise CacheError(
            f"asked to take back {tokens} tokens, but a sliding window of {layer.sliding_window} tokens holds {held}, "
            f"and needs {min(left, layer.sliding_window - 1)} of the {left} that would be left; crop once per forward "
            "pass"
        )


def check_layer(index: int, layers: int) -> None:
    """Refuse a model with more layers than the one the cache was laid out for."""
    if index >= layers:
        raise CacheError(f"the cache has {layers} layers, the model asks for layer {index}; reset() it")
