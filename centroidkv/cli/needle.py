"""The demo's task: a number hidden in prose, asked for after the prose was compressed."""

from __future__ import annotations

import random
import textwrap
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from centroidkv.cache import CacheStats
from centroidkv.compressor import Compressor
from centroidkv.errors import EvaluationError
from centroidkv.integrations.transformers import CentroidCache, enable

WORDS = ("amber", "basalt", "cobalt", "juniper", "linen", "saffron", "velvet", "walnut")


@dataclass(frozen=True)
class Needle:
    """A context that hides a number, the question for it, and the right answer; all as token ids ``[1, n]``."""

    context: Tensor
    question: Tensor
    answer: Tensor
    number: str


@dataclass(frozen=True)
class Outcome:
    """What one compressor made of a needle."""

    stats: CacheStats
    answer: str
    exact: bool
    nll: float
    tokens_per_second: float


def prose(seed: int) -> str:
    """English prose from the standard library: CPython's help topics, in an order given by ``seed``."""
    names = sorted(topics.topics)
    random.Random(seed).shuffle(names)
    text = "\n".join(topics.topics[name] for name in names)
    keep = [line for line in text.splitlines() if line.count(" ") > 6 and not line.startswith((" ", "*", ">", "|"))]
    return textwrap.fill(" ".join(keep), 10**9)


def make_needle(
    tokenizer: Any, length: int = 3000, depth: float = 0.4, seed: int = 0, text: str | None = None
) -> Needle:
    """Hide a 7-digit number ``depth`` of the way into about ``length`` tokens of prose.

    Raises:
        EvaluationError: ``length`` is below 1, or the text is shorter; ``depth`` is not from 0 to 1; ``seed`` is
            negative, which would be the prose of its absolute value.
    """
    if length < 1 or not 0 <= depth <= 1 or seed < 0:
        raise EvaluationError(
            f"a needle takes length >= 1, depth from 0 to 1 and seed >= 0, got length={length!r}, depth={depth!r}, "
            f"seed={seed!r}"
        )
    chance = random.Random(seed)
    number, word = str(chance.randrange(10**6, 10**7)), chance.choice(WORDS)
    sentences = (text or prose(seed)).split(". ")
    # Tokens are counted on pieces, close enough to place a needle; the exact length is whatever results.
    pieces, total = [], 0
    for sentence in sentences:
        if total >= length:
            break
        pieces.append(sentence)
        total += len(tokenizer(sentence + ".", add_special_tokens=False).input_ids)
    if total < length:
        raise EvaluationError(f"the text has {total} tokens, fewer than the {length} asked for")
    pieces.insert(int(len(pieces) * depth), f"The special magic number for {word} is {number}")
    question = f"\n\nWhat is the special magic number for {word}?"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": ". ".join(pieces) + "." + question}], add_generation_prompt=True, tokenize=False
    )
    chat += f"The special magic number for {word} is"
    start = chat.rindex(question)

    def ids(part: str) -> Tensor:
        return torch.tensor([tokenizer(part, add_special_tokens=False).input_ids])

    return Needle(ids(chat[:start]), ids(chat[start:]), ids(f" {number}"), number)


@torch.no_grad()
def ask(model: Any, tokenizer: Any, needle: Needle, compressor: Compressor | None, interval: int = 128) -> Outcome:
    """Read the context, compress it, then ask: the compressor does not know the question.

    Without a compressor the plain model runs with its own full cache. nll is the mean negative log-likelihood (nats
    per token) of the right answer, teacher-forced.
    """
    cache = CentroidCache(compressor, interval=interval) if compressor else DynamicCache(config=model.config)
    with enable(model) if compressor else nullcontext():
        model(needle.context, past_key_values=cache, logits_to_keep=1)
        stats = cache.stats() if isinstance(cache, CentroidCache) else _full_stats(cache)
        tail = torch.cat((needle.question, needle.answer), -1)
        logits = model(tail, past_key_values=cache, logits_to_keep=needle.answer.shape[1] + 1).logits
        nll = torch.nn.functional.cross_entropy(logits[0, :-1].float(), needle.answer[0]).item()
        cache.crop(-tail.shape[1])
        prompt = torch.cat((needle.context, needle.question), -1)
        start = time.perf_counter()
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=cache,
            max_new_tokens=16,
            min_new_tokens=16,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
        seconds = time.perf_counter() - start
    new = out[0, prompt.shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True).strip()
    answer = text.split("\n")[0]
    return Outcome(stats, answer, needle.number in text.replace(",", ""), nll, len(new) / seconds)


def _full_stats(cache: DynamicCache) -> CacheStats:
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    length = cache.get_seq_length()
    return CacheStats(len(cache.layers), logical=length, physical=length, bytes=held, bytes_full=held)
