"""What a cache knows of the forward pass that is running: the model, its mask, what was handed over last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from centroidkv.cache import FixedState, LayerState
from centroidkv.cache.columns import Columns
from centroidkv.compressor import Compressor
from centroidkv.errors import BackendError
from centroidkv.integrations.transformers import checks
from centroidkv.integrations.transformers.attention import (
    FIXED_DEGREE,
    attention_of,
    is_ours,
    log_degree_bias,
    takes_handovers,
)
from centroidkv.integrations.transformers.caller import Caller, config_of_mask, find_caller
from centroidkv.integrations.transformers.handover import KEYWORD, Handover, Step, weakly
from centroidkv.integrations.transformers.masks import real_columns
from centroidkv.integrations.transformers.release import query_groups


class ForwardPass:
    """The facts that all layers share in one pass, and how each layer's degrees reach the attention.

    Args:
        compressor: of the cache.
        grows: whether layers may differ in size (capacity="growing").
    """

    def __init__(self, compressor: Compressor, grows: bool) -> None:
        self.config: Any = None
        """Of the model that is running now."""
        self.columns = Columns()
        """The padding among all columns seen."""
        self.step = Step(0, 0, self.columns)
        self.clustered = False
        """Whether any layer was clustered before this pass: then all of them attend with degrees."""
        self.unfinished = False
        """Whether a step of fixed-capacity layers began, uncompiled, and was not seen to reach the last layer."""
        self._one_decision = compressor.one_decision
        self._compressor, self._grows = compressor, grows
        self._sizes: set[int] = set()
        self._mask: Callable[[], Any] = weakly(None)
        self._masked = self._regroups = False
        self._pending: Handover | None = None

    @property
    def attention(self) -> str:
        """What the model attends with now. Another thread may switch it at any time, so a layer asks once, at first."""
        return attention_of(self.config)

    @property
    def padded(self) -> bool:
        """Whether there was padding so far."""
        return self.columns.padding is not None

    @staticmethod
    def look_for_caller(known: bool, batch: int) -> Caller | None:
        """The attention module that is running; None only where it can be done without.

        Raises:
            BackendError: it cannot be seen, and the model is not ``known`` or there are several rows.
            CacheError: it is cross-attention.
        """
        caller = find_caller(outward=True)
        if caller is not None:
            checks.check_own_tokens(caller)
        elif not known or batch > 1:
            raise BackendError(
                "the cache cannot see the model that uses it, and so neither its attention nor the padding mask. "
                "Either the forward pass is compiled or wrapped: for single sequences "
                "CentroidCache(config=model.config) will do. Or its attention modules lack layer_idx and config "
                "(Bloom, MPT, BigBird): these models are not served"
            )
        return caller

    def begin(self, caller: Caller | None, layers: Sequence[LayerState], batch: int, new: int) -> None:
        """Before the first compressed layer takes its tokens: read the mask, refuse one that cannot be obeyed."""
        mask = None if caller is None else caller.attention_mask
        self._sizes = {layer.physical for layer in layers}
        self.clustered = any(layer.moved for layer in layers)
        self._mask, self._masked = weakly(mask), new > 1 if caller is None else mask is not None
        real = real_columns(mask, batch, new)
        start = layers[0].logical if layers else 0
        columns = self.columns.add(real, start)
        step = Step(new, start + new, columns, real, caller is None or caller.mask_seen, self._mask)
        if self.clustered and caller is not None:
            checks.check_padding_mask(caller.padding_mask, self.columns.between(0, start), start)
        if self.clustered and takes_handovers(self.config) and isinstance(mask, Tensor) and mask.ndim == 4:
            step.old_slots(mask, layers[0].physical + new)
        self.step, self.columns = step, columns

    def announce(self, layers: Sequence[FixedState], new: int) -> None:
        """``new`` tokens are about to come: look which model makes a mask for them, and cluster what is due.

        A compiled step cannot look who runs it, and asks for masks outside its graph.
        """
        self.config = config_of_mask() or self.config
        self.check_finished(layers)
        for layer in layers:
            layer.begin(new)
        checks.check_level({layer.known_logical for layer in layers})

    def check_finished(self, layers: Sequence[LayerState]) -> None:
        """Refuse to go on where an earlier step stopped between two layers; a GPU is waited for only if one did."""
        if self.unfinished:
            checks.check_level({layer.logical for layer in layers})
            self.unfinished = False

    def check_received(self) -> None:
        """Refuse to go on where the attention did not take what was handed over last."""
        checks.check_received(self._pending)

    def check_layer(self, layer: LayerState, attention: str) -> None:
        """Refuse an ``attention`` that would not get, or not use, what this layer is about to hand over."""
        self.check_received()
        if is_ours(attention):
            return
        if layer.like is None:
            caller = find_caller()
            for kind in checks.attention_classes(self.config) if caller is None else [type(caller.module)]:
                self._regroups |= checks.check_straight(kind, self._one_decision)
        if self.clustered:
            if self._grows and self._masked:
                checks.check_lengths(self._sizes, self._compressor, self.config)
            checks.check_padding(self.columns.inner)
            checks.check_stock_mask(self._mask(), layer.physical, self.step)

    def hand_over(
        self, keys: Tensor, values: Tensor, degree: Tensor | None, shared: dict[str, Any] | None, attention: str
    ) -> tuple[Tensor, Tensor]:
        """Send keys, values and degrees on their way; returns the keys and values for the model.

        ``shared``: the keyword arguments that the attention module shares with the cache, if it does; ``attention``:
        what the model attended with when the layer was checked.
        """
        if is_ours(attention):
            handover = self._send(keys, values, degree, self.step, attention)
            if shared is None:
                return handover.attach(), values
            shared[KEYWORD] = handover
        elif degree is not None:
            checks.check_switch(attention, self.config)
            shared = checks.check_stock(attention, shared)
            if self._regroups:
                checks.check_one_decision(degree)
            bias = log_degree_bias(degree, query_groups(self.config), new=self.step.new).to(keys.dtype)
            _add_bias(shared, bias.expand(-1, -1, self.step.new, -1))
        return keys, values

    def hand_over_step(
        self, keys: Tensor, values: Tensor, degree: Tensor, shared: dict[str, Any], attention: str
    ) -> None:
        """As :meth:`hand_over`, for a step of a fixed-capacity layer. Traceable: a compiled step hands on tensors only.

        ``degree [B, H, C]`` is 0 for empty slots, so that it masks as well.
        """
        if is_ours(attention):
            shared[FIXED_DEGREE] = degree
            if not torch.compiler.is_compiling():
                shared[KEYWORD] = self._send(keys, values, degree, None, attention)
        else:
            bias = degree.log().to(keys.dtype).repeat_interleave(query_groups(self.config), dim=1)
            _add_bias(shared, bias[:, :, None])
            checks.check_switch(attention, self.config)

    def _send(self, keys: Tensor, values: Tensor, degree: Tensor | None, step: Step | None, attention: str) -> Handover:
        """A handover, after a look whether there is still somebody to take it."""
        self._pending = Handover(keys, values, degree, step, self._one_decision, self.config)
        checks.check_sent(self._pending, attention)
        return self._pending

    def check_attended(self, module: str) -> None:
        """Raise BackendError if attention module ``module``, which has just run, did not take what it was handed."""
        pending, self._pending = self._pending, None
        checks.check_received(pending, module)

    def rows(self, chosen: Callable[[int], Tensor]) -> None:
        """Rows were kept, repeated or permuted: ``chosen`` gives their numbers for the count of rows there were."""
        if self.columns.padding is not None:
            self.columns = self.columns.rows(chosen(self.columns.padding.shape[0]))


def _add_bias(shared: dict[str, Any], bias: Tensor) -> None:
    """Let stock attention add ``bias [B, Hq, L, T]``, and what it was to add anyway."""
    own = shared.get("position_bias")
    shared["position_bias"] = bias if own is None else bias + own
