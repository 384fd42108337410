"""A whole round in one kernel: one program per chunk reads its keys and values and writes what is left of them.

Every value is read once. A key is read to be compared and again to be merged, the second time from cache: a chunk of
256 keys of 128 bfloat16 numbers is 64 KiB.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from centroidkv.aggregate.triton import pulled, settled
from centroidkv.errors import BackendError, StageError
from centroidkv.kernels import TYPES, KernelCase, check_slots, padded, require_triton, slots_like
from centroidkv.matching.triton import (
    inverse_root,
    load_rows,
    power_of_two,
    product,
    scaled,
    store_rows,
    unit_factors,
)

LARGEST_CHUNK = 256


@triton.jit
def _unit_factors_by_parts(base, slot, stride_t, stride_d, live, size, ROWS: tl.constexpr, PART: tl.constexpr):
    """:func:`unit_factors` of rows that are too large for registers, read twice, from cache the second time."""
    largest = tl.zeros((ROWS,), tl.float32)
    for edge in range(0, size, PART):
        part = load_rows(base, slot, edge + tl.arange(0, PART), stride_t, stride_d, live, size).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(part), 1))
    scale = power_of_two(largest)
    square = tl.zeros((ROWS,), tl.float32)
    for edge in range(0, size, PART):
        part = load_rows(base, slot, edge + tl.arange(0, PART), stride_t, stride_d, live, size).to(tl.float32)
        part = part * scale[:, None]
        square += tl.sum(part * part, 1)
    return scale, inverse_root(square)


@triton.jit
def _copy_rows(rows, out, slot, place, stride_t, stride_d, live, size, PART: tl.constexpr):
    for edge in range(0, size, PART):
        column = edge + tl.arange(0, PART)
        part = load_rows(rows, slot, column, stride_t, stride_d, live, size)
        store_rows(out, part, place, column, live, size)


@triton.jit
def _round(
    keys, values, degree, positions, starts, keys_out, values_out, degree_out, positions_out,
    keys_b, keys_h, keys_t, keys_d, values_b, values_h, values_t, values_d, degree_b, degree_h, degree_t,
    positions_b, positions_h, positions_t, heads, slots, left, size, value_size, chunk, chunks,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, SLICE: tl.constexpr, PART: tl.constexpr,
    HALF: tl.constexpr, TARGETS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # One program: one chunk of one (row, head). Source i is slot 2i of the chunk, target i is slot 2i + 1.
    program = tl.program_id(0)
    number = program % chunks
    row = (program // chunks).to(tl.int64)
    first = number * chunk
    length = tl.minimum(chunk, slots - first)
    b, h = row // heads, row % heads
    keys += b * keys_b + h * keys_h + first.to(tl.int64) * keys_t
    values += b * values_b + h * values_h + first.to(tl.int64) * values_t
    degree += b * degree_b + h * degree_h + first.to(tl.int64) * degree_t
    positions += b * positions_b + h * positions_h + first.to(tl.int64) * positions_t
    start = tl.load(starts + number)
    quota = length - (tl.load(starts + number + 1) - start)

    # Match: the best target of every source, ties to the earliest.
    index = tl.arange(0, HALF)
    source = 2 * index
    is_source = source < length
    column = tl.arange(0, SIZE)
    if SLICE == SIZE:
        a = load_rows(keys, source, column, keys_t, keys_d, is_source, size)
        scale_a, inverse_a = unit_factors(a)
        a = scaled(a, scale_a)
    else:
        scale_a, inverse_a = _unit_factors_by_parts(keys, source, keys_t, keys_d, is_source, size, HALF, SLICE)
    best = tl.full((HALF,), float("-inf"), tl.float32)
    which = tl.zeros((HALF,), tl.int32)
    for begin in range(0, length // 2, TARGETS):
        slot = 2 * (begin + tl.arange(0, TARGETS)) + 1
        if SLICE == SIZE:
            c = load_rows(keys, slot, column, keys_t, keys_d, slot < length, size)
            scale_c, inverse_c = unit_factors(c)
            similarity = product(a, tl.trans(scaled(c, scale_c)))
        else:
            scale_c, inverse_c = _unit_factors_by_parts(keys, slot, keys_t, keys_d, slot < length, size, TARGETS, SLICE)
            similarity = tl.zeros((HALF, TARGETS), tl.float32)
            for edge in range(0, size, SLICE):
                part = edge + tl.arange(0, SLICE)
                a = scaled(load_rows(keys, source, part, keys_t, keys_d, is_source, size), scale_a)
                c = scaled(load_rows(keys, slot, part, keys_t, keys_d, slot < length, size), scale_c)
                similarity += product(a, tl.trans(c))
        similarity = tl.where((slot < length)[None, :], similarity * inverse_c[None, :], float("-inf"))
        top, at = tl.max(similarity, 1, return_indices=True, return_indices_tie_break_left=True)
        which = tl.where(top > best, begin + at, which)
        best = tl.maximum(top, best)
    score = tl.where(is_source & (length > 1), tl.where(length > 1, best, 0.0) * inverse_a, float("-inf"))

    # Rank: a source leaves if fewer than `quota` sources of its chunk are better, or equal and earlier.
    better = (score[None, :] > score[:, None]) | (
        (score[None, :] == score[:, None]) & (index[None, :] < index[:, None])
    )
    leaves = (is_source & (tl.sum(better.to(tl.int32), 1) < quota)).to(tl.int32)

    # Place: what stays keeps its order, so a slot moves up by the sources before it that left.
    out = row * left + start
    stays = is_source & (leaves == 0)
    place = source - tl.cumsum(leaves, 0)
    keys_out += out * size
    values_out += out * value_size
    _copy_rows(keys, keys_out, source, place, keys_t, keys_d, stays, size, PART)
    _copy_rows(values, values_out, source, place, values_t, values_d, stays, value_size, PART)
    source = source.to(tl.int64)
    kept = out + place
    tl.store(degree_out + kept, tl.load(degree + source * degree_t, mask=stays, other=0.0), mask=stays)
    tl.store(positions_out + kept, tl.load(positions + source * positions_t, mask=stays, other=0), mask=stays)

    # Merge: the members of each target in order.
    joins = tl.where(leaves > 0, which, -1)
    weights = tl.load(degree + 2 * index.to(tl.int64) * degree_t, mask=is_source, other=0.0)
    value_column = tl.arange(0, VALUE_SIZE)
    for begin in range(0, length // 2, ROWS):
        mine = begin + tl.arange(0, ROWS)
        slot = 2 * mine + 1
        live = slot < length
        key = load_rows(keys, slot, column, keys_t, keys_d, live, size)
        value = load_rows(values, slot, value_column, values_t, values_d, live, value_size)
        total = tl.load(degree + slot.to(tl.int64) * degree_t, mask=live, other=0.0)
        position = tl.load(positions + slot.to(tl.int64) * positions_t, mask=live, other=0)
        joined = joins[None, :] == mine[:, None]
        count = tl.sum(joined.to(tl.int32), 1)
        total += tl.sum(tl.where(joined, weights[None, :], 0.0), 1)  # first: shares of it cannot overflow
        key_pull = tl.zeros((ROWS, SIZE), tl.float32)
        value_pull = tl.zeros((ROWS, VALUE_SIZE), tl.float32)
        member = tl.full((ROWS,), -1, tl.int32)
        for _ in range(0, tl.max(count, 0)):
            member = tl.min(tl.where(joined & (index[None, :] > member[:, None]), index[None, :], HALF), 1)
            found = member < HALF
            near = load_rows(keys, 2 * member, column, keys_t, keys_d, found, size)
            value_near = load_rows(values, 2 * member, value_column, values_t, values_d, found, value_size)
            weight = tl.load(degree + 2 * member.to(tl.int64) * degree_t, mask=found, other=0.0)
            key_pull = pulled(key_pull, key, near, weight, total, found)
            value_pull = pulled(value_pull, value, value_near, weight, total, found)
        before = tl.sum(((joins[None, :] >= 0) & (index[None, :] <= mine[:, None])).to(tl.int32), 1)
        merged = slot - before
        store_rows(keys_out, settled(key, key_pull, count > 0), merged, column, live, size)
        store_rows(values_out, settled(value, value_pull, count > 0), merged, value_column, live, value_size)
        tl.store(degree_out + out + merged, total, mask=live)
        tl.store(positions_out + out + merged, position, mask=live)


def fused_round_triton(
    keys: Tensor, values: Tensor, degree: Tensor, positions: Tensor, chunk: int, quotas: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One round of alternation, cosine, soft matching ranked within chunks, and degree-weighted mean.

    What ``Alternating(chunk)``, ``Cosine()``, ``BipartiteSoftMatching(rank="chunk")`` and ``DegreeWeightedMean()`` make
    of a state without empty slots: in every chunk the ``quota`` sources of highest similarity join their best target,
    k_b becomes k_b + sum (n_t / N) (k_t - k_b), and what stays comes out in order. Ties go to the earliest source and
    target; slots that nothing joined are bit-identical; the same input gives the same bits.

    Args:
        keys: ``[B, H, T, D]``, bfloat16, float16 or float32, finite, any strides, D <= 256.
        values: ``[B, H, T, Dv]``, likewise.
        degree: ``[B, H, T]`` float32, >= 1.
        positions: ``[B, H, T]`` int32 or int64.
        chunk: slots per chunk, 2 to 256.
        quotas: how many sources leave each chunk, for every chunk that has a target (``bipartite.share_out``).

    Returns:
        keys ``[B, H, T - sum(quotas), D]``, values, degree, positions.

    Raises:
        BackendError: Triton cannot run on this device, chunk > 256, or D or Dv > 256.
        StageError: quotas do not fit the chunks, or chunk < 2.
        ShapeError, DtypeError: the tensors are not as above.
    """
    check_slots(keys, values, degree, positions)
    starts = _starts(keys.shape[2], chunk, quotas)
    require_triton(keys.device)
    batch, heads, slots, size = keys.shape
    value_size, left = values.shape[-1], starts[-1]
    out = slots_like(keys, values, degree, positions, left)
    if not out[2].numel():
        return out
    chunks = len(starts) - 1
    blocks, warps = _tiles(size, value_size, min(chunk, slots), keys.dtype)
    with torch.cuda.device_of(keys):
        _round[(batch * heads * chunks,)](
            keys, values, degree, positions, torch.tensor(starts, dtype=torch.int32, device=keys.device), *out,
            *keys.stride(), *values.stride(), *degree.stride(), *positions.stride(),
            heads, slots, left, size, value_size, chunk, chunks, **blocks, num_warps=warps, num_stages=1,
        )  # fmt: skip
    return out


