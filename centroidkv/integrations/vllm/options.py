"""What ``--additional-config '{"centroidkv": {...}}'`` says, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields, replace
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import torch

from centroidkv import presets
from centroidkv.compressor import Compressor
from centroidkv.errors import CentroidKVError, ServingError
from centroidkv.paged.pages import lasting_data
from centroidkv.paged.plan import ServingPlan
from centroidkv.preserve import Distinctive, Recent, Sinks
from centroidkv.records import Budget
from centroidkv.rotary import Rotary
from centroidkv.similarity import Cosine

TIES = 2.0**-8
"""Similarities of float32 keys are compared as multiples of this."""
MOST = 1 << 30
"""More slots than any request has tokens."""
SECTION = "centroidkv"
"""The key under which vLLM's additional configuration holds ours."""
WORKER = "centroidkv.integrations.vllm.Worker"
"""The worker class that a server must be told to use."""


@dataclass(frozen=True, eq=False)
class ServingOptions:
    """How a server clusters the caches of its requests.

    Numbers of NumPy are taken over as Python's. Options are equal if they mean the same: a budget of 1 slot is not one
    of 1.0, all tokens.

    Args:
        preset: a name of :mod:`centroidkv.presets` whose counts are known ahead of the data, and which needs neither
            the model's queries nor several heads at once.
        budget: share of a request's tokens to keep (a float in (0, 1)), or slots per request (a whole number).
        interval: tokens between two compressions of a request, after the one at the end of its prompt.
        sinks: first tokens to keep as they are; None: as the preset says.
        recent: latest tokens to keep as they are; None: as the preset says. Tokens of a block that is not full yet
            are always kept as they are besides.

    Raises:
        ServingError: an option is unknown, malformed, or not possible in a server.

    >>> ServingOptions.read({"centroidkv": {"budget": 0.5}})
    ServingOptions(preset='quick', budget=0.5, interval=128, sinks=None, recent=None)
    >>> ServingOptions.read({}) is None
    True
    """

    preset: str = "quick"
    budget: float | int = 0.25
    interval: int = 128
    sinks: int | None = None
    recent: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.preset, str) or self.preset not in presets.ALL:
            raise ServingError(f"preset is one of {sorted(presets.ALL)}, got {self.preset!r:.80}")
        # Frozen, and kept as plain numbers, so that what is equal is printed and sent to other processes alike.
        object.__setattr__(self, "budget", _budget(self.budget))
        object.__setattr__(self, "interval", _whole("interval", self.interval, "a whole number of tokens >= 1", 1))
        for name, kind in (("sinks", Sinks), ("recent", Recent)):
            if (count := getattr(self, name)) is not None:
                what = f"a whole number of slots >= 0 for {kind.__name__}, or null for the preset's own"
                object.__setattr__(self, name, _whole(name, count, what, 0))
        reason = _why_not(self.compressor())  # which refuses a bad budget, window or preset
        if reason is not None:
            raise ServingError(f"preset {self.preset!r} {reason}; use one of {usable_presets()}")

    @property
    def _meaning(self) -> tuple[Any, ...]:
        return tuple((type(value), value) for value in astuple(self))

    def __eq__(self, other: object) -> bool:
        # Plans are kept by these options, and to Python 1 == 1.0: the second to come would get the plan of the first.
        return self._meaning == other._meaning if isinstance(other, ServingOptions) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._meaning)

    @classmethod
    def read(cls, additional_config: object) -> ServingOptions | None:
        """The options in vLLM's additional configuration, or None if there are none: then vLLM is left alone."""
        if not isinstance(additional_config, Mapping) or SECTION not in additional_config:
            return None
        given: Any = additional_config[SECTION]
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping):
            raise ServingError(f'additional_config["{SECTION}"] is a table with any of {names}, got {given!r:.80}')
        unknown = sorted((name for name in given if name not in names), key=repr)
        if unknown:
            raise ServingError(f'additional_config["{SECTION}"] knows {names}, got {unknown}')
        return cls(**given)

    def compressor(self, dtype: torch.dtype = torch.bfloat16) -> Compressor:
        """The preset, with the budget and the windows asked for, for keys of ``dtype``.

        Keys of float32 are compared to three digits only, so that a request is clustered alike whatever requests are
        computed beside it: these change the last digits of its keys, and ties must not be decided by those. Keys of 16
        bits are rounded more coarsely than that by being stored.
        """
        try:
            budget = Budget.of(self.budget)
            built = presets.ALL[self.preset](Budget.ratio(0.5))  # the windows may be smaller than the preset's
            members = list(built.preservers.members)
            for kind, count in ((Sinks, self.sinks), (Recent, self.recent)):
                if count is not None:
                    members = _resized(members, kind, count, self.preset)
            built = built.with_(preserve=members, budget=budget)
        except (CentroidKVError, TypeError) as error:
            raise ServingError(f"{self!r}: {error}") from error
        if not built.fits(tokens=1 << 30):
            raise ServingError(f"{self!r}: {budget!r} never holds what is preserved, {members}, and a centroid besides")
        return _settled(built) if dtype == torch.float32 else built


