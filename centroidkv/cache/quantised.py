"""Compressed keys and values in 8 or 4 bits, in groups that each have a lowest value and a step of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from centroidkv.cache.storage import Held, Storage, hold_rest, own, with_rest
from centroidkv.errors import NonFiniteError, ShapeError, StageError
from centroidkv.state import KVState, accumulation_dtype


@dataclass(frozen=True, eq=False)
class Codes:
    """Numbers ``[..., n]`` as codes q of ``bits`` bits: x' = low + step * q, with low and step per ``group`` numbers.

    low = min x, step = (max x - min x) / (2^bits - 1); q = round((x - low) / step). Groups are counted from
    the end of the last axis, so the first one may be shorter; what stands in front (padding) does not move the others.

    Args:
        codes: ``[..., ceil(n * bits / 8)]`` uint8; of 4 bits, two per byte, the earlier in the lower half.
        low: ``[..., ceil(n / group)]``, in the data type of the numbers, where a minimum is exact.
        step: likewise.
    """

    codes: Tensor
    low: Tensor
    step: Tensor
    length: int
    bits: int
    group: int

    @classmethod
    def encode(cls, x: Tensor, bits: int, group: int, live: Tensor | None = None, nested: bool = False) -> Codes:
        """Codes of ``x [..., n]``; numbers that are not ``live`` do not widen their group's range, and are lost.

        ``nested`` rounds steps up to powers of two and lows down to multiples of their step.

        Raises:
            NonFiniteError: a live number is NaN or infinite, or a group is wider than a quarter of float32.
        """
        levels, limits, acc = 2**bits - 1, torch.finfo(x.dtype), accumulation_dtype(x.dtype)
        length = x.shape[-1]
        live = torch.ones_like(x, dtype=torch.bool) if live is None else live.expand_as(x)
        blocks, live = _blocks(x, group), _blocks(live, group)
        empty = ~live.any(-1)
        low = blocks.masked_fill(~live, torch.inf).amin(-1).masked_fill(empty, 0)
        high = blocks.masked_fill(~live, -torch.inf).amax(-1).masked_fill(empty, 0)
        width = high.to(acc) - low.to(acc)
        most = torch.finfo(acc).max / 4  # so that no product below overflows
        if not bool((width <= most).all()):
            raise NonFiniteError(
                f"numbers to be held in {bits} bits must be finite and lie within {most:.3g} of the others in their "
                "group; got NaN, infinity or a wider group. Look for an overflow upstream, or store exactly"
            )
        smallest = limits.smallest_normal * limits.eps
        if nested:  # one code less for the data, because the low moves down by up to a step
            mantissa, exponent = torch.frexp(width / (levels - 1))
            step = torch.ldexp(torch.ones_like(width), exponent - (mantissa == 0.5).int()).clamp(min=smallest)
            step = step.masked_fill(width == 0, 0).to(x.dtype)
            # Exact in every type: a multiple of a larger power of two than the minimum has, or the minimum itself.
            whole = step.to(acc).masked_fill(step == 0, 1)
            multiple = ((low.to(acc) / whole).floor() * whole).clamp(min=-limits.max)
            low = torch.where(step == 0, low, multiple.to(x.dtype))
        else:  # to nearest: rounding up would widen the range a little at every event
            step = (width / levels).to(x.dtype).clamp(min=smallest).masked_fill(width == 0, 0)
        scale = step.to(acc).masked_fill(step == 0, 1)[..., None]
        code = ((blocks.to(acc) - low.to(acc)[..., None]) / scale).round().clamp(0, levels)
        code = code.masked_fill(~live, 0).to(torch.uint8).flatten(-2)[..., blocks.shape[-2] * group - length :]
        if bits == 4:
            even = pad(code, (0, length % 2))
            code = even[..., 0::2] | (even[..., 1::2] << 4)
        return cls(own(code), low, step, length, bits, group)

    def decode(self) -> Tensor:
        """The numbers x' ``[..., n]`` in their data type; computed in float32 (float64 for float64)."""
        dtype, acc, codes = self.low.dtype, accumulation_dtype(self.low.dtype), self.codes
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., : self.length]
        x = _blocks(codes, self.group).to(acc)
        x.mul_(self.step.to(acc)[..., None]).add_(self.low.to(acc)[..., None])
        # The step was rounded, so the last code may lie beyond the largest number of the type.
        limit = torch.finfo(dtype).max
        return x.clamp_(-limit, limit).to(dtype).flatten(-2)[..., self.low.shape[-1] * self.group - self.length :]

    def bound(self) -> Tensor:
        """The largest |x - x'| ``[..., n]``: step / 2, and what arithmetic in this data type rounds away."""
        limits = torch.finfo(self.low.dtype)
        low, step = self.low.double().abs(), self.step.double()
        rounding = limits.eps * (low + (2**self.bits - 1) * step) + limits.smallest_normal * limits.eps * 2**self.bits
        each = step / 2 + 5 * rounding
        return each.repeat_interleave(self.group, -1)[..., each.shape[-1] * self.group - self.length :]


