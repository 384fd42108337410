"""Run one case: what it found, and what was refused."""

from __future__ import annotations

import os
import re
import traceback
from dataclasses import dataclass, field

from centroidkv.errors import CentroidKVError
from tools.fuzz.draw import SUBJECTS, Case
from tools.fuzz.found import Wrong, check_threads, thread_facts
from tools.fuzz.life import ERRORS


@dataclass(frozen=True)
class Failure:
    """What went wrong: the sort (of :class:`Wrong`, or "raw error"), in words, and where."""

    sort: str
    message: str
    operation: int
    trace: str = ""

    @property
    def signature(self) -> str:
        """What smaller cases must share: the sort, and the message without its numbers."""
        return f"{self.sort}: {plain_words(self.message)[:80]}"


@dataclass
class Outcome:
    """Of one case."""

    failure: Failure | None = None
    refusals: list[str] = field(default_factory=list)
    operations: int = 0


def run(case: Case) -> Outcome:
    """Live ``case`` to its end or its first fault."""
    outcome, subject, before = Outcome(), None, thread_facts()
    try:
        subject = SUBJECTS[case.subject][0](**case.options)
        for name, arguments in (*case.operations, ("finish", {})):
            getattr(subject, name)(**arguments)
            outcome.operations += 1
        check_threads(before)
    except Wrong as wrong:
        outcome.failure = Failure(wrong.sort, str(wrong).partition(": ")[2], outcome.operations, _where(wrong))
    except CentroidKVError as error:
        if subject is None:
            outcome.refusals.append(f"configuration: {type(error).__name__}: {error}")
        else:
            outcome.failure = _raw(error, outcome.operations)
    except (*ERRORS.values(), Exception) as error:
        outcome.failure = _raw(error, outcome.operations)
    finally:
        for handle in getattr(subject, "handles", ()):
            handle.undo()
    if subject is not None:
        outcome.refusals.extend(subject.refusals)
    return outcome


def _raw(error: BaseException, operation: int) -> Failure:
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(place.filename)}:{place.name}"
    text = " ".join(f"{type(error).__name__} in {where}, {error}".split())
    return Failure("raw error", text[:600], operation, _where(error))


def _where(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-6000:]


def plain_words(text: str) -> str:
    """``text`` without numbers, names in quotes, and what stands in brackets."""
    for _ in range(3):  # brackets within brackets
        text = re.sub(r"\([^()]*\)|\[[^][]*\]|\{[^{}]*\}", "#", text)
    text = re.sub(r"'[^']*'|\"[^\"]*\"|[-+]?\d[\d.e+-]*", "#", text)
    return " ".join(text.split())
