"""How many slots a layer of constant size has, and which compressors such a layer cannot have."""

from __future__ import annotations

from centroidkv.compressor import Compressor
from centroidkv.errors import BudgetError, StageError


def capacity_for(compressor: Compressor, interval: int) -> int:
    """The slots that are needed at most between two compressions: budget + interval.

    Raises:
        BudgetError: a ratio, which grows with the tokens seen, or a budget that the stages cannot keep to.
        StageError: the compressor needs queries, which cannot be seen inside a compiled step.

    >>> from centroidkv import Budget, presets
    >>> capacity_for(presets.centroidkv(Budget.tokens(128)), interval=16)
    144
    """
    budget = compressor.budget
    if budget.kind != "tokens":
        raise BudgetError(
            f"a fixed capacity needs a fixed budget, got {budget!r}, which grows with every token; use "
            "Budget.tokens(...), or capacity='growing'"
        )
    if compressor.needs_queries:
        raise StageError(
            "this compressor weighs slots by the model's queries, which a cache cannot see inside a compiled step; "
            f"choose one that needs none, such as presets.distinctive, or capacity='growing': {compressor!r}"
        )
    capacity = int(budget.amount) + interval
    if compressor.plannable and not compressor.plan(capacity).met:
        raise BudgetError(
            f"from {capacity} slots (budget + interval) this compressor comes down to "
            f"{compressor.plan(capacity).final}, over its {budget!r}, so no fixed number of slots would do; use a "
            f"schedule that ends at the budget: {compressor!r}"
        )
    return capacity
