"""Builder: chooses the stages of a Compressor and checks them all at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from centroidkv.aggregate import DegreeWeightedMean
from centroidkv.allocation import Even
from centroidkv.matching import BipartiteSoftMatching
from centroidkv.partition import Alternating
from centroidkv.preserve import Recent, Sinks
from centroidkv.records import Budget
from centroidkv.schedule import LinearAnnealing
from centroidkv.similarity import Cosine

Made = TypeVar("Made")


@dataclass(frozen=True)
class Builder(Generic[Made]):
    """Every method returns a new builder with one part replaced; :meth:`build` makes the whole, which checks itself.

    Defaults are the paper's method: sinks and recent tokens preserved, alternation in chunks, cosine, bipartite soft
    matching, degree-weighted mean, linear annealing, an even allocation. The numbers are ours (README, "Choosing").

    >>> from centroidkv import Compressor
    >>> from centroidkv.partition import Halves
    >>> Compressor.builder().partition(Halves(chunk_size=64)).budget(0.5).build().partition
    Halves(chunk_size=64)
    """

    make: Callable[..., Made]
    """Takes the parts by name; :class:`~centroidkv.Compressor` is what makes them one."""
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

    def preserve(self, *preservers: Any) -> Builder[Made]:
        """Slots to set aside: any number of preservers, or functions ``state -> mask``; none = nothing is set aside."""
        return self._with("preserve", preservers)

    def partition(self, partition: Any) -> Builder[Made]:
        """How slots split into sources and targets: a Partitioner, or a function ``length -> (sources, targets)``."""
        return self._with("partition", partition)

    def similarity(self, similarity: Any) -> Builder[Made]:
        """How alike keys are: a Similarity, or a function ``(a, b) -> scores``."""
        return self._with("similarity", similarity)

    def matching(self, matching: Any) -> Builder[Made]:
        """Which slots join which: a Matcher."""
        return self._with("matching", matching)

    def aggregate(self, aggregate: Any) -> Builder[Made]:
        """What a cluster becomes: an Aggregator."""
        return self._with("aggregate", aggregate)

    def schedule(self, schedule: Any) -> Builder[Made]:
        """How much each round removes: a Schedule, or a function ``round -> rate``."""
        return self._with("schedule", schedule)

    def budget(self, budget: Budget | float) -> Builder[Made]:
        """How many slots may stay: a Budget; a float is a ratio, an int a number of slots."""
        return self._with("budget", budget)

    def allocation(self, allocation: Any) -> Builder[Made]:
        """How layers share the budget: an Allocation, or a function ``depths -> shares``. Even by default."""
        return self._with("allocation", allocation)

    def _with(self, name: str, value: Any) -> Builder[Made]:
        return replace(self, parts={**self.parts, name: value})

    def build(self, backend: str = "auto") -> Made:
        """Assemble the parts, which checks them all together.

        Args:
            backend: "reference" (stage by stage, the definition), "blocked" (the same on the CPU with fewer passes over
                memory), "native" (the same, compiled on this machine by its C++ compiler when it is first asked for),
                "triton" (kernels), "auto" (the fastest for these parts and the state at hand that needs no compiler;
                ``compressor.runs_on(device)`` says which), or "fastest" (with compiled rounds where they can be had).

        Raises:
            StageError: a part does not fit its family.
            BudgetError: a token budget cannot hold what is to be preserved, or shares add up to more than all of it.
            BackendError: an unknown or unavailable back end.
        """
        return self.make(backend=backend, **self.parts)
