"""Who is compared: our presets and kvpress's presses, at equal bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from analysis.evaluation.fidelity import presses
from analysis.evaluation.fidelity.ablations import ABLATIONS
from analysis.evaluation.fidelity.clusterings import CLUSTERINGS
from analysis.evaluation.fidelity.prefill import Prefill
from analysis.reproduce.capture import asked
from centroidkv import Compressor, KVState, presets
from centroidkv.records import Budget

FULL = "full cache"

OURS: dict[str, Callable[[Budget], Compressor]] = {**presets.ALL, **ABLATIONS, **CLUSTERINGS}
"""What is ours among the methods: every preset, the default's ablations and the other clusterings, by a budget."""


def full_states(filled: Prefill) -> list[KVState]:
    """Every layer as it is, each token its own slot."""
    return [KVState.from_kv(layer.keys, layer.values, rotary=filled.rotary) for layer in filled.layers]


@dataclass(frozen=True)
class Contender:
    """A method: ``states(model, prefill, share)`` gives every layer's state in at most that share of the full bytes.

    ``described(share)`` says what the method is there, all its settings: equal texts are the same method.
    """

    name: str
    states: Callable[[Any, Prefill, float], list[KVState]]
    described: Callable[[float], str]
    clusters: bool = False

    def bytes_of(self, state: KVState) -> int:
        """Bytes a layer's state takes: keys and values, for clustering methods degrees and positions as well."""
        extra = 8 * state.degree.numel() if self.clusters else 0
        return state.keys.nbytes + state.values.nbytes + extra


def slots_for(share: float, filled: Prefill, evicts: bool) -> int:
    """The slots that fit into ``share`` of the bytes of the full keys and values.

    A clustered slot also pays for its degree and position (8 bytes per head); an evicting method stores neither.
    """
    layer = filled.layers[0]
    pair = (layer.keys.shape[-1] + layer.values.shape[-1]) * layer.keys.element_size()
    return int(share * filled.length * pair) // (pair + (0 if evicts else 8))


def compressed(compressor: Compressor, filled: Prefill) -> list[KVState]:
    """Every layer by its share of the budget.

    Layers of equal budgets go together, as rows of one batch; rows do not see each other.
    """
    found: dict[int, KVState] = {}
    own = compressor.for_layers(filled.depths)
    for budget in dict.fromkeys(each.budget for each in own):
        alike = [index for index, each in enumerate(own) if each.budget == budget]
        layers = [filled.layers[index] for index in alike]
        stacked = KVState.from_kv(
            torch.cat([layer.keys for layer in layers]),
            torch.cat([layer.values for layer in layers]),
            rotary=filled.rotary,
        )
        if compressor.needs_queries:
            stacked = asked(stacked, torch.cat([layer.queries * layer.scale for layer in layers]))
        result = own[alike[0]](stacked)
        found |= {index: result.rows(torch.tensor([row])) for row, index in enumerate(alike)}
    return [found[index] for index in range(len(own))]


def ours(name: str, make: Callable[[Budget], Compressor]) -> Contender:
    """One of our compressors, by a function of its budget."""
    evicts = bool(getattr(make(Budget.ratio(0.5)).matching, "evicts", False))

    def states(model: Any, filled: Prefill, share: float) -> list[KVState]:
        return compressed(make(Budget.tokens(slots_for(share, filled, evicts))), filled)

    def described(share: float) -> str:
        # Which backend runs the rounds depends on the machine, and what they give does not.
        lines = repr(make(Budget.ratio(share))).splitlines()
        return " ".join(" ".join(line.split()) for line in lines if not line.lstrip().startswith("backend"))

    return Contender(name, states, described, clusters=not evicts)


def press(name: str, make: Callable[[float], Any]) -> Contender:
    """A kvpress press, by a function of the share of slots to remove."""
    return Contender(
        name,
        lambda model, filled, share: presses.press_states(model, make(1 - share), filled),
        lambda share: repr(make(1 - share)),
    )


def all_contenders() -> list[Contender]:
    """Every preset, its ablations, the other clusterings, and every press that is installed."""
    return [ours(name, make) for name, make in OURS.items()] + [
        press(name, make) for name, make in presses.makers().items()
    ]
