"""Chats over one growing cache: a document, then six turns that bring new passages and ask for old facts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from analysis.evaluation.decode_runs import attention, new_cache
from centroidkv.cli.needle import WORDS, prose
from centroidkv.compressor import Compressor
from centroidkv.errors import EvaluationError

PASSAGE = 150
"""Tokens of prose that every turn brings along."""


@dataclass(frozen=True)
class Turn:
    """What is new since the turn before, up to and with the beginning of the answer, and the answer: ``[1, n]``."""

    question: Tensor
    answer: Tensor


def make_chat(tokenizer: Any, document: int, seed: int) -> list[Turn]:
    """Six facts: three in a document of about ``document`` tokens, three in the passages of turns 1, 3 and 5.

    Turns 1, 3, 5 ask for one of the document's, turns 2, 4, 6 for what the turn before told: every fact is asked for
    once, after the cache was clustered over it or may have been.
    """
    chance = random.Random(seed)
    facts = [(word, str(chance.randrange(10**6, 10**7))) for word in chance.sample(WORDS, 6)]
    sentences = iter(prose(seed).split(". "))
    opening = _passage(tokenizer, sentences, document, facts[:3])
    messages: list[dict[str, str]] = []
    done, turns = "", []
    for number, asked in enumerate((1, 3, 0, 4, 2, 5)):
        told = [facts[3 + number // 2]] if number % 2 == 0 else []
        passage = (opening + " " if number == 0 else "") + _passage(tokenizer, sentences, PASSAGE, told)
        word, answer = facts[asked]
        start = f"The special magic number for {word} is"
        messages.append({"role": "user", "content": f"{passage}\n\nWhat is the special magic number for {word}?"})
        rendered = _render(tokenizer, messages)
        if not rendered.startswith(done):
            raise EvaluationError("this chat template rewrites earlier turns, so one cache cannot hold the chat")
        turns.append(
            Turn(_ids(tokenizer, rendered[len(done) :] + start, first=not done), _ids(tokenizer, f" {answer}"))
        )
        messages.append({"role": "assistant", "content": f"{start} {answer}"})
        done = f"{rendered}{start} {answer}"
    return turns


def _passage(tokenizer: Any, sentences: Any, tokens: int, facts: Sequence[tuple[str, str]]) -> str:
    """About ``tokens`` tokens of prose with the facts evenly spread in it."""
    pieces, total = [], 0
    while total < tokens:
        piece = next(sentences, None)
        if piece is None:
            raise EvaluationError(f"the prose ends before {tokens} tokens; ask for a shorter document")
        pieces.append(piece)
        total += len(tokenizer(piece + ".", add_special_tokens=False).input_ids)
    for i, (word, number) in reversed(list(enumerate(facts))):
        pieces.insert((i + 1) * len(pieces) // (len(facts) + 1), f"The special magic number for {word} is {number}")
    return ". ".join(pieces) + "."


def _render(tokenizer: Any, messages: Sequence[dict[str, str]]) -> str:
    """The chat as text, up to where the next answer begins; in plain words for a base model without a template."""
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return "".join(f"{m['content']}\n" + ("\n" if m["role"] == "assistant" else "") for m in messages)


def _ids(tokenizer: Any, text: str, first: bool = False) -> Tensor:
    """Token ids; a base model's text begins with its beginning-of-text token, a template writes it itself."""
    special = first and not tokenizer.chat_template
    return torch.tensor([tokenizer(text, add_special_tokens=special).input_ids])


@torch.no_grad()
def read_chat(model: Any, chat: Sequence[Turn], compressor: Compressor | None, interval: int) -> dict[str, Any]:
    """Feed the chat; NLL per answer token, and the share of answers that greedy decoding would get exactly right.

    The first turn's document is the prompt. All else is fed in pieces of at most ``interval`` tokens. The answers are
    teacher-forced: the right one is what the chat goes on from, whatever the model would have said.
    """
    cache = new_cache(model, compressor, interval)
    nll, exact, tokens = [], [], 0
    with attention(model, cache):
        for number, turn in enumerate(chat):
            pieces = [turn.question] if number == 0 else list(turn.question.split(interval, -1))
            for piece in pieces:
                last = model(piece, past_key_values=cache, logits_to_keep=1).logits[0, -1:]
            answered = model(turn.answer, past_key_values=cache).logits[0]
            logits = torch.cat((last, answered[:-1])).float()
            nll.append(torch.nn.functional.cross_entropy(logits, turn.answer[0]).item())
            exact.append(bool((logits.argmax(-1) == turn.answer[0]).all()))
            tokens += turn.question.shape[1] + turn.answer.shape[1]
    held = tokens if compressor is None else cache.stats().physical
    return {
        "nll": sum(nll) / len(nll),
        "exact": sum(exact) / len(exact),
        "nll_by_turn": nll,
        "exact_by_turn": exact,
        "tokens": tokens,
        "slots": held,
    }
