"""A model lent to our attention function for as long as someone needs it."""

from __future__ import annotations

import weakref
from typing import Any

from centroidkv.integrations.transformers.attention import takes_handovers
from centroidkv.integrations.transformers.release import text_config
from centroidkv.integrations.transformers.switch import Enabled, enable

_LOANS: weakref.WeakKeyDictionary[Any, weakref.ref[Loan]] = weakref.WeakKeyDictionary()
"""The loan of every model that is lent now. Kept here and not on the model, because a model is saved and copied, and
a second press on the same model must find the loan of the first."""


class Loan:
    """Keeps :func:`~centroidkv.integrations.transformers.enable` in force until nobody holds the loan any more.

    kvpress closes a press before the first token is decoded, yet that is when degrees are needed. So every clustered
    layer holds the loan as well as the open press: the model has its own attention back as soon as the press is closed
    and the last clustered cache is gone. Our function calls the stock one for all other caches, so a loan is harmless.

    Get one with :meth:`of`.
    """

    def __init__(self, enabled: Enabled) -> None:
        self._end = weakref.finalize(self, enabled.undo)
        self._end.atexit = False  # at exit the model goes anyway

    @classmethod
    def of(cls, model: Any) -> tuple[Loan, bool]:
        """The loan of ``model``, and whether it began with this call.

        Raises:
            BackendError: the model's attention would ignore the degrees and cannot be wrapped.
        """
        held = _LOANS.get(model)
        loan = None if held is None else held()
        if loan is not None and loan.open:
            if takes_handovers(text_config(model.config)):
                return loan, False
            loan.end()  # someone chose another attention meanwhile, which is what will be given back
        loan = cls(enable(model))
        _LOANS[model] = weakref.ref(loan)
        return loan, True

    @property
    def open(self) -> bool:
        """Whether the model still attends through our function, as far as the loan is concerned."""
        return self._end.alive

    def end(self) -> None:
        """Give the model its own attention back now; clustered caches are refused from here on."""
        self._end()

    def __deepcopy__(self, memo: dict[int, Any]) -> Loan:
        return self  # a copied cache needs the same loan
