"""CentroidPress: our compressors in kvpress's place for a press."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from kvpress import BasePress
from kvpress.presses.base_press import is_prefilling
from kvpress.utils import get_prerope_query_states
from torch import Tensor
from transformers import DynamicCache, QuantizedCache
from transformers.cache_utils import DynamicLayer

from centroidkv.allocation import depths_of
from centroidkv.compressor import Compressor
from centroidkv.errors import BackendError, BudgetError, CacheError, StageError
from centroidkv.integrations.kvpress.layer import PressedLayer
from centroidkv.integrations.kvpress.loan import Loan
from centroidkv.integrations.rope import rotary_of
from centroidkv.integrations.transformers.attention import takes_handovers
from centroidkv.integrations.transformers.masks import real_columns
from centroidkv.queries import QUERIES, evenly, sample_queries
from centroidkv.records import Budget
from centroidkv.rotary import Rotary
from centroidkv.state import KVState


@dataclass(repr=False)
class CentroidPress(BasePress):
    """Cluster the context after the prefill, layer by layer, as a :class:`~centroidkv.Compressor` says.

    Use it as any press: ``pipe(context, question=..., press=CentroidPress(presets.balanced(0.25)))``, or ``with
    press(model): model(ids, past_key_values=cache)``. Where tokens merge, the attention of the decode steps adds ln N,
    also after the ``with``: the model is lent to our attention function until the clustered cache is gone
    (:class:`~centroidkv.integrations.kvpress.Loan`). Sliding-window layers are left alone.

    Args:
        compressor: which stages, which budget. One whose sizes depend on the data (thresholds) is refused.
        rotary: how keys are rotated, for models whose RoPE is not recognised.

    Raises:
        StageError: not a Compressor, or its sizes depend on the data.
        BudgetError: on use, a context too short for what must be preserved.
        BackendError: on use, attention that cannot take degrees.
        CacheError: on use, a cache or a combination of presses that cannot work; see docs/kvpress.md.
    """

    compressor: Compressor
    rotary: Rotary | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, Compressor):
            raise StageError(
                "CentroidPress takes a Compressor, such as presets.centroidkv(0.25), got "
                f"{type(self.compressor).__name__}"
            )
        if not self.compressor.plannable:
            raise StageError(
                "how long a layer becomes must be known ahead of the data, because masks are made before it; the sizes "
                f"of this compressor depend on the data: {self.compressor!r}"
            )
        if not self._merges and not self.compressor.even:
            raise StageError(
                "a press that evicts leaves kvpress's own cache, whose one mask serves all layers, so they must come "
                f"out equally long; build with allocation(Even()), not {self.compressor.allocation!r}"
            )
        self._loan: Loan | None = None

    # -- the budget in kvpress's words ------------------------------------------------------------------------------

    @property
    def compression_ratio(self) -> float:
        """The share of tokens to remove: 1 - the ratio of the budget, exactly (0.7 for a budget of 0.3).

        Setting it replaces the compressor's budget, as kvpress's evaluation does.

        Raises:
            BudgetError: the budget is a number of slots, or the new ratio leaves none (1.0) or is not in [0, 1).
        """
        budget = self.compressor.budget
        if budget.kind != "ratio":
            raise BudgetError(
                f"a press of {budget!r} has no compression_ratio, its share depends on the context; "
                "use Budget.ratio where kvpress asks for one"
            )
        return _other_share(budget.amount)

    @compression_ratio.setter
    def compression_ratio(self, removed: float) -> None:
        if isinstance(removed, bool) or not isinstance(removed, int | float) or not 0 <= removed < 1:
            raise BudgetError(
                f"compression_ratio is the share of tokens to remove, in [0, 1), got {removed!r}; at least one slot "
                "has to stay"
            )
        self.compressor = self.compressor.with_(budget=Budget.ratio(_other_share(removed)))

    # -- compressing ------------------------------------------------------------------------------------------------

    @property
    def _merges(self) -> bool:
        """Whether slots may end up with degrees other than 1, which attention then has to know."""
        return not self.compressor.evicts

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """Compress whatever is prefilled inside the ``with``."""
        if all(map(_slides, DynamicCache(config=model.config).layers)):
            raise CacheError("every layer of this model attends to a sliding window, so there is nothing to compress")
        if not self._merges:
            with super().__call__(model):
                yield
            return
        before, (self._loan, began) = self._loan, Loan.of(model)
        try:
            with super().__call__(model):
                yield
        except BaseException:
            if began:  # nobody else relies on it, and a failed block must not leave a changed model
                self._loan.end()
            raise
        finally:
            self._loan = before

    def forward_hook(self, module: Any, input: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """After a layer's prefill: put its clustered state in the place of its keys and values."""
        cache, index = kwargs["past_key_values"], module.layer_idx
        if not is_prefilling(kwargs["cache_position"], kwargs["hidden_states"].shape[1]):
            return output
        if _slides(DynamicCache(config=module.config).layers[index]):
            return output
        layer = cache.layers[index]
        self._check(cache, layer, module, kwargs)
        state = self._compress(module, kwargs["hidden_states"], layer.keys, layer.values)
        if state is None:
            return output
        if self._merges:
            cache.layers[index] = PressedLayer(state, self._loan)
        else:
            layer.keys, layer.values = state.keys, state.values
        return output

    def compress(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Keys ``[B, H, n, D]`` and values that are kept, for compressors that evict.

        Raises:
            StageError: the compressor merges. Two tensors cannot carry its degrees.
        """
        if self._merges:
            raise StageError(
                "compress returns keys and values only, and the degrees of merged tokens would be lost. Use the press "
                "itself: `with press(model):` or pipe(..., press=press); wrappers that call compress cannot hold it"
            )
        state = self._compress(module, hidden_states, keys, values)
        return (keys, values) if state is None else (state.keys, state.values)

    def _compress(self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor) -> KVState | None:
        """The compressed state; None where the budget holds everything."""
        own, index = self._layers(module)
        compressor, tokens = own[index], keys.shape[2]
        if all(each.budget.slots(tokens) >= tokens for each in own):
            return None
        # A layer that keeps everything while others do not hands its degrees over all the same: one mask serves all
        # layers, and it is made for another length.
        rotary = self.rotary
        if rotary is None and compressor.needs_rotary:
            rotary = rotary_of(module.config)
        state = KVState.from_kv(keys, values, rotary=rotary)
        if compressor.needs_queries:
            state = replace(state, head_data={QUERIES: _queries(module, hidden, state.heads)})
        return compressor(state)

    def _layers(self, module: Any) -> tuple[list[Compressor], int]:
        """The compressors of all layers that are compressed, and which of them is the module's."""
        if self.compressor.even:  # and `compress` may be called without a module
            return [self.compressor], 0
        layers = DynamicCache(config=module.config).layers
        full = [index for index, layer in enumerate(layers) if not _slides(layer)]
        return self.compressor.for_layers(depths_of(full, len(layers))), full.index(module.layer_idx)

    def _check(self, cache: Any, layer: Any, module: Any, kwargs: dict[str, Any]) -> None:
        """Refuse what cannot come out right, by name."""
        seen = kwargs["hidden_states"].shape[1]
        if isinstance(cache, QuantizedCache):
            raise CacheError(
                "a QuantizedCache stores keys and values in groups, without a place for degrees; use a DynamicCache"
            )
        if type(layer) is not DynamicLayer:
            raise CacheError(
                f"CentroidPress compresses the layers of a DynamicCache, got a {type(layer).__name__}; pass "
                "past_key_values=DynamicCache(), or nothing to the pipeline"
            )
        if layer.keys.shape[2] != seen:
            raise CacheError(
                f"layer {module.layer_idx} holds {layer.keys.shape[2]} slots for a context of {seen} tokens: another "
                "press removed some before, and where the others stood is not known. Use CentroidPress alone"
            )
        if getattr(module, "masked_key_indices", None) is not None:
            raise CacheError(
                "another press (AdaKV, DMS, KVzap, KVzip, ...) masks single keys of this layer, whose indices mean "
                "nothing once the keys are merged; use CentroidPress without it"
            )
        if real_columns(kwargs.get("attention_mask"), layer.keys.shape[0], seen) is not None:
            raise CacheError(
                "the batch is padded, and kvpress's caches have no place for the mask once slots are not tokens; "
                "press one sequence at a time, or use CentroidCache, which takes padded batches"
            )
        if self._merges and not takes_handovers(module.config):
            raise BackendError(
                f"attention {module.config._attn_implementation!r} would ignore the degrees of merged tokens. Inside "
                "another press, or after choosing another attention, wrap the whole in `with enable(model):` from "
                "centroidkv.integrations.transformers"
            )

    def __repr__(self) -> str:
        """On one line, which is how kvpress's evaluation records it."""
        return f"CentroidPress({' '.join(repr(self.compressor).split())})"


def _other_share(share: float) -> float:
    """1 - share without binary rounding: 0.3 for 0.7. The one place where kvpress's ratio and ours meet."""
    return float(1 - Fraction(str(share)))


def _slides(stock: Any) -> bool:
    """Whether this is the layer transformers would give to a sliding window; the pipeline's cache is not told."""
    return bool(stock.is_sliding)


def _queries(module: Any, hidden: Tensor, heads: int) -> Tensor:
    """The sample ``[B, H, G * SAMPLE, D]`` of the queries of ``hidden [B, L, d]``, before RoPE, times their scale.

    Sampled before they are projected: the same rows as :func:`~centroidkv.queries.sample_queries` takes of all.
    """
    some = hidden[:, evenly(hidden.shape[1]).to(hidden.device)]
    with torch.no_grad():
        try:
            queries = get_prerope_query_states(module, some)
        except NotImplementedError as error:
            raise BackendError(
                f"kvpress cannot read the queries of {type(module).__name__}; choose a compressor that needs none, "
                "such as presets.distinctive"
            ) from error
    scale = getattr(module, "scaling", None) or queries.shape[-1] ** -0.5
    return sample_queries(queries * scale, heads)
