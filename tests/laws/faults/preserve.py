"""Planted faults of preserve: plausible wrong implementations, under the law that must reject them."""

from __future__ import annotations

from dataclasses import replace

import torch

from centroidkv.testing import preserve_laws


class Choosing:
    """A preserver made of two functions."""

    share = None

    def __init__(self, select, count=lambda budget: 3, share=None):
        self._select, self.count, self.share = select, count, share

    def select(self, state, free, count):
        return self._select(state, free, count)


def saying(**attributes):
    preserver = Choosing(noisy_choice)
    vars(preserver).update(attributes)
    return preserver


def noisy_choice(state, free, count):
    return free & (torch.rand(free.shape).masked_fill(~free, -1).argsort(-1, descending=True).argsort(-1) < count)


def by_batch_mean(state, free, count):
    score = (state.keys.float() - state.keys.float().mean((0, 1), keepdim=True)).norm(dim=-1)
    return free & (score.masked_fill(~free, -1).argsort(-1, descending=True).argsort(-1) < count)


def head_zero_decides(state, free, count):
    score = state.values.float().norm(dim=-1)[:, :1].expand(free.shape).masked_fill(~free, -1)
    index = score.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return free & torch.zeros_like(free).scatter(-1, index, torch.ones_like(index, dtype=torch.bool))


def by_norm(keys, free, count):
    return free & (
        keys.float().norm(dim=-1).masked_fill(~free, -1).argsort(-1, descending=True, stable=True).argsort(-1) < count
    )


def last_row_decides(state, free, count):
    return by_norm(state.keys[-1:].expand(state.keys.shape), free, count)


def heads_centred(state, free, count):
    return by_norm(state.keys.float() - state.keys.float().mean(1, keepdim=True), free, count)


def first_free_head(state, free, count):
    """What is free in the first head is taken to be free in all."""
    return (free & (free[:, :1].cumsum(-1) <= count)) if state.heads > 1 else by_norm(state.keys, free, count)


def tile_of_64_heads(state, free, count):
    """Heads from the 65th on are never looked at: there the first slots stay."""
    keys = state.keys.clone()
    keys[:, 64:] = keys[:, 64:65] if state.heads > 64 else 0
    return by_norm(keys, free, count)


def by_place_of_row(state, free, count):
    weight = torch.arange(1, state.batch + 1)[:, None, None, None] - 1.0
    return by_norm(state.keys.float() + 3 * weight, free, count)


def by_place_of_head(state, free, count):
    weight = torch.arange(state.heads)[None, :, None, None]
    return by_norm(state.keys.float() * (1 + weight * state.keys.float()[..., :1]), free, count)


def unrotated(state, free, count):
    return by_norm(state.keys_before_rope("this stage"), free, count)


def unrotated_if_possible(state, free, count):
    if state.rotary is not None:
        state = replace(state, keys=state.rotary.unrotate(state.keys, state.positions))
    return by_norm(state.keys.float()[..., :1], free, count)


def by_queries(state, free, count):
    return by_norm(state.head_data["queries"][:, :, :1] * state.keys.float(), free, count)


def scales_keys(state, free, count):
    state.keys.mul_(2)
    return by_norm(state.keys, free, count)


def clears_free(state, free, count):
    chosen = by_norm(state.keys, free, count)
    free &= ~chosen
    return chosen


class LastMask:
    """Keeps the mask of the last call and gives it again where it fits."""

    share = None

    def __init__(self):
        self.last = None

    def count(self, budget):
        return 3

    def select(self, state, free, count):
        mask = by_norm(state.keys, free, count)
        if (
            self.last is not None
            and self.last.shape == mask.shape
            and not (self.last & ~free).any()
            and self.last.sum() == mask.sum()
        ):
            return self.last
        self.last = mask
        return mask


PRESERVE = {
    preserve_laws.chooses_that_many_free_slots: {
        "the first slots, free or not": Choosing(lambda s, free, n: torch.arange(s.slots).expand(free.shape) < n),
        "one too few": Choosing(lambda s, free, n: free & (free.cumsum(-1) < n)),
        "free slots of the first head": Choosing(first_free_head),
        "at most 64 slots": Choosing(
            lambda s, free, n: by_norm(s.keys, free, min(n, 64)), lambda budget: budget // 2, share=0.5
        ),
        "never beyond slot 256": Choosing(
            lambda s, free, n: free & (torch.arange(s.slots) < 256) & (free.cumsum(-1) <= n),
            lambda budget: budget // 2,
            share=0.5,
        ),
        "a threshold": Choosing(lambda s, free, n: free & (s.keys[..., 0] > 0)),
    },
    preserve_laws.rows_and_heads_choose_alone: {
        "random": Choosing(noisy_choice),
        "keys centred over rows and heads": Choosing(by_batch_mean),
        "head 0 decides for all": Choosing(head_zero_decides),
        "the last row decides for all": Choosing(last_row_decides),
        "heads pooled without saying so": Choosing(heads_centred),
        "heads past the 64th copy another": Choosing(tile_of_64_heads),
    },
    preserve_laws.counts_are_sound: {
        "a share that rounds up and adds one": Choosing(None, lambda budget: int(budget * 0.5) + 1, share=0.5),
        "not whole": Choosing(None, lambda budget: budget / 2, share=0.5),
        "takes more than its share": Choosing(None, lambda budget: int(budget * 0.8), share=0.5),
        "takes less than its share": Choosing(None, lambda budget: int(budget * 0.2), share=0.5),
        "a fixed count that grows": Choosing(None, lambda budget: min(budget, 4)),
        "falls past 2048": Choosing(None, lambda budget: min(budget // 2, 1024), share=0.5),
    },
    preserve_laws.rows_and_heads_are_treated_alike: {
        "rows shifted by their number": Choosing(by_place_of_row),
        "heads bent by their number": Choosing(by_place_of_head),
    },
    preserve_laws.remembers_nothing: {
        "the last mask again": LastMask(),
        "random": Choosing(noisy_choice),
        "scales the keys in place": Choosing(scales_keys),
        "clears what it takes in the mask it was given": Choosing(clears_free),
    },
    preserve_laws.declares_what_exists: {
        "a need misspelt": saying(need_rotary=True),
        "a list in place of a yes": saying(pools_heads=[1]),
    },
    preserve_laws.needs_only_what_it_says: {
        "un-rotates without saying so": Choosing(unrotated),
        "un-rotates where it can": Choosing(unrotated_if_possible),
        "looks at queries without saying so": Choosing(by_queries),
    },
}