def _blocks(x: Tensor, group: int) -> Tensor:
    """``x [..., n]`` as ``[..., ceil(n / group), group]``, filled up in front."""
    groups = -(-x.shape[-1] // group)
    return pad(x, (groups * group - x.shape[-1], 0)).unflatten(-1, (groups, group))


@dataclass(frozen=True, eq=False)
class QuantisedState:
    """A KVState whose keys and values are codes; degrees, positions and the rest are as they were.

    Args:
        keys: codes of ``[B, H, D, T]``: groups of neighbouring slots of one channel.
        values: codes of ``[B, H, T, Dv]``: groups of neighbouring channels of one slot.
        rest: the state without its keys and values (zero channels).
    """

    keys: Codes
    values: Codes
    rest: KVState

    @property
    def nbytes(self) -> int:
        """Bytes of codes, lows and steps, degrees and positions."""
        parts = (self.keys, self.values)
        return self.rest.nbytes + sum(p.codes.nbytes + p.low.nbytes + p.step.nbytes for p in parts)

    def dequantise(self) -> KVState:
        """The state to attend to. Empty slots hold numbers without a meaning."""
        return replace(self.rest, keys=self.keys.decode().mT, values=self.values.decode())

    def error_bound(self) -> tuple[Tensor, Tensor]:
        """The largest error of each key ``[B, H, T, D]`` and value ``[B, H, T, Dv]`` of a live slot; float64."""
        return self.keys.bound().mT, self.values.bound()


def quantise(state: KVState, bits: int = 8, group: int = 32, nested: bool = False) -> QuantisedState:
    """Hold keys and values in ``bits`` bits per number, with a lowest value and a step per ``group`` numbers.

    x' = low + step * round((x - low) / step), step = (max - min) / (2^bits - 1), so |x - x'| <= step / 2 up to rounding
    (:meth:`QuantisedState.error_bound` has the exact bound). Keys are grouped per channel, because a few channels are
    much larger than the others and would coarsen every group they share; values per token, because attention mixes
    whole tokens and so the error stays within the tokens attended to. The range is asymmetric (a low, not a zero in
    its middle), because the large key channels lie far from zero, where half of a symmetric range would be empty.

    Bits per number, low and step included: bits + 2 * (bits of the data type) / group; 9 or 5 for bfloat16 and 32.

    Args:
        state: any KVState. Empty slots are not looked at.
        bits: 8 or 4; of 4, two are packed in a byte.
        group: how many neighbouring slots (keys) or channels (values) share low and step; the first group of a row or
            slot may be shorter.
        nested: steps are powers of two and lows multiples of them, up to twice as coarse; then numbers that were
            quantised before lie on every finer or equal grid, and quantising them again changes nothing.

    Raises:
        StageError: other bits, or a group below 2.
        NonFiniteError: a live key or value is NaN or infinite, or a group is wider than its data type.

    Source: Liu et al., *KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache*, arXiv 2402.02750.

    >>> state = KVState.from_kv(torch.randn(1, 2, 64, 32), torch.randn(1, 2, 64, 32))
    >>> small = quantise(state, bits=4)
    >>> small.keys.codes.nbytes, state.keys.nbytes, small.dequantise()
    (2048, 16384, KVState(B=1, H=2, T=64, D=32, float32 on cpu, rounds=0))
    >>> bool(((small.dequantise().keys - state.keys).abs() <= small.error_bound()[0]).all())
    True
    """
    if bits not in (4, 8):
        raise StageError(f"keys and values are held in 4 or 8 bits, asked for {bits!r}")
    if not isinstance(group, int) or group < 2:
        raise StageError(f"group is a whole number >= 2 of numbers that share a step, got {group!r}")
    live = state.live
    return QuantisedState(
        keys=Codes.encode(state.keys.mT, bits, group, live[:, :, None], nested),
        values=Codes.encode(state.values, bits, group, live[..., None], nested),
        rest=replace(state, keys=state.keys[..., :0].clone(), values=state.values[..., :0].clone()),
    )


@dataclass(frozen=True)
class Quantised(Storage):
    """Holds what was compressed in 8 or 4 bits between steps (:func:`quantise`); attention sees it dequantised.

    At an event everything is dequantised, compressed and quantised again, slots that did not merge included. Values
    keep their groups and hardly move; keys get new neighbours and are rounded anew, so preserved slots are equal to
    what they were up to quantisation, not bit by bit, and their error grows: about twofold over 20 events. With
    ``nested`` it hardly does, from twice as much (docs/transformers.md has the figures).

    Args:
        bits, group, nested: as :func:`quantise` has them.

    >>> Quantised(bits=4)
    Quantised(bits=4, group=32, nested=False)
    """

    bits: int = 8
    group: int = 32
    nested: bool = False

    def __post_init__(self) -> None:
        empty = torch.zeros(1, 1, 0, 1, device="cpu")
        quantise(KVState.from_kv(empty, empty), self.bits, self.group, self.nested)  # refuses bad settings now

    def put(self, state: KVState) -> Held:
        small = quantise(state, self.bits, self.group, self.nested)
        tensors: dict[str, Tensor] = {}
        for name, codes in (("keys", small.keys), ("values", small.values)):
            tensors |= {f"{name}.codes": codes.codes, f"{name}.low": codes.low, f"{name}.step": codes.step}
        return hold_rest(state, {"slots": state.slots, "channels": state.values.shape[-1]}, **tensors)

    def get(self, held: Held, device: torch.device) -> KVState:
        def numbers(name: str, length: int) -> Tensor:
            codes, low, step = (held.tensors[f"{name}.{part}"] for part in ("codes", "low", "step"))
            sizes, wanted = (codes.shape[-1], low.shape[-1]), (-(-length * self.bits // 8), -(-length // self.group))
            # Said here, because padding and broadcasting would make numbers of anything.
            if sizes != wanted or (low.shape, low.dtype) != (step.shape, step.dtype) or codes.dtype != torch.uint8:
                raise ShapeError(f"{name} of {length} numbers are {wanted} codes and groups, got {sizes}")
            return Codes(codes, low, step, length, self.bits, self.group).decode()

        return with_rest(
            held, keys=numbers("keys", held.facts["slots"]).mT, values=numbers("values", held.facts["channels"])
        )