def _budget(given: Any) -> float | int:
    """A budget as a plain number: a share is a float, a number of slots an int."""
    if isinstance(given, Budget):
        given = int(given.amount) if given.kind == "tokens" else float(given.amount)
    wanted = f"budget is a share of the tokens in (0, 1], such as 0.25, or a whole number of slots from 1 to {MOST}"
    if isinstance(given, bool) or not isinstance(given, Real):
        raise ServingError(f"{wanted}, got {given!r:.80}")
    # Whole numbers first: those beyond a float's range cannot be looked at otherwise.
    if isinstance(given, Integral):
        if 1 <= int(given) <= MOST:
            return int(given)
        raise ServingError(f"{wanted}, got {_shown(int(given))}")
    try:
        return float(Budget.ratio(float(given)).amount)
    except (CentroidKVError, OverflowError) as error:
        raise ServingError(f"{wanted}, got {given!r:.80}: {error}") from error


def _whole(name: str, given: Any, wanted: str, least: int) -> int:
    """A whole number as a plain int."""
    if isinstance(given, bool) or not isinstance(given, Integral) or given < least:
        raise ServingError(f"{name} is {wanted}, got {given!r:.80}")
    return int(given)


def _shown(number: int) -> str:
    """A whole number, however long: Python refuses to write out more than 4300 digits."""
    return str(number) if abs(number) < 10**30 else f"one of about {number.bit_length() * 3 // 10} digits"


def _why_not(compressor: Compressor) -> str | None:
    """Why a server cannot carry out a compressor; None if it can."""
    if not compressor.plannable:
        return "decides how much to keep from the data, and servers plan ahead"
    if compressor.needs_queries:
        return "needs the model's queries, which a server does not keep"
    if compressor.pools_heads:
        return "decides for all heads together, which tensor parallelism splits"
    if not compressor.even:
        return "gives layers different numbers of slots, and a server's layers share their pages' table"
    if lasting_data(compressor, 8, 8, torch.float32, Rotary.from_theta(1e4, 8)):
        return "keeps data of its own of every slot, for which these pages have no room"
    return None


def _settled(compressor: Compressor) -> Compressor:
    """The same, comparing similarities and scores to a few digits only."""
    similarity = compressor.similarity
    members = [
        replace(member, precision=torch.bfloat16) if isinstance(member, Distinctive) else member
        for member in compressor.preservers.members
    ]
    if isinstance(similarity, Cosine):
        similarity = replace(similarity, step=TIES)
    return compressor.with_(preserve=members, similarity=similarity)


def _resized(members: list[Any], kind: type, count: int, preset: str) -> list[Any]:
    """``members`` with the one of ``kind`` keeping ``count`` slots."""
    if not any(isinstance(member, kind) and getattr(member, "share", None) is None for member in members):
        raise ServingError(f"preset {preset!r} has no {kind.__name__}(slots) whose size could be set")
    return [kind(count) if isinstance(member, kind) else member for member in members]


def usable_presets() -> list[str]:
    """Presets that a server can carry out."""
    return [name for name, preset in presets.ALL.items() if _why_not(preset()) is None]


@lru_cache(typed=True)  # and options compare by type too, else a budget of 1 slot would get the plan of 1.0, everything
def plan_of(options: ServingOptions, block_size: int, dtype: torch.dtype) -> ServingPlan:
    """The one plan of these options in this process."""
    return ServingPlan(options.compressor(dtype), block_size, options.interval)
