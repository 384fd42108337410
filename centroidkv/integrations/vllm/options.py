"""What ``--additional-config '{"centroidkv": {...}}'`` says, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from centroidkv import presets
from centroidkv.compressor import Compressor
from centroidkv.errors import CentroidKVError, ServingError
from centroidkv.preserve import Distinctive, Recent, Sinks
from centroidkv.preserve.union import Union
from centroidkv.records import Budget
from centroidkv.similarity import Cosine

TIES = 2.0**-8
"""Similarities of float32 keys are compared as multiples of this."""
SECTION = "centroidkv"
"""The key under which vLLM's additional configuration holds ours."""
WORKER = "centroidkv.integrations.vllm.Worker"
"""The worker class that a server must be told to use."""


@dataclass(frozen=True)
class ServingOptions:
    """How a server clusters the caches of its requests.

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
        if self.preset not in presets.ALL:
            raise ServingError(f"preset is one of {sorted(presets.ALL)}, got {self.preset!r}")
        if isinstance(self.interval, bool) or not isinstance(self.interval, int) or self.interval < 1:
            raise ServingError(f"interval is a whole number of tokens >= 1, got {self.interval!r}")
        reason = _why_not(self.compressor())  # which refuses a bad budget, window or preset
        if reason is not None:
            raise ServingError(f"preset {self.preset!r} {reason}; use one of {usable_presets()}")

    @classmethod
    def read(cls, additional_config: object) -> ServingOptions | None:
        """The options in vLLM's additional configuration, or None if there are none: then vLLM is left alone."""
        if not isinstance(additional_config, Mapping) or SECTION not in additional_config:
            return None
        given: Any = additional_config[SECTION]
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping):
            raise ServingError(f'additional_config["{SECTION}"] is a table with any of {names}, got {given!r}')
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ServingError(f'additional_config["{SECTION}"] knows {names}, got {unknown}')
        return cls(**given)

    def compressor(self, dtype: torch.dtype = torch.bfloat16) -> Compressor:
        """The preset, with the budget and the windows asked for, for keys of ``dtype``.

        Keys of float32 are compared to three digits only, so that a request is clustered alike whatever requests are
        computed beside it: these change the last digits of its keys, and ties must not hang on those. Keys of 16 bits
        are rounded more coarsely than that by being stored.
        """
        try:
            budget = Budget.of(self.budget)
            built = presets.ALL[self.preset](Budget.ratio(0.5))  # the windows may be smaller than the preset's
            members = list(built.preservers.members)
            for kind, count in ((Sinks, self.sinks), (Recent, self.recent)):
                if count is not None:
                    members = _resized(members, kind, count, self.preset)
        except (CentroidKVError, TypeError) as error:
            raise ServingError(f"{self!r}: {error}") from error
        built = replace(built, preservers=Union(tuple(members)), budget=budget)
        if not built.fits(tokens=1 << 30):
            raise ServingError(f"{self!r}: {budget!r} never holds what is preserved, {members}, and a centroid besides")
        return _settled(built) if dtype == torch.float32 else built


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
    return None


def _settled(compressor: Compressor) -> Compressor:
    """The same, comparing similarities and scores to a few digits only."""
    similarity = compressor.similarity
    members = [
        replace(member, precision=torch.bfloat16) if isinstance(member, Distinctive) else member
        for member in compressor.preservers.members
    ]
    return replace(
        compressor,
        preservers=Union(tuple(members)),
        similarity=replace(similarity, step=TIES) if isinstance(similarity, Cosine) else similarity,
    )


def _resized(members: list[Any], kind: type, count: int, preset: str) -> list[Any]:
    """``members`` with the one of ``kind`` keeping ``count`` slots."""
    if not any(isinstance(member, kind) and getattr(member, "share", None) is None for member in members):
        raise ServingError(f"preset {preset!r} has no {kind.__name__}(slots) whose size could be set")
    return [kind(count) if isinstance(member, kind) else member for member in members]


def usable_presets() -> list[str]:
    """Presets that a server can carry out."""
    return [name for name, preset in presets.ALL.items() if _why_not(preset()) is None]
