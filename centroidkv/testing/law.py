"""What a law is: a statement, the inputs it ranges over, and a body that looks for a counter-example."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis.errors import Flaky, HypothesisException
from hypothesis.strategies import SearchStrategy
from torch import Tensor

FEW = 64
"""Numbers of a tensor that a message shows; of more it says where the first difference is."""
SHRINKING = 4.0
"""Seconds of looking for a smaller counter-example."""
CLIP = 1500
"""Characters of a message's part."""


class LawViolation(AssertionError):
    """A stage broke a law. The message names the law, the smallest input found, what was expected and what came."""


class Broken(Exception):
    """Raised inside a law's body: what was expected, and what came instead."""

    def __init__(self, expected: str, got: Any) -> None:
        super().__init__(expected)
        self.expected, self.got = expected, got


class Skipped(Exception):
    """Raised inside a law's body: the law says nothing about this input."""


def expect(condition: Any, expected: str, got: Any = "something else") -> None:
    """Within a law: this must hold. ``got`` is shown as is; give it a callable where building it costs."""
    if not bool(condition):
        raise Broken(expected, got() if callable(got) else got)


def expect_same(got: Tensor, wanted: Tensor, what: str, bound: Tensor | float | None = None) -> None:
    """Within a law: two tensors are equal (NaN equals NaN), or apart by at most ``bound``, entry by entry.

    Of large tensors the message shows the first entry that differs, not all of them.
    """
    if got.shape != wanted.shape:
        raise Broken(f"{what} of shape {tuple(wanted.shape)}", f"shape {tuple(got.shape)}")
    if got.equal(wanted):
        return
    if got.is_floating_point() or wanted.is_floating_point():
        x, y = got.double(), wanted.double()
        good = (x == y) | (x.isnan() & y.isnan())
        if bound is not None:
            good |= (x - y).abs() <= bound
    else:
        good = got == wanted
    if bool(good.all()):
        return
    if wanted.numel() <= FEW:
        raise Broken(f"{what}: {wanted.tolist()}", got.tolist())
    place = (~good).nonzero()[0].tolist()
    raise Broken(
        f"{what}: {wanted[tuple(place)].item()} at {place}",
        f"{got[tuple(place)].item()} there; {int((~good).sum())} of {good.numel()} entries differ",
    )


def given_that(condition: Any) -> None:
    """Within a law: it speaks only of inputs for which this holds."""
    if not bool(condition):
        raise Skipped


def show(x: Any) -> str:
    """``x`` for a message: a large tensor as its shape, range and beginning; long texts with their middle left out."""
    if isinstance(x, Tensor) and x.numel() > FEW:
        numbers = x.flatten()
        ends = f"from {numbers.min().item()} to {numbers.max().item()}, " if x.dtype.is_floating_point else ""
        return f"a tensor {tuple(x.shape)} of {x.dtype}, {ends}beginning {numbers[:8].tolist()}"
    text = str(x)
    return text if len(text) <= CLIP else f"{text[: CLIP // 2]} ... {text[-CLIP // 2 :]} ({len(text)} characters)"


Cases = Iterable[Any] | Callable[[Any], Iterable[Any]]


@dataclass(frozen=True, eq=False)
class Law:
    """``body(subject, case)`` must hold for every case of ``cases``, and for those that are tried whatever is drawn.

    Args:
        name, statement: for messages.
        cases: what Hypothesis draws from.
        body: raises (by ``expect``) where the law does not hold.
        first: tried before anything is drawn: what only an object's first calls can show.
        always: tried after what was drawn held, however few examples are asked for: sizes past every tile, block and
            chunk. Either may be a function of the subject.
    """

    name: str
    statement: str
    cases: SearchStrategy[Any]
    body: Callable[[Any, Any], None]
    first: Cases = ()
    always: Cases = ()

    def check(self, subject: Any, examples: int | None = None, *, shrink: bool = True, fixed: bool = True) -> None:
        """Search for a counter-example.

        Args:
            subject: the stage.
            examples: tries (default: the loaded Hypothesis profile's).
            shrink: look for the smallest counter-example once there is one.
            fixed: try the cases that are tried always, as well.

        Raises:
            LawViolation: with the smallest counter-example found.
        """
        for case in _listed(self.first, subject):
            self._try(subject, case)

        # No deadline: a law is about what is computed, and a busy machine breaks none.
        profile = settings()
        phases = tuple(
            phase for phase in profile.phases if phase != Phase.explain and (shrink or phase != Phase.shrink)
        )
        broken: dict[str, LawViolation] = {}
        give_up = float("inf")

        @settings(
            max_examples=examples or profile.max_examples, report_multiple_bugs=False, deadline=None, phases=phases,
            # A law that says nothing about many inputs is right to; it is tried until it has said enough.
            suppress_health_check={*profile.suppress_health_check, HealthCheck.filter_too_much},
        )  # fmt: skip
        @given(self.cases)
        def search(case: Any) -> None:
            nonlocal give_up
            name = repr(case)
            if name in broken:
                raise broken[name]
            if time.process_time() > give_up:
                return  # small enough: of what was not tried yet, nothing is said to break the law
            try:
                said = self._try(subject, case)
            except LawViolation as violation:
                broken[name] = violation
                give_up = min(give_up, time.process_time() + SHRINKING)
                raise
            if not said:
                reject()

        try:
            search()
        except Flaky as flaky:
            raise LawViolation(
                self._message(subject, "replayed", "the same result for the same input", "another one")
            ) from flaky
        for case in _listed(self.always, subject) if fixed else ():
            self._try(subject, case)

    def _try(self, subject: Any, case: Any) -> bool:
        """Whether the law says something about ``case``; raises LawViolation where it does not hold."""
        try:
            self.body(subject, case)
        except Skipped:
            return False
        except HypothesisException:
            raise
        except Broken as broken:
            raise LawViolation(self._message(subject, case, broken.expected, broken.got)) from None
        except Exception as error:
            raise LawViolation(self._message(subject, case, "a result", f"{type(error).__name__}: {error}")) from error
        return True

    def _message(self, subject: Any, case: Any, expected: str, got: Any) -> str:
        return (
            f"{show(repr(subject))} breaks the law {self.name!r}: {self.statement}\n"
            f"  smallest input found: {show(repr(case))}\n  expected: {show(expected)}\n  got: {show(got)}"
        )


def _listed(cases: Cases, subject: Any) -> Iterable[Any]:
    return cases(subject) if callable(cases) else cases


def law(
    statement: str, cases: SearchStrategy[Any], *, first: Cases = (), always: Cases = ()
) -> Callable[[Callable[[Any, Any], None]], Law]:
    """Make a law of a body; its name is the function's, with spaces."""

    def wrap(body: Callable[[Any, Any], None]) -> Law:
        return Law(body.__name__.replace("_", " "), statement, cases, body, first, always)

    return wrap


def check_all(laws: Iterable[Law], subject: Any, examples: int | None = None) -> None:
    """Check each law in turn; the first that breaks is raised."""
    for one in laws:
        one.check(subject, examples)
