"""What makes parts fit to be assembled: the checks of a compressor, whoever makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from centroidkv.errors import BackendError, StageError
from centroidkv.preserve.union import MaskPreserver, Union
from centroidkv.rounds import ORDERS, Stages, refusal
from centroidkv.traits import FAMILIES, PreserverTraits

CALLED = ("partition", "similarity", "matching", "aggregate", "schedule", "allocation")
"""The parts that are called; preservers are asked by methods, a budget is a number."""


def check_part(name: str, part: Any) -> None:
    """Refuse what is no stage of the family ``name``, or says something of itself that nothing reads.

    Raises:
        StageError: a class instead of an instance, nothing that can be called, or an attribute that cannot be meant.
    """
    if isinstance(part, type):
        raise StageError(f"{name} got the class {part.__name__}; pass an instance: .{name}({part.__name__}())")
    if not callable(part):
        raise StageError(
            f"{name} needs an object that can be called as centroidkv.protocols describes for its family, got {part!r}"
        )
    if name in FAMILIES:
        FAMILIES[name].check(part)


def as_preservers(members: Any) -> Union:
    """Preservers and functions ``state -> mask`` as one preserver; a :class:`Union` as it is.

    Raises:
        StageError: one of them is neither.
    """
    if isinstance(members, Union):
        members = members.members
    elif not isinstance(members, Sequence):
        members = (members,)
    return Union(tuple(_preserver(member) for member in members))


def _preserver(member: Any) -> Any:
    if isinstance(member, type):
        raise StageError(f"preserve got the class {member.__name__}; pass an instance: {member.__name__}(...)")
    if hasattr(member, "select") and hasattr(member, "count"):
        if not hasattr(member, "share"):
            raise StageError(f"{member!r} must say its `share` of the free budget, or `share = None` for a fixed count")
        PreserverTraits.check(member)
        return member
    if callable(member):
        return MaskPreserver(member)
    raise StageError(f"preserve takes preservers such as Sinks(4) or functions state -> mask [B, H, T], got {member!r}")


def check_backend(name: Any, stages: Stages) -> None:
    """Refuse a back end that does not exist, or that cannot carry out these stages on this machine.

    Raises:
        BackendError: says why.
    """
    if not isinstance(name, str) or name not in ORDERS:
        raise BackendError(f"backend is one of {tuple(ORDERS)}, got {name!r}")
    first, *others = ORDERS[name]
    if not others and (reason := first.why_not(stages)):
        raise refusal({name: reason})
