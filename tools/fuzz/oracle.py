"""What one step over a compressed cache must amount to: every centroid put ``degree`` times into a plain cache.

ln N in the logits is exactly that, whatever the model: softmax over N equal keys weighs them N times. Each row of a
batch is computed alone, without padding, without empty slots, without what was evicted, under a mask written out here.
Copied into failing scripts.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from centroidkv.cache import FixedState
from centroidkv.integrations.transformers.layer import CentroidLayer
from tools.fuzz.models import attention_modules


@dataclass(frozen=True, eq=False)
class Held:
    """What one layer holds at a moment, in tensors of its own; ``degree`` is None for a sliding window."""

    keys: torch.Tensor | None
    values: torch.Tensor | None
    degree: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    seen: tuple[int, ...] = ()
    logical: int = 0
    events: tuple[int, ...] = ()

    def same(self, other: Held) -> bool:
        """Whether nothing was changed, to the last bit."""
        facts = (self.seen, self.logical, self.events) == (other.seen, other.logical, other.events)
        return facts and all(
            (a is None) == (b is None) and (a is None or (a.shape == b.shape and a.dtype == b.dtype and a.equal(b)))
            for a, b in zip(self.tensors(), other.tensors(), strict=True)
        )

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Everything that could change."""
        return self.keys, self.values, self.degree, self.positions

    def packed(self) -> Held:
        """Without the first slots, as far as they are empty in every row and head."""
        if self.keys is None or self.degree is None:
            return self
        empty = int(((self.degree > 0).any(1).any(0).cumsum(0) == 0).sum())
        some = [None if x is None else x[:, :, empty:] for x in self.tensors()]
        return Held(*some, self.seen, self.logical, self.events)

    def rows(self, rows: list[int]) -> Held:
        """Some rows."""
        some = [None if x is None else x[rows] for x in self.tensors()]
        seen, events = (tuple(x[row] for row in rows) if x else () for x in (self.seen, self.events))
        return Held(*some, seen, self.logical, events)


@torch.no_grad()
def look(cache: Any) -> list[Held]:
    """What every layer of ``cache`` holds now."""
    return [_look(layer) for layer in cache.layers]


def _look(layer: Any) -> Held:
    def mine(x: torch.Tensor) -> torch.Tensor:
        return x.detach().clone()

    if not isinstance(layer, CentroidLayer):
        filled = layer.get_seq_length() > 0
        keys, values = (mine(x) if filled else None for x in (layer.keys, layer.values))
        return Held(keys, values, logical=layer.get_seq_length())
    growing, state = layer.growing, layer.growing.state
    logical = int(growing.logical)
    if state is None:
        return Held(None, None, torch.empty(0), logical=logical)
    tensors = (mine(x) for x in (state.keys, state.values, state.degree, state.positions))
    clocks = (growing._grown if isinstance(growing, FixedState) else growing)._clocks
    return Held(*tensors, tuple(state.seen.tolist()), logical, tuple(clock.events for clock in clocks))


def repeated(held: Held, row: int, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys ``[1, H, K, D]``, values, and the slot ``[H, K]`` each stands in (for a sliding window, its column)."""
    assert held.keys is not None
    assert held.values is not None
    if held.degree is None:
        width = held.keys.shape[2]
        at = torch.arange(held.logical - width, held.logical)
        real = columns[row, at]
        return held.keys[row, :, real][None], held.values[row, :, real][None], at[real].expand(held.keys.shape[1], -1)
    parts = []
    for head, degree in enumerate(held.degree[row].round().long()):
        slots = torch.arange(degree.shape[0]).repeat_interleave(degree)
        parts.append((held.keys[row, head, slots], held.values[row, head, slots], slots))
    keys, values, slots = (torch.stack(part) for part in zip(*parts, strict=True))
    return keys[None], values[None], slots


@dataclass(frozen=True, eq=False)
class Step:
    """One row's new tokens.

    Args:
        ids: ``[n]``; positions: ``[n]``; at: ``[n]`` their columns.
        among: ``[n, n]`` added to logits among the new tokens: 0, -inf, or anything of the user's.
        old: what is added to logits of the old slots, ``[n, slots]``, or None: nothing.
        window: of the sliding layers.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    at: torch.Tensor
    among: torch.Tensor
    old: torch.Tensor | None
    window: int


@torch.no_grad()
def plain_step(model: Any, held: list[Held], kinds: list[str], row: int, step: Step, columns: Any) -> torch.Tensor:
    """Logits ``[n, vocabulary]`` of the plain ``model`` over the repeated cache."""
    dtype = model.dtype
    cache, masks, of_layers = DynamicCache(), {}, []
    heads = model.config.num_attention_heads
    filled = bool(held) and held[0].keys is not None
    for index, kind in enumerate(kinds):
        slots = torch.zeros(1, 0, dtype=torch.long)
        if filled:
            keys, values, slots = repeated(held[index], row, columns)
            layer = DynamicLayer()
            wide = torch.float64 if dtype == torch.float64 else None
            layer.update(keys.to(wide or keys.dtype), values.to(wide or values.dtype))
            cache.layers.append(layer)
        masks[kind] = _mask(kind, slots, step, heads // slots.shape[0]).to(dtype)
        of_layers.append(masks[kind])
    mask: Any = masks[kinds[0]]
    if len(masks) > 1 or model.config.model_type.startswith("gemma3"):
        any_mask = next(iter(masks.values()))
        mask = {f"{kind}_attention": masks.get(kind, any_mask) for kind in ("full", "sliding")}
    with contextlib.ExitStack() as stack:
        if step.old is not None:  # one mask for all layers would be by the slots of one of them
            for module, own in zip(attention_modules(model), of_layers, strict=True):
                hook = module.register_forward_pre_hook(partial(_given, own), with_kwargs=True)
                stack.callback(hook.remove)
        out = model(
            step.ids[None], attention_mask=mask, position_ids=step.positions[None], past_key_values=cache,
            use_cache=True,
        )  # fmt: skip
    return out.logits[0]


def _given(mask: torch.Tensor, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What an attention module is called with, but for its mask."""
    return args, {**kwargs, "attention_mask": mask}


def _mask(kind: str, slots: torch.Tensor, step: Step, groups: int) -> torch.Tensor:
    """``[1, 1 or Hq, n, K + n]``, added to logits."""
    n = step.ids.shape[0]
    lowest = torch.finfo(torch.float32).min / 4
    among = step.among.clamp(min=lowest)
    if kind == "sliding":
        hidden = step.at[:, None] - slots[:1] >= step.window
        old = torch.zeros(hidden.shape).masked_fill(hidden, lowest)[None]
        among = among.masked_fill(step.at[:, None] - step.at >= step.window, lowest)
    elif step.old is None or not slots.shape[1]:
        old = torch.zeros(1, n, slots.shape[1])
    else:
        old = torch.stack([step.old[:, head] for head in slots]).clamp(min=lowest)
        old = old.repeat_interleave(groups, 0)
    return torch.cat((old, among.expand(old.shape[0], n, n)), -1)[None]
