"""How rounds run: stage by stage (the definition), blocked or compiled on the CPU, or as kernels on a GPU.

Stages can always be carried out one after the other, whatever they are. For some combinations there are faster ways to
the same result: each is a :class:`~centroidkv.rounds.backend.Backend` in a file of its own, and stands in
:data:`ORDERS`, which say in what order they are asked.
"""

from __future__ import annotations

from centroidkv.rounds.backend import Backend, reasons, refusal, run_first
from centroidkv.rounds.blocked import BLOCKED
from centroidkv.rounds.kernels import TRITON
from centroidkv.rounds.native import NATIVE
from centroidkv.rounds.reference import REFERENCE
from centroidkv.rounds.stages import Stages

__all__ = ["BLOCKED", "NATIVE", "ORDERS", "REFERENCE", "TRITON", "Backend", "Stages", "reasons", "refusal", "run_first"]

ORDERS: dict[str, tuple[Backend, ...]] = {
    "auto": (BLOCKED, TRITON, REFERENCE),
    "fastest": (NATIVE, BLOCKED, TRITON, REFERENCE),
    **{backend.name: (backend,) for backend in (REFERENCE, BLOCKED, NATIVE, TRITON)},
}
"""By what a user asks for: the back ends in the order in which they are asked; the first that can runs.

"auto" needs no compiler; "fastest" takes compiled rounds where there is one. On the CPU kernels come after what is
written for it: there they run in Triton's interpreter, for tests.
"""
