"""Situations of the matrix in a cache's life: cropped, copied, reset, interrupted, grown, beside sliding windows."""

from __future__ import annotations

import copy

import pytest
import torch
from matrix_case import Case, NotHere, Refused
from transformers import DynamicCache

from centroidkv import Budget
from centroidkv.errors import CacheError


def crop(case: Case) -> None:
    """Exact while nothing merged is cut, refused otherwise, and a refusal changes nothing."""
    ids, more = case.prompt(48), case.prompt(3, seed=1)
    with case.attending("sdpa"):
        case.forward(ids, cache := case.cache())
        twin = copy.deepcopy(cache)
        case.forward(more, cache)
        if case.family.slides:
            before = cache.get_seq_length(1)
            with pytest.raises((RuntimeError, ValueError)):
                cache.crop(-3)
            assert cache.get_seq_length(1) == before
            raise Refused("transformers: a sliding window that has passed its size cannot be cropped")
        cache.crop(-3)
        case.same(case.forward(more, cache), case.forward(more, twin))
        before = cache.get_seq_length()
        with pytest.raises(CacheError, match="cannot be separated"):
            cache.crop(-5)
        assert cache.get_seq_length() == before
        case.same(case.forward(more, cache), case.forward(more, twin))


def beyond_the_models_window(case: Case) -> None:
    """Positions go on counting past max_position_embeddings, as in the plain model; nothing is refused or wrapped."""
    case.model = case.family.make(max_position_embeddings=40)
    ids = case.prompt(48)
    with case.attending("sdpa"):
        case.by_hand(case.generate(ids, case.cache()), [[ids[0]]])
        case.plain_at_full_budget(lambda cache: case.generate(ids, cache))


def deep_copies(case: Case) -> None:
    ids = case.prompt(48)
    with case.attending("sdpa"):
        case.forward(ids[:, :-1], cache := case.cache())
        text = case.generate(ids, copy.deepcopy(cache))
        assert torch.equal(case.generate(ids, cache).logits, text.logits)
        case.by_hand(text, [[ids[0, :-1], ids[0, -1:]]])


def reset(case: Case) -> None:
    ids = case.prompt(48)
    with case.attending("sdpa"):
        case.generate(case.prompt(31, seed=2).expand(2, -1), cache := case.cache())
        cache.reset()
        case.by_hand(case.generate(ids, cache), [[ids[0]]])


def exception_on_the_way(case: Case) -> None:
    """Inside a pass: the cache refuses to go on until reset. Between two passes: it goes on. The model works."""
    ids = case.prompt(48)
    last = len(case.family.kinds) - 1
    with case.attending("sdpa"):
        plain = case.generate(ids)
        case.forward(ids, cache := case.cache())
        broken = case.model.model.layers[last].register_forward_pre_hook(_lose)
        with pytest.raises(ArithmeticError, match="lost"):
            case.forward(ids[:, :1], cache)
        broken.remove()
        if "full" in case.family.kinds:
            with pytest.raises(CacheError, match=r"reset\(\)"):
                case.forward(ids[:, :1], cache)
        cache.reset()
        case.by_hand(case.generate(ids, cache), [[ids[0]]])
        assert torch.equal(case.generate(ids).ids, plain.ids)
        between = case.cache()
        with pytest.raises(ArithmeticError, match="lost"):
            case.generate(ids, between, logits_processor=[_lose])
        case.by_hand(case.generate(torch.cat((ids, ids[:, :1]), -1), between), [[ids[0], ids[0, :1]]])


def _lose(*_: object) -> None:
    raise ArithmeticError("lost")


def stays_bounded(case: Case) -> None:
    """60 tokens at an absolute budget: never more than budget + interval slots, and still the run by hand."""
    if "full" not in case.family.kinds:
        raise NotHere("no layer to compress: its windows bound it")
    ids = case.prompt(48)
    with case.attending("sdpa"):
        text = case.generate(ids, cache := case.cache(Budget.tokens(12)), new=60)
        assert cache.stats().logical == 107
        assert cache.stats().physical <= 16
        case.by_hand(text, [[ids[0]]], budget=Budget.tokens(12))


def other_layers_untouched(case: Case) -> None:
    """Sliding windows hold bit for bit what they hold without compression."""
    if not case.family.slides:
        raise NotHere("no sliding-window layers")
    ids, more = case.prompt(48), case.prompt(9, seed=1)
    with case.attending("sdpa"):
        plain, ours, full = DynamicCache(config=case.model.config), case.cache(), case.cache(1.0)
        for cache in (plain, ours, full):
            case.forward(ids, cache)
        sliding = [i for i, kind in enumerate(case.family.kinds) if kind == "sliding"]
        assert all(torch.equal(plain.layers[i].keys, ours.layers[i].keys) for i in sliding)
        for cache in (plain, ours, full):
            for token in more.split(1, -1):
                case.forward(token, cache)
        # From here on only the layers below the first compressed one see the same input as without compression.
        assert torch.equal(plain.layers[0].keys, ours.layers[0].keys)
        assert all(torch.equal(plain.layers[i].values, full.layers[i].values) for i in sliding)
