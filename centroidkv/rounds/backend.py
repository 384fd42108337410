"""What a way to run rounds is, and how one is chosen."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from centroidkv.errors import BackendError, BackendWarning
from centroidkv.rounds.stages import Stages
from centroidkv.state import KVState


class OutOfReach(Exception):
    """A back end finds while it runs that the numbers at hand are beyond it; nothing was changed."""


class Backend(ABC):
    """One way to run all rounds of a compression. What it cannot do, it says before it is asked to.

    ``name`` is what users ask for it by.
    """

    name: str

    @abstractmethod
    def why_not(self, stages: Stages) -> str | None:
        """Why it cannot carry out these stages on this machine, whatever the state; None if it can."""

    @abstractmethod
    def why_not_on(self, device: torch.device) -> str | None:
        """Why it cannot work on ``device``; None if it can."""

    def why_not_these(self, state: KVState) -> str | None:
        """Why it cannot work on keys, values or slot data like these, on a device it can work on; None if it can."""
        return None

    @abstractmethod
    def run(self, stages: Stages, state: KVState, free: Tensor, sizes: Sequence[int]) -> KVState:
        """Bring the ``free [B, H, T]`` slots of ``state`` to ``sizes`` slots, one round per size; the others stay.

        Args:
            stages: some that it can carry out.
            state: live slots only, prepared (:meth:`Stages.prepare`); every head has the same number of free ones.
            free: bool.
            sizes: at least one, none larger than the one before it.

        Raises:
            OutOfReach: it cannot after all.
        """


def reasons(order: Sequence[Backend], stages: Stages, place: torch.device | KVState) -> dict[str, str]:
    """Why the back ends of ``order`` that come before the first that can run cannot, by name."""
    found: dict[str, str] = {}
    for backend in order:
        reason = _why_not(backend, stages, place)
        if reason is None:
            break
        found[backend.name] = reason
    return found


def run_first(order: Sequence[Backend], stages: Stages, state: KVState, free: Tensor, sizes: Sequence[int]) -> KVState:
    """Let the first back end of ``order`` that can run the rounds do so.

    Raises:
        BackendError: none can; with what each of them said.

    Warns:
        BackendWarning: one of them had begun when it found that it cannot.
    """
    found: dict[str, str] = {}
    for backend in order:
        reason = _why_not(backend, stages, state)
        if reason is None:
            try:
                return backend.run(stages, state, free, sizes)
            except OutOfReach as late:
                reason = str(late)
            if len(order) > 1:
                warnings.warn(f"{backend.name} rounds give up: {reason}", BackendWarning, stacklevel=2)
        found[backend.name] = reason
    raise refusal(found)


def refusal(found: dict[str, str]) -> BackendError:
    """The error that says why the back ends that were asked for cannot run."""
    told = "; ".join(f"backend={name!r} was asked for, but {reason}" for name, reason in found.items())
    return BackendError(f"{told}; use backend='auto'")


def _why_not(backend: Backend, stages: Stages, place: torch.device | KVState) -> str | None:
    if isinstance(place, torch.device):
        return backend.why_not_on(place) or backend.why_not(stages)
    return backend.why_not_on(place.keys.device) or backend.why_not(stages) or backend.why_not_these(place)
