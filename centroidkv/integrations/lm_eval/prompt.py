"""A request in tokens, and what becomes of one that is too long for the model."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from centroidkv.errors import EvaluationError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A request in tokens.

    Args:
        index: the place of the request in the list that was given.
        ids: its prompt's tokens.
        context: how many of them are processed, and compressed, before the rest is seen; 0 if all are seen at once.
    """

    index: int
    ids: list[int]
    context: int


def fit(prompt: Prompt, new: int, longest: int, overlong: str) -> Prompt:
    """``prompt``, or its first and last halves where it and ``new`` tokens are longer than ``longest``.

    Raises:
        EvaluationError: it is too long, and ``overlong`` is not ``"middle"``, or its question alone is too long.
    """
    room, length = longest - new, len(prompt.ids)
    if length <= room:
        return prompt
    question = length - prompt.context if prompt.context else 0
    if overlong == "refuse" or room < 2 or question > room - room // 2:
        raise EvaluationError(
            f"a prompt of {length} tokens (its question {question or 'not split off'}) and {new} new ones do not "
            f"fit the model's {longest}; overlong=middle keeps the first and last halves of such prompts "
            "(LongBench's rule; the question must fit in the last half), max_length= overrides the model's own"
        )
    log.warning("overlong=middle: a prompt of %d tokens was cut to its first and last halves, %d", length, room)
    ids = prompt.ids[: room // 2] + prompt.ids[length - (room - room // 2) :]
    return Prompt(prompt.index, ids, room - question if prompt.context else 0)
