"""Situations of the matrix: padded batches, chunks, several tokens at once."""

from __future__ import annotations

import copy

import torch
from matrix_case import NEW, Case, NotHere
from matrix_models import RELEASE, WINDOW
from torch.nn.functional import pad


def left_padded(case: Case) -> None:
    rows = [case.prompt(n) for n in (44, 7, 23)]
    ids = torch.cat([pad(row, (44 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row), (44 - row.shape[1], 0)) for row in rows])
    with case.attending("sdpa"):
        text = case.generate(ids, cache := case.cache(), attention_mask=mask)
        case.compressed(cache)
        case.by_hand(text, [[row[0]] for row in rows])
        case.plain_at_full_budget(lambda cache: case.generate(ids, cache, attention_mask=mask))


def right_padded(case: Case) -> None:
    """With explicit positions, as right padding needs; inside the window, which counts columns and not tokens."""
    rows = [case.prompt(n) for n in (22, 7, 16)]
    width, lengths = 22, torch.tensor([row.shape[1] for row in rows])
    ids = torch.cat([pad(row, (0, width - row.shape[1])) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row), (0, width - row.shape[1])) for row in rows])
    hands = [case.hand() for _ in rows]
    with case.attending("sdpa"):
        cache = case.cache()
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = case.forward(ids, cache, attention_mask=mask, position_ids=places)
        logits = logits[torch.arange(3), lengths - 1]
        case.same(logits, torch.stack([hand.feed(row[0])[-1] for hand, row in zip(hands, rows, strict=True)]))
        for step in range(NEW):
            assert width + step < WINDOW
            token = logits.argmax(-1, keepdim=True)
            mask = torch.cat((mask, torch.ones_like(token)), -1)
            logits = case.forward(token, cache, attention_mask=mask, position_ids=(lengths + step)[:, None])[:, -1]
            case.same(logits, torch.stack([hand.feed(t)[-1] for hand, t in zip(hands, token, strict=True)]))
        case.compressed(cache)


def chunked_prefill(case: Case) -> None:
    ids = case.prompt(48)
    with case.attending("sdpa"):
        text = case.generate(ids, cache := case.cache(), prefill_chunk_size=20)
        case.compressed(cache)
        case.plain_at_full_budget(lambda cache: case.generate(ids, cache, prefill_chunk_size=20))
        whole, plain = case.generate(ids), case.generate(ids, prefill_chunk_size=20)
        if (whole.logits - plain.logits).abs().max() > 0.1:
            raise NotHere(
                f"transformers {RELEASE} itself counts positions wrongly in chunks (budget 1.0 does as it does)"
            )
        # Before 5.0 the last token of the prompt is left out of the chunks and comes alone.
        chunks = ids[0].split(20) if RELEASE >= (5, 0) else (*ids[0, :-1].split(20), ids[0, -1:])
        case.by_hand(text, [list(chunks)])


def left_padded_chunks(case: Case) -> None:
    """Chunks of a padded batch: rows begin in different chunks, and one first chunk is nothing but padding."""
    rows = [case.prompt(n) for n in (44, 7, 23)]
    ids = torch.cat([pad(row, (44 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row), (44 - row.shape[1], 0)) for row in rows])
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    hands = [case.hand() for _ in rows]
    with case.attending("sdpa"):
        cache = case.cache()
        for start in range(0, 44, 16):
            part = slice(start, min(start + 16, 44))
            logits = case.forward(
                ids[:, part], cache, attention_mask=mask[:, : part.stop], position_ids=places[:, part]
            )
            for row, hand in enumerate(hands):
                real = mask[row, part].bool()
                if real.any():
                    case.same(logits[row, real], hand.feed(ids[row, part][real]))
        case.compressed(cache)


def several_at_once(case: Case) -> None:
    """Seven tokens appended to a compressed cache in one pass; and with a 4-D mask of the user's own."""
    ids, more = case.prompt(48), case.prompt(7, seed=1)
    with case.attending("sdpa"):
        case.forward(ids, cache := case.cache())
        twin = copy.deepcopy(cache)
        hand = case.hand()
        hand.feed(ids[0])
        wanted = hand.feed(more[0])
        case.same(case.forward(more, cache)[0], wanted)
        case.compressed(cache)
        if not case.family.slides:
            by_token = torch.ones(7, 55, dtype=torch.bool).tril(48)[None, None]
            case.same(case.forward(more, twin, attention_mask=by_token)[0], wanted)
