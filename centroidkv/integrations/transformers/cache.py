"""CentroidCache: a transformers cache that clusters itself while it grows."""

from __future__ import annotations

import copy
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from centroidkv.allocation import depths_of
from centroidkv.cache import CacheStats, FixedState, GrowingState, Storage
from centroidkv.cache.columns import Columns
from centroidkv.cache.stats import collect_stats
from centroidkv.compressor import Compressor
from centroidkv.errors import BackendError
from centroidkv.integrations.transformers import checks, saving
from centroidkv.integrations.transformers.attention import log_degree_bias, takes_tags
from centroidkv.integrations.transformers.caller import Caller, find_caller, find_queries
from centroidkv.integrations.transformers.fixed_layer import FixedLayer, check_route, hand_over
from centroidkv.integrations.transformers.handover import KEYWORD, Handover, Step
from centroidkv.integrations.transformers.heads import check_heads
from centroidkv.integrations.transformers.layer import CentroidLayer
from centroidkv.integrations.transformers.layout import RefusesStates, UnboundLayers, lay_out, warn_of_nothing
from centroidkv.integrations.transformers.masks import real_columns
from centroidkv.integrations.transformers.release import query_groups, shared_kwargs, text_config, tokens_to_remove
from centroidkv.integrations.transformers.release import query_length as tokens_asked
from centroidkv.integrations.transformers.rope import rotary_of
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
        self._told = None if config is None else text_config(config)
        self.reset()

    def reset(self) -> None:
        """Forget all tokens, and the model unless it was named by ``config``; the next forward pass may be any."""
        self.layers: list[Any] = UnboundLayers()
        self._config: Any = None
        self._pending: Handover | None = None
        self._columns = Columns()
        self._step = Step(0, 0, self._columns)
        self._recording = self._regroups = False
        self._sizes: set[int] = set()
        self._clustered = self._masked = False
        self._mask: Any = None
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
        own = iter(self.compressor.for_layers(depths_of(full, len(planned))))
        self.layers = [self._new_layer(next(own), rotary) if stock is None else stock for stock in planned]
        self._config = config
        if self._recording:
            self.activate_past_recording()

    def _new_layer(self, compressor: Compressor, rotary: Rotary | None) -> CentroidLayer:
        if self.capacity == "fixed":
            return FixedLayer(FixedState(compressor, self.interval, rotary))
        return CentroidLayer(GrowingState(compressor, self.interval, rotary, self.storage))

    @property
    def _compressed(self) -> list[GrowingState]:
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
        if not torch.compiler.is_compiling():
            layer.growing.begin(1)  # compiled steps are announced by get_mask_sizes, outside their graphs
        shared = check_route(self._config, shared_kwargs(kwargs), self._columns.padding is not None)
        keys, values, degree = layer.growing.step(key_states, value_states)
        hand_over(degree, shared, self._config, key_states.dtype)
        return keys, values

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        """(slots that the coming step attends to, offset); with a fixed capacity also the moment to cluster.

        ``generate`` asks before it enters the compiled pass; one compiled by hand asks from within, and breaks here.
        """
        if self.capacity == "fixed":
            self._announce(query_length)
        return super().get_mask_sizes(query_length, layer_idx)

    @torch.compiler.disable
    def _announce(self, new: Any) -> None:
        for layer in self.layers:
            layer.growing.begin(tokens_asked(new))
        checks.check_level({layer.growing.known_logical for layer in self.layers})

    @torch.compiler.disable
    def _append(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._check_rows(layer_idx, key_states.shape[0])
        if self._config is None or self._leads(layer_idx):
            self._begin_step(layer_idx, batch=key_states.shape[0], new=key_states.shape[2])
        checks.check_layer(layer_idx, len(self.layers))
        layer, shared = self.layers[layer_idx], shared_kwargs(kwargs)
        by_tag = takes_tags(self._config)
        if not by_tag and self._compressed:
            checks.check_stock(self._config, shared)  # in sliding windows as well, which may come first
        if not isinstance(layer, CentroidLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        checks.check_received(self._pending)
        if not by_tag:
            self._check_stock_layer(layer)
        check_heads(self.compressor, key_states.shape[1], self._config)

        real = None if self._step.real is None else self._step.real.to(key_states.device)
        if self.capacity == "fixed":
            check_route(self._config, shared, self._columns.padding is not None)
        queries = find_queries(layer_idx) if self.compressor.needs_queries else None
        keys, values, degree = layer.growing.append(key_states, value_states, real, queries, self._clustered)
        if self.storage is not None:
            self._after(layer_idx).growing.fetch()
        if by_tag:
            return self._hand_over(keys, values, degree, shared)
        if degree is None:
            return keys, values
        if self._regroups:
            checks.check_one_decision(degree)
        assert shared is not None  # check_stock saw to it
        bias = log_degree_bias(degree, query_groups(self._config), new=key_states.shape[2]).to(key_states.dtype)
        bias = bias.expand(-1, -1, key_states.shape[2], -1)
        own = shared.get("position_bias")
        shared["position_bias"] = bias if own is None else bias + own
        return keys, values

    def _hand_over(
        self, keys: Tensor, values: Tensor, degree: Tensor | None, shared: dict[str, Any] | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values for our attention function, which has to sign for them."""
        self._pending = Handover(keys, values, degree, self._step, self._one_decision)
        if shared is None:
            return self._pending.attach(), values
        shared[KEYWORD] = self._pending
        return keys, values

    def check_attended(self, module: str) -> None:
        """Raise BackendError if attention module ``module``, which has just run, did not take what it was handed."""
        pending, self._pending = self._pending, None
        checks.check_received(pending, module)

    @property
    def _one_decision(self) -> bool:
        """Whether merges are decided for all heads together."""
        return getattr(self.compressor.similarity, "heads", "each") == "mean"

    def _check_rows(self, layer_idx: int, rows: int) -> None:
        if layer_idx < len(self.layers) and self.layers[layer_idx].is_initialized:
            layer = self.layers[layer_idx]
            like = layer.growing.like if isinstance(layer, CentroidLayer) else None
            checks.check_rows((layer if like is None else like).keys.shape[0], rows)

    def _check_stock_layer(self, layer: CentroidLayer) -> None:
        """Refuse stock attention where it would not get, or not use, what this layer hands it."""
        if layer.growing.like is None:
            caller = find_caller()
            for kind in checks.attention_classes(self._config) if caller is None else [type(caller.module)]:
                self._regroups |= checks.check_straight(kind, self._one_decision)
        if not self._clustered:
            return
        if self.capacity != "fixed" and self._masked:
            checks.check_lengths(self._sizes, self.compressor, self._config)
        checks.check_padding(self._columns.inner)
        checks.check_stock_mask(self._mask, layer.growing.physical, self._step)

    def _leads(self, layer_idx: int) -> bool:
        """Whether this is the first compressed layer, at which a step's common facts are read."""
        return next((i for i, layer in enumerate(self.layers) if isinstance(layer, CentroidLayer)), -1) == layer_idx

    def _after(self, layer_idx: int) -> CentroidLayer:
        """The compressed layer that attends next, perhaps in the next step."""
        order = [*self.layers[layer_idx + 1 :], *self.layers[: layer_idx + 1]]
        return next(layer for layer in order if isinstance(layer, CentroidLayer))

    def _begin_step(self, layer_idx: int, batch: int, new: int) -> None:
        """Find the model, and the padding among the new tokens; make sure all layers stand at the same token."""
        caller = find_caller()
        if caller is None and (self._config is None or batch > 1):
            raise BackendError(
                "the cache cannot see the model that uses it, and so neither its attention nor the padding mask. "
                "Either the forward pass is compiled or wrapped: for single sequences "
                "CentroidCache(config=model.config) will do. Or attention modules lack layer_idx and config (Bloom, MPT, BigBird): these are not served"
            )
        if caller is not None:
            checks.check_own_tokens(caller)
            if self._config is None:
                self._bind(caller.module.config)
            self._config = caller.module.config  # of the model that is running now, whichever was bound
        self._check_in_step(layer_idx, new)
        # Before this step's tokens: the layers' lengths, whether any was clustered, whether one mask serves them all.
        self._sizes = {layer.physical for layer in self._compressed}
        self._clustered = any(layer.events for layer in self._compressed)
        self._mask = None if caller is None else caller.attention_mask
        self._masked = new > 1 if caller is None else self._mask is not None
        self._read_mask(caller, batch, new)

    def _read_mask(self, caller: Caller | None, batch: int, new: int) -> None:
        """Which new columns are padding; refuses a mask that this step's attention could not obey."""
        real = real_columns(self._mask, batch, new)
        start = self._compressed[0].logical if self._compressed else 0
        columns = self._columns.add(real, start)
        self._step = Step(new, start + new, columns, real, caller is None or caller.mask_seen, self._mask)
        if self._clustered and takes_tags(self._config) and isinstance(self._mask, Tensor) and self._mask.ndim == 4:
            self._step.old_slots(self._mask, self._compressed[0].physical + new)
        self._columns = columns

    def _check_in_step(self, layer_idx: int, new: int) -> None:
        """Refuse to go on after a forward pass that stopped half-way, also in a sliding window.

        Those have seen this step's ``new`` tokens already, the layers from the leading one on have not.
        """
        if self._leads(layer_idx):
            windows = {layer.get_seq_length() - new for layer in self.layers[:layer_idx]}
            later = {
                layer.get_seq_length() for layer in self.layers[layer_idx:] if not isinstance(layer, CentroidLayer)
            }
            checks.check_level(windows | later | {layer.logical for layer in self._compressed})

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
        for layer in self._compressed:
            layer.check_crop(tokens_to_remove(length, layer.logical))
        # Sliding windows first: they may refuse, and all of them alike, while the others were just asked.
        for layer in sorted(self.layers, key=lambda layer: isinstance(layer, CentroidLayer)):
            layer.crop(length)
        if self._compressed:
            self._columns = self._columns.until(self._compressed[0].logical)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep, repeat or permute rows, as beam search does."""
        super().reorder_cache(beam_idx)
        self._columns = self._columns.rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, copies next to each other."""
        super().batch_repeat_interleave(repeats)
        if self._columns.padding is not None:
            rows = torch.arange(self._columns.padding.shape[0])
            self._columns = self._columns.rows(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """The rows ``indices`` (numbers or a mask)."""
        super().batch_select_indices(indices)
        if self._columns.padding is not None:
            self._columns = self._columns.rows(torch.arange(self._columns.padding.shape[0])[indices.cpu()])

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
        for shared in (self._config, self._told, self.compressor, *(layer.compressor for layer in self._compressed)):
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
