"""What a CentroidCache refuses, and why."""

from __future__ import annotations

from typing import Any

from centroidkv.cache import Storage
from centroidkv.compressor import Compressor
from centroidkv.errors import BackendError, CacheError, StageError
from centroidkv.integrations.transformers.attention import DegreeTag
from centroidkv.integrations.transformers.release import STOCK_BIAS_BACKENDS, STOCK_TAKES_BIAS


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
        raise CacheError(
            "the layers have seen different numbers of tokens, so an earlier forward pass stopped half-way; "
            "reset() the cache and process the prompt again"
        )


def check_stock(config: Any, shared: dict[str, Any] | None) -> None:
    """Refuse attention that would ignore the degrees, before the first token."""
    name = config._attn_implementation
    if shared is not None and STOCK_TAKES_BIAS and name in STOCK_BIAS_BACKENDS:
        return
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


def check_received(pending: DegreeTag | None) -> None:
    """Refuse to go on where attention did not take the degrees that the previous layer handed over."""
    if pending is not None and not pending.received:
        raise BackendError(
            "the previous layer attended without the degrees it was handed. Either the forward pass was "
            "interrupted there: reset() the cache and process the prompt again. Or the keys were changed between "
            "the cache and the attention function: this model is not supported, please report it"
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


def check_layer(index: int, layers: int) -> None:
    """Refuse a model with more layers than the one the cache was laid out for."""
    if index >= layers:
        raise CacheError(f"the cache has {layers} layers, the model asks for layer {index}; reset() it")
