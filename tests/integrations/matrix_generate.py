"""Situations of the matrix around ``generate``: how people already call their models. Named by themselves."""

from __future__ import annotations

import pytest
import torch
from matrix_case import NEW, Case, NotHere, Refused
from matrix_models import RELEASE
from transformers import Cache, DynamicCache

from centroidkv.errors import BackendError, CacheError
from centroidkv.integrations.transformers.release import STOCK_TAKES_BIAS

HANDS_OVER = STOCK_TAKES_BIAS and RELEASE >= (5, 24)
"""Whether attention modules hand their keyword arguments to the cache, so that stock attention takes the degrees."""

ANNOUNCES_CROPS = hasattr(Cache, "activate_past_recording")
"""Whether assisted generation says beforehand that it will crop, and crops by a number of tokens."""


def greedy(case: Case) -> None:
    ids = case.prompt(48)
    with case.attending("sdpa"):
        text = case.generate(ids, cache := case.cache())
        case.compressed(cache)
        case.by_hand(text, [[ids[0]]])
        case.plain_at_full_budget(lambda cache: case.generate(ids, cache))


def eager(case: Case) -> None:
    ids = case.prompt(48)
    with case.attending("eager"):
        case.by_hand(case.generate(ids, case.cache()), [[ids[0]]])
        case.plain_at_full_budget(lambda cache: case.generate(ids, cache))


def cache_alone(case: Case) -> None:
    """No ``enable``: stock sdpa takes the degrees from the cache, or it is refused before the first token."""
    ids = case.prompt(48)
    with case.attending("sdpa", with_enable=False):
        if not HANDS_OVER and "full" in case.family.kinds:
            cache = case.cache()
            with pytest.raises(BackendError, match="enable"):
                case.generate(ids, cache)
            seen = next(i for i, kind in enumerate(case.family.kinds) if kind == "full")
            assert cache.get_seq_length(seen) == 0
            raise Refused("stock attention cannot take degrees before 5.24; enable(model)")
        case.by_hand(case.generate(ids, case.cache()), [[ids[0]]])
        case.plain_at_full_budget(lambda cache: case.generate(ids, cache))


def weighed_by_queries(case: Case) -> None:
    """A compressor that needs the model's queries and its RoPE, as presets.balanced does."""
    ids = case.prompt(48)
    with case.attending("sdpa"):
        text = case.generate(ids, cache := case.cache(queries=True))
        case.compressed(cache)
        case.by_hand(text, [[ids[0]]], queries=True)


def chat_with_full_history(case: Case) -> None:
    """Three turns, each ``generate`` given everything said so far."""
    with case.attending("sdpa"):

        def chat(cache):
            history = case.prompt(30)
            for turn in range(3):
                text = case.generate(history, cache, new=5)
                history = torch.cat((text.ids, case.prompt(6, seed=turn)), -1)
            return text

        text = chat(cache := case.cache())
        case.compressed(cache)
        # What the cache has not seen when a turn begins: the last token generated, and the new ones.
        chunks, start = [], 0
        for length in (30, 41, 52):
            chunks += [text.ids[0, start:length], *text.ids[0, length : length + 4].split(1)]
            start = length + 4
        hand = case.hand()
        logits = [hand.feed(chunk)[-1] for chunk in chunks]
        case.same(text.logits[0], torch.stack(logits[-5:]))
        case.plain_at_full_budget(
            lambda cache: chat(DynamicCache(config=case.model.config) if cache is None else cache)
        )


