"""The tasks: a context to be compressed, and what is read afterwards with the right answers marked."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from analysis.evaluation.fidelity.texts import Haystack

KEYS = ("amber", "basalt", "cobalt", "juniper", "linen", "saffron", "velvet", "walnut")
VALUES = (
    "lantern",
    "harbor",
    "meadow",
    "copper",
    "violin",
    "falcon",
    "orchard",
    "granite",
    "pepper",
    "canyon",
    "ribbon",
)
PROSE_TAIL = 256


@dataclass(frozen=True)
class Sample:
    """One document and what follows it.

    ``context [1, n]`` is compressed, ``tail [1, m]`` is read over the compressed cache, teacher-forced; ``answers`` are
    the right answers' spans in the tail. Without answers the whole tail is a continuation.
    """

    task: str
    index: int
    context: Tensor
    tail: Tensor
    answers: tuple[range, ...] = ()

    @property
    def question(self) -> Tensor:
        """``[m]`` bool: tokens of the tail that are not part of an answer; all of a continuation."""
        mask = torch.ones(self.tail.shape[1], dtype=torch.bool)
        for span in self.answers:
            mask[span.start : span.stop] = False
        return mask

    def aware(self) -> Sample:
        """The query-aware form: everything up to the last token before the first answer is part of the context."""
        if not self.answers:
            raise ValueError(f"{self.task!r} asks no question, so it has no query-aware form")
        cut = self.answers[0].start - 1
        moved = tuple(range(span.start - cut, span.stop - cut) for span in self.answers)
        context = torch.cat((self.context, self.tail[:, :cut]), 1)
        return Sample(self.task, self.index, context, self.tail[:, cut:], moved)


Turn = tuple[str, str, str]
"""A question, the words that open its answer, and the answer itself."""


class Maker:
    """Makes samples for one tokenizer: chat-formatted if it has a chat template, plain text otherwise.

    Args:
        tokenizer: a transformers tokenizer.
        texts: prose to hide things in.
        length: tokens of a context, about.
    """

    def __init__(self, tokenizer: Any, texts: list[str], length: int = 1500) -> None:
        self.tokenizer, self.length = tokenizer, length
        self.haystack = Haystack(tokenizer, texts)

    def make(self, task: str, index: int) -> Sample:
        """Sample ``index``, whatever the number of samples: the depths of the first n are spread over the context."""
        if task not in TASKS:
            raise ValueError(f"tasks are {sorted(TASKS)}, got {task!r}")
        depth = (index * 0.618034 + 0.0125) % 1.0  # the golden ratio's multiples: evenly spread, shallow and deep mixed
        return TASKS[task](self, index, depth)

    def ids(self, text: str) -> list[int]:
        """Token ids, without special tokens."""
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def ask(self, task: str, index: int, document: str, turns: Sequence[Turn]) -> Sample:
        """A document and questions about it, one after the other, each answered rightly."""
        if self.tokenizer.chat_template:
            messages = []
            for number, (question, opening, answer) in enumerate(turns):
                asked = f"{document}\n\n{question}" if number == 0 else question
                messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": opening + answer}]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        else:
            asked = [f"\n\nQuestion: {question}\nAnswer: {opening}{answer}" for question, opening, answer in turns]
            text = (self.tokenizer.bos_token or "") + document + "".join(asked)
        # Text is cut where things begin and end, and pieces are tokenised on their own: spans are exact.
        place = text.index(document) + len(document)
        context, tail, answers = self.ids(text[:place]), [], []
        for question, opening, answer in turns:
            begin = text.index(opening + answer, text.index(question, place)) + len(opening)
            tail += self.ids(text[place:begin])
            new = self.ids(text[begin : begin + len(answer)])
            answers.append(range(len(tail), len(tail) + len(new)))
            tail += new
            place = begin + len(answer)
        return Sample(task, index, torch.tensor([context]), torch.tensor([tail]), tuple(answers))

    def hide(self, seed: int, facts: Sequence[str], depths: Sequence[float]) -> str:
        """A document with each fact, a sentence, at its relative depth."""
        sentences = self.haystack.sentences(self.length, seed)
        for depth, fact in sorted(zip(depths, facts, strict=True), reverse=True):
            sentences.insert(int(len(sentences) * depth), fact)
        return " ".join(sentences)


def _number(chance: random.Random) -> str:
    return str(chance.randrange(10**6, 10**7))


def _word(chance: random.Random) -> str:
    return " ".join(chance.sample(VALUES, 2))


def _uuid(chance: random.Random) -> str:
    return str(uuid.UUID(int=chance.getrandbits(128), version=4))


def _needle(kind: str, value: Callable[[random.Random], str]) -> Callable[[Maker, int, float], Sample]:
    """One fact hidden at ``depth``, asked for."""

    def make(maker: Maker, index: int, depth: float) -> Sample:
        chance = random.Random(index)
        key, secret = chance.choice(KEYS), value(chance)
        document = maker.hide(index, [f"The special magic {kind} for {key} is {secret}."], [depth])
        turn = (f"What is the special magic {kind} for {key}?", f"The special magic {kind} for {key} is", f" {secret}")
        return maker.ask(f"needle_{kind}", index, document, [turn])

    return make


def _facts(chance: random.Random, count: int) -> list[tuple[str, str, str]]:
    """(key, number, sentence) of several needles with different keys."""
    keys = chance.sample(KEYS, count)
    numbers = [_number(chance) for _ in keys]
    return [(k, n, f"The special magic number for {k} is {n}.") for k, n in zip(keys, numbers, strict=True)]


def _numbers_asked(facts: Sequence[tuple[str, str, str]]) -> list[Turn]:
    return [
        (f"What is the special magic number for {key}?", f"The special magic number for {key} is", f" {number}")
        for key, number, _ in facts
    ]


def multi_key(maker: Maker, index: int, depth: float) -> Sample:
    """Four needles with different keys, one of them asked for."""
    chance = random.Random(index)
    facts = _facts(chance, 4)
    depths = [(depth + number / 4) % 1.0 for number in range(4)]
    document = maker.hide(index, [fact for _, _, fact in facts], depths)
    return maker.ask("multi_key", index, document, _numbers_asked(facts[:1]))


def multi_turn(maker: Maker, index: int, depth: float) -> Sample:
    """Four needles, all asked for, turn by turn, over one compressed document."""
    chance = random.Random(index)
    facts = _facts(chance, 4)
    depths = [(depth + number / 4) % 1.0 for number in range(4)]
    document = maker.hide(index, [fact for _, _, fact in facts], depths)
    chance.shuffle(facts)
    return maker.ask("multi_turn", index, document, _numbers_asked(facts))


def variable_tracking(maker: Maker, index: int, depth: float) -> Sample:
    """A chain of assignments scattered in order over the prose; which variables hold the first one's value?"""
    chance = random.Random(index)
    names = ["".join(chance.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=3)) for _ in range(4)]
    value = chance.randrange(10_000, 100_000)
    facts = [f"VAR {names[0]} = {value}."] + [f"VAR {b} = VAR {a}." for a, b in itertools.pairwise(names)]
    depths = sorted((depth + chance.random() / 4 + number / 4) % 1.0 for number in range(4))
    document = maker.hide(index, facts, depths)
    question = f"Find all variables that are assigned the value {value}."
    turn = (question, f"The variables assigned the value {value} are:", " " + ", ".join(names))
    return maker.ask("variable_tracking", index, document, [turn])


