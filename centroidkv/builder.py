"""Builder: chooses the stages of a Compressor and checks them all at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from centroidkv.aggregate import DegreeWeightedMean
from centroidkv.allocation import Even
from centroidkv.compressor import Compressor
from centroidkv.errors import BackendError, StageError
from centroidkv.matching import BipartiteSoftMatching
from centroidkv.native import why_not_native
from centroidkv.partition import Alternating
from centroidkv.preserve import Recent, Sinks
from centroidkv.preserve.union import MaskPreserver, Union
from centroidkv.records import Budget
from centroidkv.rounds import why_not_settings
from centroidkv.schedule import LinearAnnealing
from centroidkv.similarity import Cosine

BACKENDS = ("auto", "reference", "blocked", "native", "triton")


@dataclass(frozen=True)
class Builder:
    """Every method returns a new builder with one part replaced; :meth:`build` checks the whole.

    Defaults are the paper's method: sinks and recent tokens preserved, alternation in chunks, cosine, bipartite soft
    matching, degree-weighted mean, linear annealing, an even allocation. The numbers are ours (README, "Choosing").

    >>> from centroidkv import Compressor
    >>> from centroidkv.partition import Halves
    >>> Compressor.builder().partition(Halves(chunk_size=64)).budget(0.5).build().partition
    Halves(chunk_size=64)
    """

    parts: dict[str, Any] = field(
        default_factory=lambda: {
            "preserve": (Sinks(4), Recent(64)),
            "partition": Alternating(256),
            "similarity": Cosine(),
            "matching": BipartiteSoftMatching(),
            "aggregate": DegreeWeightedMean(),
            "schedule": LinearAnnealing(),
            "budget": Budget.ratio(0.25),
            "allocation": Even(),
        }
    )

    def preserve(self, *preservers: Any) -> Builder:
        """Slots to set aside: any number of preservers, or functions ``state -> mask``; none = nothing is set aside."""
        return self._with("preserve", preservers)

    def partition(self, partition: Any) -> Builder:
        """How slots split into sources and targets: a Partitioner, or a function ``length -> (sources, targets)``."""
        return self._with("partition", partition)

    def similarity(self, similarity: Any) -> Builder:
        """How alike keys are: a Similarity, or a function ``(a, b) -> scores``."""
        return self._with("similarity", similarity)

    def matching(self, matching: Any) -> Builder:
        """Which slots join which: a Matcher."""
        return self._with("matching", matching)

    def aggregate(self, aggregate: Any) -> Builder:
        """What a cluster becomes: an Aggregator."""
        return self._with("aggregate", aggregate)

    def schedule(self, schedule: Any) -> Builder:
        """How much each round removes: a Schedule, or a function ``round -> rate``."""
        return self._with("schedule", schedule)

    def budget(self, budget: Budget | float) -> Builder:
        """How many slots may stay: a Budget; a float is a ratio, an int a number of slots."""
        return self._with("budget", budget)

    def allocation(self, allocation: Any) -> Builder:
        """How layers share the budget: an Allocation, or a function ``depths -> shares``. Even by default."""
        return self._with("allocation", allocation)

    def _with(self, name: str, value: Any) -> Builder:
        return replace(self, parts={**self.parts, name: value})

    def build(self, backend: str = "auto") -> Compressor:
        """Check all parts together and assemble them.

        Args:
            backend: "reference" (stage by stage, the definition), "blocked" (the same on the CPU with fewer passes over
                memory), "native" (the same, compiled on this machine by its C++ compiler when it is first asked for),
                "triton" (kernels), or "auto" (the fastest for these parts and the device of the state at hand that
                needs no compiler; ``compressor.runs_on(device)`` says which).

        Raises:
            StageError: a part does not fit its family.
            BudgetError: a token budget cannot hold what is to be preserved, or shares add up to more than all of it.
            BackendError: an unknown or unavailable back end.
        """
        parts = dict(self.parts)
        for name in ("partition", "similarity", "matching", "aggregate", "schedule", "allocation"):
            _check_callable(name, parts[name])
        members = tuple(_preserver(member) for member in parts.pop("preserve"))
        budget = Budget.of(parts.pop("budget"))
        compressor = Compressor(preservers=Union(members), budget=budget, backend=backend, **parts)
        _check_backend(compressor)
        compressor.preservers.check_budget(budget, evicts=bool(getattr(compressor.matching, "evicts", False)))
        return compressor


def _check_callable(name: str, part: Any) -> None:
    if isinstance(part, type):
        raise StageError(f"{name} got the class {part.__name__}; pass an instance: .{name}({part.__name__}())")
    if not callable(part):
        raise StageError(
            f"{name} needs an object that can be called as centroidkv.protocols describes for its family, got {part!r}"
        )


def _preserver(member: Any) -> Any:
    if isinstance(member, type):
        raise StageError(f"preserve got the class {member.__name__}; pass an instance: {member.__name__}(...)")
    if hasattr(member, "select") and hasattr(member, "count"):
        if not hasattr(member, "share"):
            raise StageError(f"{member!r} must say its `share` of the free budget, or `share = None` for a fixed count")
        return member
    if callable(member):
        return MaskPreserver(member)
    raise StageError(f"preserve takes preservers such as Sinks(4) or functions state -> mask [B, H, T], got {member!r}")


def _check_backend(compressor: Compressor) -> None:
    backend = compressor.backend
    if backend not in BACKENDS:
        raise BackendError(f"backend is one of {BACKENDS}, got {backend!r}")
    fast = compressor.fast_path
    if backend in ("blocked", "native", "triton") and isinstance(fast, str):
        raise BackendError(f"backend={backend!r} was asked for, but {fast}; use backend='auto' or 'reference'")
    if backend == "native" and not isinstance(fast, str):
        reason = why_not_settings(fast) or why_not_native()
        if reason is not None:
            raise BackendError(f"backend='native' was asked for, but {reason}; use backend='auto'")
    if backend == "triton" and not isinstance(fast, str) and not fast.kernels:
        raise BackendError(
            "backend='triton' was asked for, but there are kernels for Cosine() with BipartiteSoftMatching() only, not "
            f"for {compressor.similarity!r} with {compressor.matching!r}; use backend='auto'"
        )
