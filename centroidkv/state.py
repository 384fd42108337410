"""KVState: the one record that goes into a compressor and comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from centroidkv.errors import DeviceError, DtypeError, NonFiniteError, PositionOrderError, RotaryError, ShapeError
from centroidkv.guards import real_tokens
from centroidkv.ranges import all_finite, require_finite
from centroidkv.rotary import Rotary
from centroidkv.slot_data import KEPT, SlotDatum

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGER_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class KVState:
    """Keys and values of one layer, with the mass and the place of every slot.

    Shapes: B batch, H KV heads, T slots, D key size, Dv value size.

    Args:
        keys: ``[B, H, T, D]``, float32, float16, bfloat16 or float64, as cached (after RoPE).
        values: ``[B, H, T, Dv]``, same device; one of these types, but not necessarily the keys' (under autocast keys
            are float32, because RoPE is, and values bfloat16). Each is kept in its own.
        degree: ``[B, H, T]`` float32: how many tokens a slot stands for. 1 = raw token, 0 = empty or padding slot.
            Counts are exact up to 2^24, above that rounded, in an order that differs between back ends.
        positions: ``[B, H, T]`` int32 or int64: position of the token whose slot stayed; ascending along T.
        rounds: how many clustering rounds made this state.
        seen: ``[B]`` int64: real tokens each row has seen. Default: the degrees' sum, which it equals unless tokens
            were evicted.
        slot_data: optional tensors ``[B, H, T, ...]`` that travel with their slots (scores, for instance); when
            slots merge, the entry of the slot that stays is kept, unless ``slot_rules`` say otherwise.
        slot_rules: how slot data merges, by its name; see :class:`~centroidkv.slot_data.SlotDatum`.
        head_data: optional tensors ``[B, H, ...]`` per KV head (``"queries"``, see :mod:`centroidkv.queries`).
        rotary: how the keys were rotated; needed by stages that compare keys before RoPE.

    Invariants: along T, live slots (degree > 0) have strictly ascending positions; the degrees of a (row, head) add
    up to the number of real tokens it has seen and not evicted.

    Raises:
        ShapeError, DtypeError, DeviceError: at construction. Contents are checked by :meth:`validate`.

    >>> state = KVState.from_kv(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))
    >>> state.slots, state.degree.sum(-1).tolist(), state.positions[0, 0].tolist()
    (5, [[5.0, 5.0]], [0, 1, 2, 3, 4])
    """

    keys: Tensor
    values: Tensor
    degree: Tensor
    positions: Tensor
    rounds: int = 0
    seen: Tensor = None  # type: ignore[assignment]  # filled in by __post_init__
    slot_data: Mapping[str, Tensor] = field(default_factory=dict)
    slot_rules: Mapping[str, SlotDatum] = field(default_factory=dict)
    head_data: Mapping[str, Tensor] = field(default_factory=dict)
    rotary: Rotary | None = None

    def __post_init__(self) -> None:
        _check_layout(self)
        if self.seen is None:
            # Any head can tell: the degrees of each head add up to the same tokens.
            total = self.degree.double().sum(-1)
            seen = total.amax(-1) if self.heads else total.new_zeros(self.batch)
            object.__setattr__(self, "seen", seen.round().long())

    # -- construction ---------------------------------------------------------------------------------------------

    @classmethod
    def from_kv(
        cls, keys: Tensor, values: Tensor, mask: Tensor | None = None, *, rotary: Rotary | None = None
    ) -> KVState:
        """Wrap raw keys and values: every token is its own cluster.

        Args:
            keys: ``[B, H, T, D]``.
            values: ``[B, H, T, Dv]``.
            mask: ``[B, T]`` bool or whole numbers 0 and 1: which tokens are real. Padding gets degree 0, real tokens
                are numbered from 0 per row, so a padded row carries the positions of its own unpadded run.
            rotary: how the keys were rotated, if they were.

        Raises:
            MaskError: a mask of other numbers, such as an additive one (0 = real, -inf = padding).
            ShapeError, DtypeError, DeviceError: the tensors do not fit together.
        """
        for name, tensor in (("keys", keys), ("values", values)):
            if tensor.ndim != 4:
                raise ShapeError(f"{name} must be [B, H, T, D], got {tuple(tensor.shape)}")
        batch, _, slots, _ = keys.shape
        if mask is None:
            degree = torch.ones(keys.shape[:3], dtype=torch.float32, device=keys.device)
            positions = torch.arange(slots, device=keys.device).expand(keys.shape[:3]).contiguous()
            seen = torch.full((batch,), slots, device=keys.device)
            return cls(keys, values, degree, positions, seen=seen, rotary=rotary)
        if mask.shape != (batch, slots):
            raise ShapeError(
                f"mask must be [B, T] = {(batch, slots)} to fit the keys, got {tuple(mask.shape)}; "
                "pass the 2-D padding mask, 1 for real tokens and 0 for padding"
            )
        if mask.device != keys.device:
            raise DeviceError(f"mask is on {mask.device}, keys are on {keys.device}; move them to one device")
        real = real_tokens(mask)
        # Padding repeats its left neighbour's number, which keeps positions ascending along T.
        numbers = (real.long().cumsum(-1) - 1).clamp(min=0)
        degree, positions = (x[:, None].expand(keys.shape[:3]).contiguous() for x in (real.float(), numbers))
        return cls(keys, values, degree, positions, seen=real.sum(-1), rotary=rotary)

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """B, the number of rows."""
        return self.keys.shape[0]

    @property
    def heads(self) -> int:
        """H, the number of KV heads."""
        return self.keys.shape[1]

    @property
    def slots(self) -> int:
        """T, the number of slots, empty ones included."""
        return self.keys.shape[2]

    @property
    def live(self) -> Tensor:
        """``[B, H, T]`` bool: slots that hold at least one token."""
        return self.degree > 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, degrees, positions and slot data."""
        tensors = (self.keys, self.values, self.degree, self.positions, *self.slot_data.values())
        return sum(t.numel() * t.element_size() for t in tensors)

    def __repr__(self) -> str:
        return (
            f"KVState(B={self.batch}, H={self.heads}, T={self.slots}, D={self.keys.shape[-1]}, "
            f"{self._types()} on {self.keys.device}, rounds={self.rounds})"
        )

    def _types(self) -> str:
        names = dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in (self.keys, self.values))
        return " and ".join(names)

    # -- deriving -------------------------------------------------------------------------------------------------

    def map_slots(self, change: Callable[[Tensor], Tensor], **others: Any) -> KVState:
        """``change`` applied to every tensor with a slot axis ``[B, H, T, ...]``; ``others`` replace other fields."""
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in SLOTS}
        data = {name: change(data) for name, data in self.slot_data.items()}
        return replace(self, **changed, slot_data=data, **others)

    def rule(self, name: str) -> SlotDatum:
        """How the slot data ``name`` behaves."""
        return self.slot_rules.get(name, KEPT)

    def with_slot_data(self, name: str, data: Tensor, rule: SlotDatum = KEPT) -> KVState:
        """With ``data [B, H, T, ...]`` that travels with the slots and behaves as ``rule`` says."""
        return replace(self, slot_data={**self.slot_data, name: data}, slot_rules={**self.slot_rules, name: rule})

    def select(self, index: Tensor) -> KVState:
        """The slots ``index [B, H, m]`` of each (row, head), in that order."""
        return self.map_slots(lambda x: gather_slots(x, index))

    def rows(self, index: Tensor) -> KVState:
        """The rows ``index [b]`` of the batch (also to repeat or reorder them, as beam search does)."""
        return self.map_slots(
            lambda x: x.index_select(0, index),
            seen=self.seen.index_select(0, index),
            head_data={name: data.index_select(0, index) for name, data in self.head_data.items()},
        )

    def keys_before_rope(self, asked_by: object) -> Tensor:
        """The keys un-rotated by their positions, in the accumulation dtype.

        Raises:
            RotaryError: ``rotary`` is not set; names the stage that asked.
            NonFiniteError: keys so long that turning them leaves the type.
        """
        if self.rotary is None:
            raise RotaryError(
                f"{asked_by!r} looks at keys before RoPE and needs to know how they were rotated: pass "
                "KVState.from_kv(..., rotary=Rotary.from_theta(theta, dim)), or choose rope='after'"
            )
        turned = self.rotary.unrotate(self.keys, self.positions).to(accumulation_dtype(self.keys.dtype))
        return require_finite(
            turned,
            f"{asked_by!r} looks at keys before RoPE, and turning them back leaves {turned.dtype}: a pair of channels "
            "is longer than its largest number (or keys are not finite). Choose rope='after', or look for an overflow",
        )

    def before_rope(self, asked_by: object) -> KVState:
        """The state with its keys un-rotated, in their own type where that holds them, else in float32.

        Raises:
            RotaryError, NonFiniteError: see :meth:`keys_before_rope`.
        """
        turned = self.keys_before_rope(asked_by)
        own = turned.to(self.keys.dtype)
        return replace(self, keys=own if own is turned or all_finite(own) else turned)

    def validate(self) -> KVState:
        """Check the contents: finite live slots, degrees that are counts, ascending positions.

        Returns the state itself. Reads every element once, and on a GPU waits for the answer.

        Raises:
            NonFiniteError: a live key or value is NaN or infinite, or a degree is not a finite number >= 0.
            PositionOrderError: positions descend, or two live neighbours share one.
        """
        if not bool((torch.isfinite(self.degree) & (self.degree >= 0)).all()):
            raise NonFiniteError("degree must be finite and >= 0 (1 = raw token, 0 = empty slot)")
        live = self.live
        for name, tensor in (("keys", self.keys), ("values", self.values)):
            # Empty slots may hold anything, so what is suspicious is looked at again.
            if not all_finite(tensor):
                bad = (~torch.isfinite(tensor)).any(-1) & live
                if bool(bad.any()):
                    row, head, slot = bad.nonzero()[0].tolist()
                    raise NonFiniteError(
                        f"{name} hold NaN or infinity in {int(bad.sum())} live slots, first at row {row}, head {head}, "
                        f"slot {slot}; clustering them would spread it. Mask padding out (from_kv(mask=...)) or look "
                        "for an overflow upstream"
                    )
        step = self.positions.diff(dim=-1)
        both = live[..., 1:] & live[..., :-1]
        if bool(((step < 0) | (both & (step == 0))).any()):
            raise PositionOrderError(
                "positions must ascend along the slots, because the partition pairs neighbours; sort the slots first: "
                "state.select(state.positions.argsort(-1, stable=True))"
            )
        return self


