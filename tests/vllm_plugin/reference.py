"""A dense Hugging Face run that clusters by the same rule as the plugin, written without any of its code but the
compressor and the trigger: per layer one plain state, cut at the last full block and compressed when that says so.

Which pairs are merged depends on comparisons, and now and then one is so close that the seventh digit of a key decides
it. Two float32 implementations of a model differ there, as does this one from itself in float64. So a run can be given
the keys that the engine was about to cluster: it makes sure that they are its own to :data:`DIGITS`, and clusters them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from centroidkv import Budget, KVState
from centroidkv.cache import GrowingState
from centroidkv.integrations.transformers import CentroidCache, enable
from centroidkv.integrations.transformers.layer import CentroidLayer
from centroidkv.trigger import PromptEnd

DIGITS = 1e-5
"""How far, relative to a head's norm, the keys of two float32 implementations may be apart. Found: up to 2e-6."""


class BlockwiseState(GrowingState):
    """Compresses all full blocks at the end of the prompt and every ``interval`` tokens, down to whole blocks.

    ``given``: per compression the keys ``[H, T, D]`` to cluster in place of its own, which they must be close to.
    """

    def __init__(self, compressor, interval, rotary, block_size):
        super().__init__(compressor, interval, rotary)
        self.block_size = block_size
        self.given = None
        self.prompt = None
        self.runs = 0

    def append(self, keys, values, real=None, queries=None, degrees=False):
        if self.prompt is None:
            self.prompt = keys.shape[2]
        start = self.logical
        super_state = KVState.from_kv(keys, values, rotary=self.rotary)
        new = replace(super_state, positions=super_state.positions + start, seen=None)
        held = new if self._held is None else join(self._held, new)
        self.logical += keys.shape[2]
        self._held = self._compressed(held) if self._moment() else held
        return held.keys, held.values, held.degree if degrees or bool((held.degree != 1).any()) else None

    _held = None

    def _moment(self):
        return PromptEnd(self.interval).due(self.prompt, self.logical)

    def _compressed(self, held):
        full = self.logical // self.block_size * self.block_size
        tail = self.logical - full
        slots = held.slots - tail
        blocks = self.compressor.budget.slots(full) // self.block_size if full else 0
        target = blocks * self.block_size
        if not blocks or target >= slots:
            return held
        if not self.compressor.fits(full, slots, Budget.tokens(target)):
            return held
        sized = self.compressor.with_(budget=Budget.tokens(target))
        head = held.map_slots(lambda x: x[:, :, :slots])
        if self.given is not None:
            keys = self.given[self.runs][None]
            apart = (keys - head.keys).norm(dim=(2, 3)) / head.keys.norm(dim=(2, 3))
            assert float(apart.max()) <= DIGITS, f"compression {self.runs}: keys are {float(apart.max()):.1e} apart"
            head = replace(head, keys=keys)
        self.runs += 1
        rest = held.map_slots(lambda x: x[:, :, slots:])
        return join(replace(sized(replace(head, seen=None)), seen=None), rest)

    @property
    def like(self):
        return self._held

    @property
    def physical(self):
        return 0 if self._held is None else self._held.slots

    @property
    def events(self):
        return self.runs


def join(first: KVState, second: KVState) -> KVState:
    parts = {
        name: torch.cat((getattr(first, name), getattr(second, name).to(getattr(first, name).dtype)), 2)
        for name in ("keys", "values", "degree", "positions")
    }
    return KVState(**parts, rotary=first.rotary)


class BlockwiseCache(CentroidCache):
    """``given``: per layer what :class:`BlockwiseState` takes."""

    def __init__(self, compressor, interval, block_size, given=None, **more):
        self.block_size = block_size
        self.given = given
        super().__init__(compressor, interval, **more)

    def _new_layer(self, compressor, rotary):
        return CentroidLayer(BlockwiseState(compressor, self.interval, rotary, self.block_size))

    def _bind(self, config):
        super()._bind(config)
        for layer, given in zip(self.layers, self.given or [None] * len(self.layers), strict=True):
            layer.growing.given = given


@torch.no_grad()
def logprobs_along(model, prompt: list[int], output: list[int], compressor, interval: int, block_size: int, given=None):
    """Log-probabilities ``[steps, vocabulary]`` with which the reference would choose each token of ``output``."""
    cache = BlockwiseCache(compressor, interval, block_size, given)
    found, tokens = [], torch.tensor([prompt])
    with enable(model):
        for token in output:
            logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[0, -1]
            found.append(logits.float().log_softmax(-1))
            tokens = torch.tensor([[token]])
    return torch.stack(found), [layer.growing.runs for layer in cache.layers]


def compare(ours, chosen, reference: torch.Tensor):
    """(steps whose token differs although the reference is sure by 1e-3, largest |dlogprob| of the chosen tokens).

    ``ours``: per step a dict token -> log-probability, as vLLM reports it.
    """
    wrong, largest = [], 0.0
    for step, (told, token, right) in enumerate(zip(ours, chosen, reference, strict=True)):
        best = right.topk(2)
        margin = float(best.values[0] - best.values[1])
        if token != int(best.indices[0]) and margin >= 1e-3:
            wrong.append((step, token, int(best.indices[0]), margin))
        largest = max(largest, math.fabs(told[token] - float(right[token])))
    return wrong, largest
