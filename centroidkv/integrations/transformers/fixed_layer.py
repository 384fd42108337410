"""A compressed layer of constant size, and how a compiled decoding step hands its degrees to the attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from centroidkv.cache import FixedState
from centroidkv.cache.columns import Columns
from centroidkv.errors import BackendError, CacheError, CentroidKVError
from centroidkv.integrations.transformers.attention import is_ours
from centroidkv.integrations.transformers.caller import Caller, find_caller
from centroidkv.integrations.transformers.checks import TORN, check_padding_mask, say_if_torn
from centroidkv.integrations.transformers.forward_pass import ForwardPass
from centroidkv.integrations.transformers.handover import LOST
from centroidkv.integrations.transformers.layer import CentroidLayer
from centroidkv.integrations.transformers.masks import as_additive, is_made_from_padding
from centroidkv.integrations.transformers.release import STOCK_TAKES_BIAS, query_length

ONE_TOKEN = (
    "with capacity='fixed' a step of one token is real in every row and sees all old tokens but their padding. Pass "
    "the 2-D mask as it was, with 1 for the new token, or use capacity='growing'"
)


class FixedLayer(CentroidLayer):
    """A FixedState behind transformers' cache-layer interface, which says that it may be compiled."""

    is_compileable = True
    growing: FixedState

    def __init__(self, growing: FixedState) -> None:
        super().__init__(growing)

    def ready_for(self, keys: Tensor) -> bool:
        """Whether this is a decoding step: one token, and there are buffers to write it to."""
        return keys.shape[2] == 1 and self.growing.slots is not None

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """(C, 0) for decoding steps, whatever the number of tokens; as in a growing layer for longer pieces.

        Offset 0 makes a causal mask hide the empty slots as long as slots are tokens, and nothing afterwards: from then
        on degrees alone decide.
        """
        if query_length(query) == 1 and self.growing.slots is not None:
            return self.growing.capacity, 0
        return super().get_mask_sizes(query)

    def get_seq_length(self) -> Any:
        """Tokens seen: a tensor once there are buffers (as in transformers' static layers), so that it is no constant
        of a compiled step. A copy, because the next step counts on in place.
        """
        return self.growing.logical if self.growing.slots is None else self.growing.slots.tokens.clone()


def step(
    layers: Sequence[FixedLayer], index: int, keys: Tensor, values: Tensor, shared: dict[str, Any] | None,
    now: ForwardPass,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Layer ``index`` of ``layers`` takes one token; its degrees go into ``shared``, the attention's keyword arguments.

    Traceable. What is looked at in Python only, such as masks, is looked at where there is no graph.
    """
    if torch.compiler.is_compiling():
        return _step(layers, index, keys, values, shared, now, eager=False)
    try:
        return _step(layers, index, keys, values, shared, now, eager=True)
    except CentroidKVError as error:
        say_if_torn(error, layers)
        raise


def _step(
    layers: Sequence[FixedLayer], index: int, keys: Tensor, values: Tensor, shared: dict[str, Any] | None,
    now: ForwardPass, eager: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    layer = layers[index].growing
    caller = find_caller(outward=True) if eager and index == 0 else None
    if caller is not None:
        now.config = caller.module.config  # of the model that is running now, whichever was before
    attention = now.attention
    shared = check_route(attention, shared, now.padded)
    if eager:
        if index == 0:
            now.check_finished([layer.growing for layer in layers])
            check_step(caller, layers[0], now.columns, is_ours(attention))
            now.unfinished = True
        now.check_received()
        layer.begin(1)  # compiled steps are announced by get_mask_sizes, outside their graphs
    held, held_values, degree = layer.step(keys, values)
    if eager:
        now.unfinished = now.unfinished and index < len(layers) - 1
    else:
        check_level_on_device(layer, layers[0].growing)
    now.hand_over_step(held, held_values, degree, shared, attention)
    return held, held_values


def check_level_on_device(layer: FixedState, first: FixedState) -> None:
    """Stop a compiled step whose layers stand at different tokens, as after a step that stopped between two of them."""
    assert layer.slots is not None  # or it would be no step
    assert first.slots is not None
    if layer.slots.tokens.device != first.slots.tokens.device:
        return  # a model spread over devices; comparing would move numbers between them in every step
    torch._assert_async(layer.slots.tokens == first.slots.tokens, TORN)


def check_step(caller: Caller | None, layer: FixedLayer, columns: Columns, ours: bool) -> None:
    """Refuse a mask that a step of one token cannot obey; only where there is no graph, in which it could not be seen.

    Such a step shows every row its new token and all it has seen but ``columns``' padding: by degrees alone if the
    attention is ``ours``.

    Raises:
        CacheError: the mask hides the new token, or says something else of the old ones.
    """
    mask = None if caller is None else caller.padding_mask
    if mask is not None:
        old = mask.shape[1] - 1
        check_padding_mask(mask, columns.between(0, old), old)
        if bool((mask[:, -1:] == 0).any()):
            raise CacheError(f"the attention mask hides the new token of a row; {ONE_TOKEN}. {LOST}")
    mask = None if caller is None else caller.attention_mask
    if not isinstance(mask, Tensor) or mask.ndim != 4 or is_made_from_padding(mask):
        return
    assert layer.growing.slots is not None  # or it would be no step
    used, wide = int(layer.growing.slots.cursor), mask.shape[-1] == layer.growing.capacity
    content = as_additive(mask[..., : used + 1] if wide else mask, torch.float32)
    if not (wide or ours) or bool((content != 0).any()):
        raise CacheError(
            f"a 4-D attention mask of {mask.shape[-1]} columns for {layer.growing.capacity} slots, or one that hides "
            f"or weighs a token, cannot be obeyed here; {ONE_TOKEN}. {LOST}"
        )


def check_route(name: str, shared: dict[str, Any] | None, padded: bool) -> dict[str, Any]:
    """``shared``, if attention ``name`` can be handed a fixed-capacity cache's degrees through it in a compiled step.

    Raises:
        BackendError: says what would work.
    """
    if shared is None:
        raise BackendError(
            "capacity='fixed' hands the degrees over in the keyword arguments of the attention module, which this "
            "transformers release (before 5.24) or model does not pass to the cache; use capacity='growing'"
        )
    if is_ours(name):
        return shared
    use_ours = "call enable(model) from centroidkv.integrations.transformers around generate"
    if name != "sdpa" or not STOCK_TAKES_BIAS:
        raise BackendError(f"capacity='fixed' with attention {name!r}: {use_ours} (for 'sdpa', 'eager', flash)")
    if padded:
        raise BackendError(
            "the batch is padded, and stock attention would apply the padding mask, whose columns are tokens, to the "
            f"slots of the cache; {use_ours}, which masks by slot"
        )
    return shared
