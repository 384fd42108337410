"""Whether a stage remembers: the same question asked again, in other orders, of a copy, with other random states."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from centroidkv.records import Assignment
from centroidkv.testing.law import expect, show


def expect_no_memory(subject: Any, ask: Callable[[Any, Any], Any], questions: Sequence[Any]) -> None:
    """Within a law: ``ask(subject, question)`` depends on the question alone.

    Every question is asked three times: in the order given, in the opposite order, and of a copy of the subject that
    was made before the first question. Global random states differ between the times and must not be moved, and a
    question's tensors must be what they were (give ``ask`` questions that build them, or that hold them).
    """
    twin = _copy(subject)
    times = [(subject, list(questions), 11), (subject, list(questions)[::-1], 12), (twin, list(questions)[::-1], 13)]
    answers: list[list[Any]] = []
    for who, order, seed in times:
        with untouched_randomness(seed):
            answers.append([snapshot(ask(who, question)) for question in order])
    first = answers[0]
    for again, what in ((answers[1][::-1], "asked again"), (answers[2][::-1], "asked of a copy")):
        for question, before, after in zip(questions, first, again, strict=True):
            expect(alike(before, after), f"{show(before)} for {show(repr(question))} when {what}", lambda a=after: a)


@contextmanager
def untouched_randomness(seed: int) -> Iterator[None]:
    """Within a law: what is done inside reads no global random state (they differ by seed) and moves none."""
    kept = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        before = torch.get_rng_state(), random.getstate(), snapshot(numpy.random.get_state())
        yield
        now = torch.get_rng_state(), random.getstate(), snapshot(numpy.random.get_state())
        expect(alike(before, now), "global random states left alone", "a global random state was moved")
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        numpy.random.set_state(kept[2])


def expect_inputs_unchanged(call: Callable[..., Any], **inputs: Any) -> Any:
    """Within a law: ``call``, given the inputs in their order, writes to none of them. Returns what it returned."""
    before = {name: snapshot(value) for name, value in inputs.items()}
    result = call(*inputs.values())
    for name, value in inputs.items():
        expect(alike(before[name], snapshot(value)), f"{name} as before the call", f"{name} was written to")
    return result


def alike(a: Any, b: Any) -> bool:
    """Whether two snapshots are equal in every bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return bool(a.equal(b)) or bool(a.is_floating_point() and torch.equal(a.isnan(), b.isnan())
                                        and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0)))  # fmt: skip
    if isinstance(a, numpy.ndarray) or isinstance(b, numpy.ndarray):
        return bool(numpy.array_equal(a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(alike(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def snapshot(x: Any) -> Any:
    """``x`` as it is now: tensors and arrays copied, in containers and records too."""
    if isinstance(x, Tensor):
        return x.clone()
    if isinstance(x, numpy.ndarray):
        return x.copy()
    if isinstance(x, Assignment):
        return Assignment(x.joins.clone())
    if isinstance(x, dict):
        return {name: snapshot(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return type(x)([snapshot(value) for value in x]) if type(x) in (list, tuple) else x
    if is_dataclass(x) and not isinstance(x, type):
        return {field.name: snapshot(getattr(x, field.name)) for field in fields(x)} | {"": type(x).__name__}
    return x


def _copy(subject: Any) -> Any:
    """A deep copy, or the subject itself where it cannot be copied."""
    try:
        return copy.deepcopy(subject)
    except Exception:
        return subject
