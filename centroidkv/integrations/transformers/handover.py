"""What a cache layer hands to the attention of its model, and the check that attention really gets it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from centroidkv.cache.columns import Columns
from centroidkv.errors import BackendError, CacheError
from centroidkv.integrations.transformers.masks import (
    as_additive,
    before_new,
    hidden,
    is_made_from_padding,
    real_columns,
)

KEYWORD = "centroidkv_handover"
"""Keyword argument of our attention functions by which a handover arrives, in releases that share arguments."""

_TAG = "_centroidkv_handover"

POOLED = "one decision for all heads (similarity Cosine(heads='mean'), and preservers that treat all heads alike)"
LOST = "If some layers have seen this step's tokens by now, reset() the cache first"


_open: dict[int, weakref.ref[Handover]] = {}
"""By id: those that no attention function has signed for yet, of all models and threads."""


def any_open(configs: Collection[int]) -> bool:
    """Whether a handover is on its way, or was lost with a forward pass that stopped, in a model of these ``configs``.

    ``configs``: ids of the configurations of its attention modules.
    """
    handovers = [reference() for reference in list(_open.values())]  # a copy: other threads go on
    return any(handover is not None and id(handover.config) in configs for handover in handovers)


def weakly(thing: Any) -> Callable[[], Any]:
    """Gives ``thing`` as long as someone else keeps it: masks of long prompts are not to outlive their pass."""
    return (lambda: None) if thing is None else weakref.ref(thing)


@dataclass(eq=False)
class Step:
    """What all layers have in common in one forward pass.

    Args:
        new: L, the tokens of this step.
        total: columns seen, these included.
        columns: the padding among them.
        real: ``[B, L]`` bool, which new columns are no padding; None: all.
        mask_seen: whether the mask that padding is read from was there to be read.
        mask: gives that mask, as long as it is alive; a model may make another one of it.
    """

    new: int
    total: int
    columns: Columns
    real: Tensor | None = None
    mask_seen: bool = True
    mask: Callable[[], Any] = lambda: None
    _read: list[tuple[Callable[[], Any], int, Tensor | None, bool]] = field(default_factory=list)

    def old_slots(self, mask: Tensor | None, slots: int, bool_per_slot: bool = True) -> tuple[Tensor | None, bool]:
        """What a 4-D mask says to a layer of ``slots`` slots, the new ones included.

        A mask has a column per token or per slot. One that hides nothing but padding adds nothing to the old slots, for
        empty slots have degree 0. One with a column per slot is kept. Any other would have to reach into clusters.

        Args:
            mask: ``[B or 1, Hq or 1, L or 1, S]``, bool or additive; None: no mask.
            slots: of the layer that attends.
            bool_per_slot: whether a bool mask of unknown origin may be taken to have a column per slot.

        Returns:
            What it adds to the old slots, additive, or None for nothing; whether every query sees every new token.

        Raises:
            CacheError: it hides or weighs old tokens, and has no column per slot.
        """
        if mask is None:
            return None, self.new == 1
        for known, width, content, all_seen in self._read:  # layers share masks: each is looked at once in a step
            if known() is mask and width == slots:
                return content, all_seen
        width = mask.shape[-1]
        padding = self.columns.between(self.total - width, self.total - self.new) if width <= self.total else None
        content = before_new(mask, padding, self.real, self.new)
        if content is not None:
            by_token = is_made_from_padding(mask) or (mask.dtype == torch.bool and not bool_per_slot)
            if width != slots or by_token:
                raise CacheError(
                    "the attention mask hides or weighs tokens before this step that are not padding. Its "
                    f"{width} columns stand for {self.total} tokens, which this layer holds in {slots} slots. Let the "
                    "mask show all old tokens (padding aside), or pass an additive 4-D mask with a column per slot. "
                    f"{LOST}"
                )
            self._check_chosen(mask, content)
            content = as_additive(content, torch.float32 if mask.dtype == torch.bool else mask.dtype)
        all_seen = not bool((as_additive(mask[..., -self.new :], torch.float32) != 0).any())
        self._read.append((weakly(mask), slots, content, all_seen))
        return content, all_seen

    def _check_chosen(self, mask: Tensor, content: Tensor) -> None:
        """Refuse a mask in which the model itself hides old slots: it counts slots, and was made to count tokens."""
        given = self.mask()
        if mask is given:
            return
        chosen = hidden(content)
        if isinstance(given, Tensor) and given.shape[-1] == mask.shape[-1]:
            chosen = chosen & ~hidden(given[..., : content.shape[-1]])
        if bool(chosen.any()):
            raise CacheError(
                "the model hides some of the old slots by a choice of its own (Doge beyond its keep_window_size), "
                f"which it makes among tokens and would now make among clusters; use shorter contexts. {LOST}"
            )


class Handover:
    """Keys, values and degrees on their way from a cache layer to our attention function, which signs for them.

    It travels among the keyword arguments that attention modules share with the cache (from 5.24 on), or on the key
    tensor. It keeps no tensor alive once it was received.

    Args:
        keys, values: ``[B, H, T, D]``, ``[B, H, T, Dv]``: what the cache returns.
        degree: ``[B, H, T]`` float32; None as long as nothing was clustered: the model then attends as it would anyway.
        step: what is known of the step; None for a cache that knows of no padding.
        one_decision: whether all heads hold the same clusters, so that regrouping heads does no harm.
        config: of the attention module that is to sign.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, degree: Tensor | None, step: Step | None = None,
        one_decision: bool = False, config: Any = None,
    ) -> None:  # fmt: skip
        self.degree, self.step, self.one_decision, self.config = degree, step, one_decision, config
        self.received = False
        self._given = (weakref.ref(keys), weakref.ref(values))
        self._kept: tuple[Tensor, ...] = (keys, values)
        number = id(self)
        _open[number] = weakref.ref(self, lambda _: _open.pop(number, None))

    def attach(self) -> Tensor:
        """The keys with this handover on them."""
        keys = self._kept[0]
        setattr(keys, _TAG, self)
        self._kept = ()  # or keys and handover would keep each other alive
        return keys

    def accept(self, module: Any, keys: Tensor, values: Tensor, mask: Any, arguments: dict[str, Any]) -> None:
        """Sign for it, after a look at what ``module`` made of it.

        Raises:
            BackendError: attention is about to see other keys or values, or a bias of the model's own per slot.
            CacheError: padding that the cache could not see.
        """
        self.close()
        name = type(module).__name__
        given = tuple(reference() for reference in self._given)
        straight = keys is given[0] and values is given[1]
        if not straight and not self._regrouped(keys, values, *given):
            raise BackendError(
                f"{name} attends to other keys or values than the cache gave it (it regroups heads, or changes them "
                f"after the cache), so degrees would meet the wrong ones. If it only regroups heads, {POOLED} will do. "
                f"{LOST}"
            )
        check_own_bias(name, arguments)
        step = self.step
        if step is not None and not step.mask_seen and real_columns(mask, keys.shape[0], step.new) is not None:
            raise CacheError(
                f"{name} hides padding that the cache could not see, because its forward has no argument named "
                f"attention_mask; use sequences without padding. {LOST}"
            )
        self.received = True
        if straight:
            self._kept = ()

    def close(self) -> None:
        """It is on its way no longer: signed for, or refused."""
        _open.pop(id(self), None)

    def _regrouped(self, keys: Tensor, values: Tensor, old_keys: Tensor | None, old_values: Tensor | None) -> bool:
        """Whether heads were repeated or reordered at most, and all of them hold the same clusters."""
        return (
            self.one_decision
            and old_keys is not None
            and old_values is not None
            and (self.degree is None or bool((self.degree == self.degree[:, :1]).all()))
            and _are_heads_of(keys, old_keys)
            and _are_heads_of(values, old_values)
        )

    def degree_for(self, keys: Tensor) -> Tensor:
        """The degrees of ``keys [B, H', T, D]``, whose heads may be regrouped."""
        assert self.degree is not None  # callers saw to it
        if keys.shape[1] == self.degree.shape[1]:
            return self.degree
        return self.degree[:, :1].expand(keys.shape[:3])

    def step_of(self, new: int, mask: Tensor | None) -> Step:
        """The step, or one without padding for a cache that knows of none."""
        return self.step or Step(new, 0 if mask is None else mask.shape[-1], Columns())


def check_own_bias(name: str, arguments: dict[str, Any]) -> None:
    """Refuse a bias of the model's own between queries and slots, counted by slots instead of tokens."""
    if arguments.get("position_bias") is not None:
        raise BackendError(
            f"{name} adds a bias of its own for how far apart tokens are (position_bias) and counts it in slots, which "
            f"is wrong once tokens are clustered. Models of this kind (T5 and its relatives) are not served. {LOST}"
        )


def received_from(keys: Tensor, arguments: dict[str, Any]) -> Handover | None:
    """The handover that arrived with ``keys`` or among the keyword ``arguments``, which it is taken out of."""
    handed = arguments.pop(KEYWORD, None)
    return handed if handed is not None else getattr(keys, _TAG, None)


def _are_heads_of(some: Tensor, given: Tensor) -> bool:
    """Whether every head of ``some`` is one of the heads ``given``, slot by slot."""
    if some.shape[0] != given.shape[0] or some.shape[2:] != given.shape[2:]:
        return False
    return all(any(head.equal(other) for other in given.unbind(1)) for head in some.unbind(1))