def _starts(slots: int, chunk: int, quotas: list[int]) -> list[int]:
    """Where the slots of each chunk begin in the result, and its length at the end."""
    if not isinstance(chunk, int) or chunk < 2:
        raise StageError(f"a chunk is a whole number of slots >= 2 (a source needs a target), got {chunk!r}")
    if chunk > LARGEST_CHUNK:
        raise BackendError(
            f"the fused round holds chunks of up to {LARGEST_CHUNK} slots, got {chunk}; use best_targets_triton and "
            "merge_triton, which take any"
        )
    lengths = [min(chunk, slots - first) for first in range(0, slots, chunk)]
    paired = [length for length in lengths if length > 1]
    if len(quotas) != len(paired) or any(
        not 0 <= quota <= (length + 1) // 2 for quota, length in zip(quotas, paired, strict=False)
    ):
        raise StageError(
            f"quotas give each of {len(paired)} chunks 0 to half of its slots (the odd one rounded up), got {quotas}"
        )
    quotas = quotas + [0] * (len(lengths) - len(paired))  # a lone last slot has no target
    left = [length - quota for length, quota in zip(lengths, quotas, strict=True)]
    return list(itertools.accumulate(left, initial=0))


def _tiles(size: int, value_size: int, chunk: int, dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """Tile sizes and warps: as large as registers allow (``analysis/tools/compile_kernels.py`` shows them)."""
    wide, value_wide, half = padded(size), padded(value_size), padded((chunk + 1) // 2)
    exact = dtype == torch.float32
    if wide <= 64:
        targets, rows, share = (32 if exact else 64), 32, 16
    elif wide <= 128 or exact:
        targets, rows, share = 32, 16, 8
    else:
        targets, rows, share = 64, 16, 16
    blocks = {
        "SIZE": wide, "VALUE_SIZE": value_wide, "SLICE": min(wide, 32) if exact or wide > 128 else wide, "PART": 64,
        "HALF": half, "TARGETS": min(half, targets), "ROWS": min(half, rows),
    }  # fmt: skip
    return blocks, max(half // share, 1)


def cases() -> list[KernelCase]:
    """The configurations that calls use with chunks of 256."""
    numbers = dict.fromkeys(("heads", "slots", "left", "size", "value_size", "chunk", "chunks"), "i32")
    strides = {name: "i64" for name in _round.arg_names if name[-2:] in ("_b", "_h", "_t")}
    found = []
    for dtype, kind in TYPES.items():
        rows = dict.fromkeys(("keys", "values", "keys_out", "values_out"), f"*{kind}")
        others = {"degree": "*fp32", "degree_out": "*fp32", "positions": "*i64", "positions_out": "*i64"}
        signature = rows | others | {"starts": "*i32"} | strides | numbers
        for size in (64, 96, 128, 256):
            blocks, warps = _tiles(size, size, 256, dtype)
            constants = {**blocks, **dict.fromkeys(("keys_d", "values_d", "degree_t", "positions_t"), 1)}
            found.append(KernelCase(f"round d{size} {kind}", _round, signature, constants, warps, stages=1))
    return found
