"""CentroidCache: a transformers cache that clusters itself while it grows."""

from __future__ import annotations

import copy
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from centroidkv.allocation import depths_of
from centroidkv.cache import CacheStats, FixedState, GrowingState, LayerState, Storage
from centroidkv.cache.stats import collect_stats
from centroidkv.compressor import Compressor
from centroidkv.errors import CentroidKVError
from centroidkv.integrations.rope import rotary_of
from centroidkv.integrations.transformers import checks, saving
from centroidkv.integrations.transformers.attention import is_ours
from centroidkv.integrations.transformers.caller import find_queries
from centroidkv.integrations.transformers.fixed_layer import FixedLayer, check_route, step
from centroidkv.integrations.transformers.forward_pass import ForwardPass
from centroidkv.integrations.transformers.heads import check_heads
from centroidkv.integrations.transformers.layer import CentroidLayer
from centroidkv.integrations.transformers.layout import (
    RefusesStates,
    UnboundLayers,
    lay_out,
    warn_of_nothing,
    warn_of_room,
)
from centroidkv.integrations.transformers.release import query_length as tokens_asked
from centroidkv.integrations.transformers.release import shared_kwargs, text_config
from centroidkv.rotary import Rotary


class CentroidCache(RefusesStates, Cache):
    """Hand it to ``generate``: ``model.generate(**inputs, past_key_values=CentroidCache(presets.distinctive(0.25)))``.

    The prompt is processed with full attention. A layer that is over budget is compressed right after it attended,
    then again every ``interval`` tokens; between two events it holds at most budget + interval slots. Position ids
    keep counting tokens. Sliding-window layers of hybrid models are left alone.

    One cache serves one batch of sequences; ``reset()`` frees it for the next. Where this transformers release or the
    model's attention cannot take degrees from a cache, the first forward pass is refused with a BackendError that
    says so; :func:`~centroidkv.integrations.transformers.enable` then makes it work.

    Args:
        compressor: which stages, which budget.
        interval: tokens between two compressions.
        config: ``model.config``. Not needed normally: the cache finds its model at the first forward pass.
        rotary: how keys are rotated, for models whose RoPE is not recognised.
        storage: how what was compressed is held between steps: ``Quantised(bits=8)``, ``Offloaded()``, or both as
            ``Offloaded(Quantised(bits=8))`` (:mod:`centroidkv.cache`). None: as it is.
        capacity: "growing", or "fixed": buffers of budget + interval slots, for decoding under ``torch.compile``
            without recompilation (:class:`~centroidkv.cache.FixedState`). Needs ``Budget.tokens``.

    Raises:
        StageError: not a Compressor, one whose sizes depend on the data, or an interval below 1.
        BudgetError: capacity="fixed" with a ratio.
    """

    def __init__(
        self,
        compressor: Compressor,
        interval: int = 128,
        *,
        config: Any = None,
        rotary: Rotary | None = None,
        storage: Storage | None = None,
        capacity: Literal["growing", "fixed"] = "growing",
    ) -> None:
        super().__init__(layers=[])
        checks.check_arguments(compressor, capacity, storage)
        self.compressor, self.interval, self.rotary, self.storage = compressor, interval, rotary, storage
        self.capacity = capacity
        self._new_layer(compressor, rotary)  # refuses bad arguments now, not at the first token
        self._warned = False
        self._told = None if config is None else text_config(config)
        self.reset()

    def reset(self) -> None:
        """Forget all tokens, and the model unless it was named by ``config``; the next forward pass may be any."""
        self.layers: list[Any] = UnboundLayers()
        self._pass = ForwardPass(self.compressor, grows=self.capacity == "growing")
        self._recording = False
        if self._told is not None:
            self._bind(self._told)

    def _bind(self, config: Any) -> None:
        """Lay out the layers as the model's configuration says: compress full attention, leave sliding windows."""
        planned = lay_out(config, self.capacity)
        warn_of_nothing(planned, config)
        rotary = self.rotary
        if rotary is None and self.compressor.needs_rotary:
            rotary = rotary_of(config)
        full = [index for index, stock in enumerate(planned) if stock is None]
        compressors = self.compressor.for_layers(depths_of(full, len(planned)))
        if not self._warned:
            warn_of_room(compressors, config)
        self._warned, own = True, iter(compressors)
        self.layers = [self._new_layer(next(own), rotary) if stock is None else stock for stock in planned]
        self._pass.config = config
        if self._recording:
            self.activate_past_recording()

    def _new_layer(self, compressor: Compressor, rotary: Rotary | None) -> CentroidLayer:
        if self.capacity == "fixed":
            return FixedLayer(FixedState(compressor, self.interval, rotary))
        return CentroidLayer(GrowingState(compressor, self.interval, rotary, self.storage))

    @property
    def _compressed(self) -> list[LayerState]:
        return [layer.growing for layer in self.layers if isinstance(layer, CentroidLayer)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new keys and values; returns what this step attends to, and passes ln N on to the attention."""
        if self.capacity == "growing":
            return self._append(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if layer is None or not layer.ready_for(key_states):
            return self._append(key_states, value_states, layer_idx, *args, **kwargs)
        return step(self.layers, layer_idx, key_states, value_states, shared_kwargs(kwargs), self._pass)

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        """(slots that the coming step attends to, offset); with a fixed capacity also the moment to cluster.

        ``generate`` asks before it enters the compiled pass; one compiled by hand asks from within, and breaks here.
        """
        if self.capacity == "fixed":
            self._announce(query_length)
        return super().get_mask_sizes(query_length, layer_idx)

    @torch.compiler.disable
    def _announce(self, new: Any) -> None:
        if self.layers:
            self._pass.announce([layer.growing for layer in self.layers], tokens_asked(new))

    @torch.compiler.disable
    def _append(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        try:
            return self._take(*args, **kwargs)
        except CentroidKVError as error:
            checks.say_if_torn(error, self.layers)
            raise

    def _take(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx < len(self.layers):
            checks.check_rows(self.layers[layer_idx], key_states.shape[0])
        if self._pass.config is None or self._leads(layer_idx):
            self._begin_pass(layer_idx, batch=key_states.shape[0], new=key_states.shape[2])
        elif layer_idx == 0:  # a sliding window
            checks.check_in_step(self.layers, 0, key_states.shape[2])
        checks.check_layer(layer_idx, len(self.layers))
        layer, shared, now = self.layers[layer_idx], shared_kwargs(kwargs), self._pass
        attention = now.attention
        if not is_ours(attention) and self._compressed:  # the list of layers is made only where it is needed
            checks.check_stock(attention, shared)  # in sliding windows as well, which may come first
        if not isinstance(layer, CentroidLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        now.check_layer(layer.growing, attention)
        check_heads(self.compressor, key_states.shape[1], now.config)
        if self.capacity == "fixed":
            check_route(attention, shared, now.padded)
        real = None if now.step.real is None else now.step.real.to(key_states.device)
        queries = find_queries(layer_idx) if self.compressor.needs_queries else None
        keys, values, degree = layer.growing.append(key_states, value_states, real, queries, now.clustered)
        if self.storage is not None:
            self._after(layer_idx).growing.fetch()
        return now.hand_over(keys, values, degree, shared, attention)

    def check_attended(self, module: str) -> None:
        """Raise BackendError if attention module ``module``, which has just run, did not take its degrees."""
        self._pass.check_attended(module)

    def _leads(self, layer_idx: int) -> bool:
        """Whether this is the first compressed layer, at which a step's common facts are read."""
        return next((i for i, layer in enumerate(self.layers) if isinstance(layer, CentroidLayer)), -1) == layer_idx

    def _after(self, layer_idx: int) -> CentroidLayer:
        """The compressed layer that attends next, perhaps in the next step."""
        order = [*self.layers[layer_idx + 1 :], *self.layers[: layer_idx + 1]]
        return next(layer for layer in order if isinstance(layer, CentroidLayer))

    def _begin_pass(self, layer_idx: int, batch: int, new: int) -> None:
        """Find the model, and the padding among the new tokens; make sure all layers stand at the same token."""
        caller = self._pass.look_for_caller(self._pass.config is not None, batch)
        if caller is not None:
            if self._pass.config is None:
                self._bind(caller.module.config)
            self._pass.config = caller.module.config  # of the model that is running now, whichever was bound
        if self._leads(layer_idx):
            checks.check_in_step(self.layers, layer_idx, new)
        self._pass.begin(caller, self._compressed, batch, new)

    # -- taking back ----------------------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Called by assisted generation: from now on the newest tokens are clustered only after the crop that follows.

        Lasts until two forward passes come without a :meth:`crop` between them.
        """
        self._recording = True
        for layer in self.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def crop(self, length: int) -> None:
        """Take back tokens that were not clustered yet, from all layers or from none.

        Args:
            length: minus the number of tokens; in releases before 5.15 also the number that stays.

        Raises:
            CacheError: some of them may already be part of a centroid.
            RuntimeError, ValueError: transformers' own, for a sliding window that has passed its size.
        """
        length = int(length)  # a tensor in some releases, which layers would go on counting with
        checks.check_crop(self.layers, length)
        # Sliding windows first: they may refuse, and all of them alike, while the others were just asked.
        for layer in sorted(self.layers, key=lambda layer: isinstance(layer, CentroidLayer)):
            if layer.is_initialized:  # a window that has seen no tokens raises whatever None raises
                layer.crop(length)
        if self._compressed:
            self._pass.columns = self._pass.columns.until(self._compressed[0].logical)

    # Rows move in all layers, and in what is known of their padding.
    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._pass.rows(lambda count: beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._pass.rows(lambda count: torch.arange(count).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._pass.rows(lambda count: torch.arange(count)[indices.cpu()])

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """Whether all layers hold tokens."""
        return bool(self.layers) and all(layer.is_initialized for layer in self.layers)

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate`` may compile decoding steps: with a fixed capacity."""
        return self.capacity == "fixed"

    @property
    def is_croppable(self) -> bool:
        """Whether the newest tokens can be taken back without a trace: only while clustering waits for a crop."""
        return bool(self.layers) and all(getattr(layer, "is_croppable", False) for layer in self.layers)

    def __deepcopy__(self, memo: dict[int, Any]) -> CentroidCache:
        """A copy with its own tokens, of the same model: its configuration is shared, not frozen as it is now."""
        twin = type(self).__new__(type(self))
        compressors = (self.compressor, *(layer.compressor for layer in self._compressed))
        for shared in (self._pass.config, self._told, *compressors):
            memo[id(shared)] = shared
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    def stats(self) -> CacheStats:
        """What was compressed so far: rounds, merged, logical and physical tokens, bytes."""
        return collect_stats(self._compressed)

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything into one safetensors file; see :func:`~.saving.save_cache`."""
        saving.save_cache(self, path)

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        compressor: Compressor,
        *,
        config: Any,
        storage: Storage | None = None,
        device: torch.device | str = "cpu",
        other_compressor: bool = False,
    ) -> CentroidCache:
        """The cache that :meth:`save` wrote, to go on with; see :func:`~.saving.load_cache`."""
        return saving.load_cache(
            cls, path, compressor, config=config, storage=storage, device=device, other_compressor=other_compressor
        )

    def __repr__(self) -> str:
        return f"CentroidCache(interval={self.interval}, {self.stats()})"