SLOTS = ("keys", "values", "degree", "positions")
"""The tensors with an axis of slots that every state has."""


def gather_slots(data: Tensor, index: Tensor) -> Tensor:
    """``data [B, H, T, ...]`` at the slots ``index [B, H, m]``."""
    if data.ndim == 4 and data.shape[3] > 1:  # whole rows: copying them is several times faster than gathering numbers
        batch, heads, slots, size = data.shape
        begin = torch.arange(batch * heads, device=index.device).view(batch, heads, 1) * slots
        return data.reshape(-1, size).index_select(0, (index + begin).flatten()).view(*index.shape, size)
    trailing = data.shape[3:]
    return data.gather(2, index.reshape(*index.shape, *(1,) * len(trailing)).expand(*index.shape, *trailing))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type sums and scores are taken in: float32, or float64 for float64 storage."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_layout(state: KVState) -> None:
    keys, values, degree, positions = state.keys, state.values, state.degree, state.positions
    if keys.ndim != 4 or values.ndim != 4:
        raise ShapeError(f"keys and values must be [B, H, T, D], got {tuple(keys.shape)} and {tuple(values.shape)}")
    if keys.shape[:3] != values.shape[:3]:
        raise ShapeError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} must agree in B, H and T; "
            "pass KV heads, not the heads repeated for the queries"
        )
    for name, tensor in (("degree", degree), ("positions", positions)):
        if tensor.shape != keys.shape[:3]:
            raise ShapeError(f"{name} must be [B, H, T] = {tuple(keys.shape[:3])}, got {tuple(tensor.shape)}")
    for name, kind in (("keys", keys.dtype), ("values", values.dtype)):
        if kind not in FLOAT_DTYPES:
            raise DtypeError(f"{name} must be floating point ({', '.join(map(str, FLOAT_DTYPES))}), got {kind}")
    if degree.dtype != torch.float32:
        raise DtypeError(f"degree must be float32, got {degree.dtype}; half precision loses counts above 256 or 2048")
    if positions.dtype not in INTEGER_DTYPES:
        raise DtypeError(f"positions must be int32 or int64, got {positions.dtype}")
    if not keys.device == values.device == degree.device == positions.device:
        devices = sorted({str(tensor.device) for tensor in (keys, values, degree, positions)})
        raise DeviceError(f"a state lives on one device, got {devices}; move its tensors together")
    for name, data in state.slot_data.items():
        if data.shape[:3] != keys.shape[:3]:
            raise ShapeError(
                f"slot_data[{name!r}] must start with [B, H, T] = {tuple(keys.shape[:3])}, got {tuple(data.shape)}"
            )
    if strangers := state.slot_rules.keys() - state.slot_data.keys():
        raise ShapeError(f"slot_rules speak of {sorted(strangers)}, slot_data has {sorted(state.slot_data)}")
    for name, data in state.head_data.items():
        if data.shape[:2] != keys.shape[:2]:
            raise ShapeError(
                f"head_data[{name!r}] must start with [B, H] = {tuple(keys.shape[:2])}, got {tuple(data.shape)}"
            )
    if state.seen is not None and state.seen.shape != keys.shape[:1]:
        raise ShapeError(f"seen must be [B] = {tuple(keys.shape[:1])}, got {tuple(state.seen.shape)}")
