"""How a compressed state is kept between two steps: the protocol, and the storage that keeps it as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from centroidkv.errors import StageError
from centroidkv.slot_data import SlotDatum
from centroidkv.state import KVState


@dataclass(frozen=True, eq=False)
class Held:
    """What a storage made of a state: named tensors and plain facts, never written to afterwards.

    One form for all storages, so that whatever is held can be counted, moved, shared and saved without knowing it.

    Args:
        tensors: everything large.
        facts: what JSON can say: whole numbers, strings, lists of them.
        ready: what a device has to wait for before it reads the tensors (a CUDA event), or None.
    """

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)
    ready: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, wherever they are."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def map(self, change: Callable[[Tensor], Tensor]) -> Held:
        """The same with ``change`` applied to every tensor."""
        return replace(self, tensors={name: change(tensor) for name, tensor in self.tensors.items()})

    def __deepcopy__(self, memo: dict[int, Any]) -> Held:
        return self  # nobody writes to it, so copies of a cache may share it


@runtime_checkable
class Storage(Protocol):
    """Keeps what was compressed until the next step asks for it. Frozen and without state of its own.

    A storage sees one row of a batch at a time, so a padded row is stored exactly as it would be alone. ``put`` and
    ``get`` suffice: what a class leaves out is done as written here, whether it subclasses this protocol or not.
    """

    @property
    def form(self) -> str:
        """Names the layout of what is held; storages of equal form can read each other's."""
        return repr(self)

    def put(self, state: KVState) -> Held:
        """Take ``state``. Must own its memory: a view would keep the uncompressed keys alive."""
        ...

    def get(self, held: Held, device: torch.device) -> KVState:
        """What :meth:`put` took, on ``device``, to attend to; without ``rotary``, which the caller knows."""
        ...

    def fetch(self, held: Held, device: torch.device) -> Held:
        """Start to bring ``held`` near; :meth:`get` also accepts what this returns."""
        return held

    def rest(self, held: Held, device: torch.device) -> Held:
        """``held``, just read from a file, where it rests between steps if attention runs on ``device``."""
        return held.map(lambda tensor: tensor.to(device))


@dataclass(frozen=True)
class Completed(Storage):
    """An object with ``put`` and ``get``, and the rest: its own where it has it, else what :class:`Storage` does.

    Its form is its ``repr`` unless it says another one, so give it one that tells its settings (a dataclass has it); an
    object's address, Python's default, is another one in every process, and what was saved under it is refused.
    """

    inside: Any

    @property
    def form(self) -> str:
        return str(getattr(self.inside, "form", repr(self.inside)))

    def put(self, state: KVState) -> Held:
        return self.inside.put(state)

    def get(self, held: Held, device: torch.device) -> KVState:
        return self.inside.get(held, device)

    def fetch(self, held: Held, device: torch.device) -> Held:
        own = getattr(self.inside, "fetch", None)
        return super().fetch(held, device) if own is None else own(held, device)

    def rest(self, held: Held, device: torch.device) -> Held:
        own = getattr(self.inside, "rest", None)
        return super().rest(held, device) if own is None else own(held, device)

    def __repr__(self) -> str:
        return repr(self.inside)


def as_storage(given: Any) -> Storage:
    """``given`` as a storage with all of the protocol; itself if it has it.

    Raises:
        StageError: it has no ``put`` and ``get``, or is a class.

    >>> class Plain:
    ...     def put(self, state): return Exact().put(state)
    ...     def get(self, held, device): return Exact().get(held, device)
    >>> isinstance(Plain(), Storage), isinstance(as_storage(Plain()), Storage)
    (False, True)
    """
    has = all(callable(getattr(given, name, None)) for name in ("put", "get"))
    if isinstance(given, type) or not has:
        raise StageError(f"storage must have put and get, as Quantised(bits=8) or Offloaded(), got {given!r}")
    return given if isinstance(given, Storage) else Completed(given)


@dataclass(frozen=True)
class Exact(Storage):
    """Keeps a state bit by bit, where it is.

    >>> state = KVState.from_kv(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))
    >>> back = Exact().get(Exact().put(state), state.keys.device)
    >>> bool(back.keys.equal(state.keys)), back.positions.equal(state.positions)
    (True, True)
    """

    def put(self, state: KVState) -> Held:
        return hold_rest(state, keys=state.keys, values=state.values)

    def get(self, held: Held, device: torch.device) -> KVState:
        return with_rest(held, keys=held.tensors["keys"], values=held.tensors["values"])


def hold_rest(state: KVState, facts: Mapping[str, Any] | None = None, **stored: Tensor) -> Held:
    """A Held of the tensors ``stored`` in place of keys and values, and of everything else in full precision."""
    tensors = {**stored, "degree": state.degree, "positions": state.positions, "seen": state.seen}
    tensors |= {f"slot_data.{name}": data for name, data in state.slot_data.items()}
    tensors |= {f"head_data.{name}": data for name, data in state.head_data.items()}
    owned = {name: own(tensor) for name, tensor in tensors.items()}
    rules = {"slot_rules": SlotDatum.write(state.slot_rules)} if state.slot_rules else {}
    return Held(owned, {"rounds": state.rounds, **rules, **(facts or {})})


def with_rest(held: Held, keys: Tensor, values: Tensor) -> KVState:
    """The state of ``keys`` and ``values`` and what :func:`hold_rest` kept beside them."""
    names = held.tensors

    def data(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): names[name] for name in names if name.startswith(prefix)}

    return KVState(
        keys=keys,
        values=values,
        degree=names["degree"],
        positions=names["positions"],
        rounds=held.facts["rounds"],
        seen=names["seen"],
        slot_data=data("slot_data."),
        slot_rules=SlotDatum.read(held.facts.get("slot_rules", {})),
        head_data=data("head_data."),
    )


def own(tensor: Tensor) -> Tensor:
    """``tensor``, contiguous and alone in its memory: a slice would keep all of the larger buffer alive."""
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)
