"""What a law is: a statement, the inputs it ranges over, and a body that looks for a counter-example."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis.errors import Flaky, HypothesisException
from hypothesis.strategies import SearchStrategy


class LawViolation(AssertionError):
    """A stage broke a law. The message names the law, the smallest input found, what was expected and what came."""


class Broken(Exception):
    """Raised inside a law's body: what was expected, and what came instead."""

    def __init__(self, expected: str, got: Any) -> None:
        super().__init__(expected)
        self.expected, self.got = expected, got


def expect(condition: Any, expected: str, got: Any = "something else") -> None:
    """Within a law: this must hold. ``got`` is shown as is; give it a callable where building it costs."""
    if not bool(condition):
        raise Broken(expected, got() if callable(got) else got)


@dataclass(frozen=True)
class Law:
    """``body(subject, case)`` must hold for every case of ``cases``."""

    name: str
    statement: str
    cases: SearchStrategy[Any]
    body: Callable[[Any, Any], None]

    def check(self, subject: Any, examples: int | None = None) -> None:
        """Search for a counter-example, ``examples`` tries (default: the loaded Hypothesis profile's).

        Raises:
            LawViolation: with the smallest counter-example found.
        """

        # No deadline: a law is about what is computed, and a busy machine breaks none.
        @settings(max_examples=examples or settings().max_examples, report_multiple_bugs=False, deadline=None)
        @given(self.cases)
        def search(case: Any) -> None:
            try:
                self.body(subject, case)
            except HypothesisException:
                raise
            except Broken as broken:
                raise LawViolation(self._message(subject, case, broken.expected, broken.got)) from None
            except Exception as error:
                raise LawViolation(
                    self._message(subject, case, "a result", f"{type(error).__name__}: {error}")
                ) from error

        try:
            search()
        except Flaky as flaky:
            raise LawViolation(
                self._message(subject, "replayed", "the same result for the same input", "another one")
            ) from flaky

    def _message(self, subject: Any, case: Any, expected: str, got: Any) -> str:
        return (
            f"{subject!r} breaks the law {self.name!r}: {self.statement}\n"
            f"  smallest input found: {case!r}\n  expected: {expected}\n  got: {got}"
        )


def law(statement: str, cases: SearchStrategy[Any]) -> Callable[[Callable[[Any, Any], None]], Law]:
    """Make a law of a body; its name is the function's, with spaces."""

    def wrap(body: Callable[[Any, Any], None]) -> Law:
        return Law(body.__name__.replace("_", " "), statement, cases, body)

    return wrap


def check_all(laws: Iterable[Law], subject: Any, examples: int | None = None) -> None:
    """Check each law in turn; the first that breaks is raised."""
    for one in laws:
        one.check(subject, examples)