def only_new_ids(case: Case) -> None:
    """A second ``generate`` given the new ids alone, and a mask over everything."""
    ids, more = case.prompt(30), case.prompt(6, seed=1)
    with case.attending("sdpa"):

        def turns(cache):
            first = case.generate(ids, cache, new=5)
            new = torch.cat((first.ids[:, -1:], more), -1)
            mask = torch.ones(1, 34 + new.shape[1], dtype=torch.long)
            return first, case.generate(new, cache, attention_mask=mask, new=5)

        try:
            plain = turns(DynamicCache(config=case.model.config))[1]
        except Exception as error:
            raise NotHere(
                f"transformers {RELEASE} itself cannot: {type(error).__name__} with its DynamicCache"
            ) from None
        whole = torch.cat((case.generate(ids, new=5).ids, more), -1)
        if not torch.equal(plain.new, case.generate(whole, new=5).new):
            raise NotHere(f"transformers {RELEASE} itself gives another text with its DynamicCache")
        first, text = turns(cache := case.cache())
        case.compressed(cache)
        hand = case.hand()
        hand.follow([ids[0]], first.new[0])
        logits = [hand.feed(torch.cat((first.ids[0, -1:], more[0])))[-1]]
        logits += [hand.feed(token[None])[-1] for token in text.new[0, :-1]]
        case.same(text.logits[0], torch.stack(logits))
        assert torch.equal(turns(case.cache(1.0))[1].ids, plain.ids)


def sampling(case: Case) -> None:
    ids = case.prompt(48)
    with case.attending("sdpa"):

        def sample(cache):
            torch.manual_seed(5)
            return case.generate(ids, cache, do_sample=True, top_k=0)

        case.by_hand(sample(case.cache()), [[ids[0]]])
        case.plain_at_full_budget(sample)


def num_return_sequences(case: Case) -> None:
    ids = case.prompt(48)
    with case.attending("sdpa"):

        def sample(cache):
            torch.manual_seed(5)
            return case.generate(ids, cache, do_sample=True, top_k=0, num_return_sequences=3)

        text = sample(case.cache())
        assert len({tuple(row) for row in text.new.tolist()}) == 3
        case.by_hand(text, [[ids[0]]] * 3)
        case.plain_at_full_budget(sample)


def beam_search(case: Case) -> None:
    """The score of every returned beam is that of its text, run by hand alone."""
    ids = case.prompt(48)
    options = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0, "output_scores": True}
    with case.attending("sdpa"):
        beams = case.generate(ids, cache := case.cache(), **options).ids[:, 48:]
        scores = case.last.sequences_scores
        case.compressed(cache)
        for beam, score in zip(beams, scores, strict=True):
            logits = case.hand().follow([ids[0]], beam)
            wanted = logits.log_softmax(-1).gather(-1, beam[:, None]).sum()
            assert abs(score - wanted) < NEW * 1e-3
        full = case.generate(ids, case.cache(1.0), **options).ids
        assert torch.equal(full, case.generate(ids, **options).ids)


def assisted(case: Case) -> None:
    """Prompt lookup: candidates are appended together, then those that do not fit are cropped."""
    ids = case.prompt(12).repeat(1, 3)[:, :32]
    options = {"prompt_lookup_num_tokens": 3, "new": 12, "eos_token_id": 96}  # 4.57 wants one; it never comes up
    with case.attending("sdpa"):
        try:
            plain = case.generate(ids, DynamicCache(config=case.model.config), **options)
        except Exception as error:
            raise NotHere(f"the plain model refuses: {type(error).__name__}: {str(error)[:60]}") from None
        assert torch.equal(case.generate(ids, case.cache(1.0), **options).ids, plain.ids)

        steps, cache = [], case.cache()
        crop = cache.crop
        cache.crop = lambda n: (steps.append(int(n)), crop(n))[1]
        watch = case.model.register_forward_pre_hook(
            lambda _, args, kwargs: steps.append(kwargs["input_ids"][0].clone()), with_kwargs=True
        )
        try:
            text = case.generate(ids, cache, **options)
        except CacheError as error:
            if ANNOUNCES_CROPS or "cannot be separated" not in str(error):
                raise
            raise Refused("this release does not announce that it will crop: clustered tokens would be cut") from None
        finally:
            watch.remove()
        hand, logits = case.hand(waits=ANNOUNCES_CROPS), []
        for step in steps:
            if isinstance(step, int):
                taken = -step if ANNOUNCES_CROPS else hand.position - step
                hand.crop(taken)
                logits = logits[: len(logits) - taken]
            else:
                logits += hand.feed(step)[0 if logits else 31 :]  # the prompt's last token predicts the first new one
        assert cache.get_seq_length() == hand.position
        case.same(text.logits[0], torch.stack(logits))
