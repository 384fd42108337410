"""Merge, drop and compact in one kernel: every slot is read once, every slot that stays is written once."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from centroidkv.errors import BackendError, ShapeError
from centroidkv.kernels import INTERPRET, TYPES, KernelCase, check_slots, padded, require_triton, slots_like

# Triton's interpreter cuts float32 off when it stores bfloat16; GPUs round to nearest even, and so does `rounded`.
INTERPRETED = tl.constexpr(os.environ.get(INTERPRET) == "1")

ROWS = 8  # slots per program
SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)
# Differences are taken of quarters: exact, and a difference of two float32 numbers may be twice the largest of them.
QUARTER = tl.constexpr(0.25)
QUARTER_RANGE = tl.constexpr(torch.finfo(torch.float32).max / 4)


@triton.jit
def rounded(x, kind: tl.constexpr):
    """Float32 ``x`` in the storage type ``kind``, rounded to nearest even."""
    if INTERPRETED and kind == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(kind)


@triton.jit
def pulled(pull, row, member, weight, total, joins):
    """``pull`` + (n_t / N) (x_t - x_b) / 4 where a member x_t joins ``row`` x_b."""
    share = weight / tl.maximum(total, SMALLEST)
    apart = member.to(tl.float32) * QUARTER - row.to(tl.float32) * QUARTER
    # A row that nothing joins was read as zeros: they must not pull.
    return pull + tl.where(joins[:, None], share[:, None] * apart, 0.0)


@triton.jit
def settled(row, pull, changed):
    """x_b + 4 pull in the type of ``row`` x_b; x_b itself, to the bit, where nothing joined or only equal rows did."""
    mean = row.to(tl.float32) * QUARTER + pull
    mean = tl.minimum(tl.maximum(mean, -QUARTER_RANGE), QUARTER_RANGE)  # rounding may step over the largest number
    return tl.where(changed[:, None] & (pull != 0), rounded(mean / QUARTER, row.dtype), row)


@triton.jit
def _merge(
    keys, values, degree, positions, kept, order, start, end, keys_out, values_out, degree_out, positions_out,
    keys_b, keys_h, keys_t, keys_d, values_b, values_h, values_t, values_d, degree_b, degree_h, degree_t,
    positions_b, positions_h, positions_t, heads, slots, left, size, value_size, tiles,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # One program: ROWS slots that stay, of one (row, head). Members come in slot order, so sums have one order.
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    b, h = row // heads, row % heads
    keys += b * keys_b + h * keys_h
    values += b * values_b + h * values_h
    degree += b * degree_b + h * degree_h
    positions += b * positions_b + h * positions_h
    out = program % tiles * ROWS + tl.arange(0, ROWS)
    live = out < left
    out = row * left + out
    key_column, value_column = tl.arange(0, SIZE).to(tl.int64), tl.arange(0, VALUE_SIZE).to(tl.int64)
    key_live, value_live = (key_column < size)[None, :], (value_column < value_size)[None, :]

    own = tl.load(kept + out, mask=live, other=0).to(tl.int64)
    first, last = tl.load(start + out, mask=live, other=0), tl.load(end + out, mask=live, other=0)
    key_place = own[:, None] * keys_t + key_column[None, :] * keys_d
    value_place = own[:, None] * values_t + value_column[None, :] * values_d
    key = tl.load(keys + key_place, mask=live[:, None] & key_live, other=0.0)
    value = tl.load(values + value_place, mask=live[:, None] & value_live, other=0.0)
    total = tl.load(degree + own * degree_t, mask=live, other=0.0)
    key_pull = tl.zeros((ROWS, SIZE), tl.float32)
    value_pull = tl.zeros((ROWS, VALUE_SIZE), tl.float32)
    most = tl.max(last - first, 0)
    for step in range(0, most):  # the whole mass first: shares of it cannot overflow, masses times keys may
        place = first + step
        member = tl.load(order + row * slots + place, mask=live & (place < last), other=0).to(tl.int64)
        joins = live & (place < last) & (member != own)
        total += tl.load(degree + member * degree_t, mask=joins, other=0.0)
    for step in range(0, most):
        place = first + step
        member = tl.load(order + row * slots + place, mask=live & (place < last), other=0).to(tl.int64)
        joins = live & (place < last) & (member != own)
        weight = tl.load(degree + member * degree_t, mask=joins, other=0.0)
        key_place = member[:, None] * keys_t + key_column[None, :] * keys_d
        near = tl.load(keys + key_place, mask=joins[:, None] & key_live, other=0.0)
        key_pull = pulled(key_pull, key, near, weight, total, joins)
        value_place = member[:, None] * values_t + value_column[None, :] * values_d
        near = tl.load(values + value_place, mask=joins[:, None] & value_live, other=0.0)
        value_pull = pulled(value_pull, value, near, weight, total, joins)

    changed = last - first > 1
    place = out[:, None] * size + key_column[None, :]
    tl.store(keys_out + place, settled(key, key_pull, changed), mask=live[:, None] & key_live)
    place = out[:, None] * value_size + value_column[None, :]
    tl.store(values_out + place, settled(value, value_pull, changed), mask=live[:, None] & value_live)
    tl.store(degree_out + out, total, mask=live)
    tl.store(positions_out + out, tl.load(positions + own * positions_t, mask=live, other=0), mask=live)


def merge_triton(
    keys: Tensor, values: Tensor, degree: Tensor, positions: Tensor, joins: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """N = sum n_t, k_b + sum (n_t / N) (k_t - k_b), the same for values, over the slots t that join slot b.

    What ``DegreeWeightedMean`` and then ``compact`` make of an assignment: only slots that stay are left, in order of
    position. Sums are float32, in slot order and without atomics, so the same input gives the same bits; a slot that
    nothing joined comes out bit-identical.

    Args:
        keys: ``[B, H, T, D]``, bfloat16, float16 or float32, any strides, D <= 256.
        values: ``[B, H, T, Dv]``, likewise.
        degree: ``[B, H, T]`` float32.
        positions: ``[B, H, T]`` int32 or int64.
        joins: ``[B, H, T]`` int64, a valid ``Assignment.joins``: itself = stays, j = joins j, -1 = evicted.

    Returns:
        keys ``[B, H, M, D]``, values, degree, positions of the M slots of every head that stay.

    Raises:
        BackendError: Triton cannot run on this device, D or Dv > 256, or heads keep different numbers of slots.
        ShapeError, DtypeError: the tensors are not as above.
    """
    check_slots(keys, values, degree, positions)
    if joins.shape != keys.shape[:3] or joins.dtype != torch.int64:
        raise ShapeError(
            f"joins must be int64 [B, H, T] = {tuple(keys.shape[:3])}, got {joins.dtype} {tuple(joins.shape)}"
        )
    require_triton(keys.device)
    batch, heads, slots, size = keys.shape
    value_size = values.shape[-1]
    stays = joins == torch.arange(slots, device=joins.device)
    counts = stays.sum(-1)
    least, left = (int(counts.min()), int(counts.max())) if counts.numel() else (0, 0)
    if least != left:
        raise BackendError(
            f"the merge kernel writes the same number of slots for every head, here they keep {least} to {left}; "
            "call it head by head, or use backend='reference'"
        )
    out = slots_like(keys, values, degree, positions, left)
    if not out[2].numel():
        return out
    kept, order, start, end = _members(joins, stays, left)
    tiles = triton.cdiv(left, ROWS)
    with torch.cuda.device_of(keys):
        _merge[(batch * heads * tiles,)](
            keys, values, degree, positions, kept, order, start, end, *out,
            *keys.stride(), *values.stride(), *degree.stride(), *positions.stride(),
            heads, slots, left, size, value_size, tiles,
            SIZE=padded(size), VALUE_SIZE=padded(value_size), ROWS=ROWS, num_warps=4, num_stages=2,
        )  # fmt: skip
    return out


def _members(joins: Tensor, stays: Tensor, left: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each slot that stays, in order: itself, and where its members begin and end in ``order [B, H, T]``.

    ``order`` lists all slots by the slot they join, members of one in slot order, evicted ones first.
    """
    sorted_joins, order = joins.contiguous().sort(dim=-1, stable=True)
    kept = (~stays).byte().argsort(dim=-1, stable=True)[..., :left].contiguous()
    start, end = (torch.searchsorted(sorted_joins, kept, side=side) for side in ("left", "right"))
    return kept.int(), order.int(), start.int(), end.int()


def cases() -> list[KernelCase]:
    """The configurations that calls use."""
    numbers = dict.fromkeys(("heads", "slots", "left", "size", "value_size", "tiles"), "i32")
    strides = {name: "i64" for name in _merge.arg_names if name[-2:] in ("_b", "_h", "_t")}
    found = []
    for kind in TYPES.values():
        rows = dict.fromkeys(("keys", "values", "keys_out", "values_out"), f"*{kind}")
        lists = dict.fromkeys(("kept", "order", "start", "end"), "*i32")
        others = {"degree": "*fp32", "degree_out": "*fp32", "positions": "*i64", "positions_out": "*i64"}
        for size in (64, 96, 128, 256):
            constants = {
                "SIZE": padded(size),
                "VALUE_SIZE": padded(size),
                "ROWS": ROWS,
                **dict.fromkeys(("keys_d", "values_d", "degree_t", "positions_t"), 1),
            }
            found.append(
                KernelCase(f"merge d{size} {kind}", _merge, rows | lists | others | strides | numbers, constants)
            )
    return found