def common_words(maker: Maker, index: int, depth: float) -> Sample:
    """A long list in which three words recur; which ones? ``depth`` has no meaning here."""
    chance = random.Random(index)
    common = chance.sample(VALUES, 3)
    stems = [
        a + b for a in ("ba", "co", "de", "fi", "lu", "mo", "ne", "pa") for b in ("ral", "tin", "ver", "sock", "dle")
    ]
    words: list[str] = []
    while len(maker.ids(", ".join(words))) < maker.length:
        words += [*common, *chance.sample(stems, 9)]
    chance.shuffle(words)
    # The order of first appearance makes the right answer a single one.
    answer = ", ".join(sorted(common, key=words.index))
    document = "A list of words: " + ", ".join(words) + "."
    turn = ("Which three words are the most common in the list?", "The three most common words are:", f" {answer}")
    return maker.ask("common_words", index, document, [turn])


def prose_continuation(maker: Maker, index: int, depth: float) -> Sample:
    """Plain prose, and the 256 tokens that follow it."""
    text = " ".join(maker.haystack.sentences(maker.length + PROSE_TAIL + 64, 7919 + index))
    start = [maker.tokenizer.bos_token_id] if maker.tokenizer.bos_token_id is not None else []
    ids = torch.tensor([start + maker.ids(text)])
    cut = min(maker.length, ids.shape[1] - PROSE_TAIL)
    return Sample("prose", index, ids[:, :cut], ids[:, cut : cut + PROSE_TAIL])


TASKS: dict[str, Callable[[Maker, int, float], Sample]] = {
    "needle_number": _needle("number", _number),
    "needle_word": _needle("word", _word),
    "needle_uuid": _needle("uuid", _uuid),
    "multi_key": multi_key,
    "multi_turn": multi_turn,
    "variable_tracking": variable_tracking,
    "common_words": common_words,
    "prose": prose_continuation,
}
