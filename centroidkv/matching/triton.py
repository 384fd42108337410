"""The best target of every source in one kernel: similarities live in registers and are never written."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from centroidkv.errors import StageError
from centroidkv.kernels import INTERPRET, TYPES, KernelCase, check_rows, padded, require_triton

# Triton's interpreter multiplies the raw bits of bfloat16 operands, so there they are widened first: the same products,
# because a product of two 16-bit floats is exact in float32.
INTERPRETED = tl.constexpr(os.environ.get(INTERPRET) == "1")


@triton.jit
def power_of_two(largest):
    """The power of two that brings ``largest [n]`` into [1, 4).

    Scaling keys by it keeps every square inside float32, as dividing by the largest entry would, but is exact: scaled
    bfloat16 rows are bfloat16 rows again, and equal directions of different length stay equal.
    """
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(0x7F000000 - exponent, 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def inverse_root(square):
    """1 / sqrt(square), and 0 for 0: the cosine of a zero row is 0."""
    return tl.where(square > 0, 1 / tl.sqrt(tl.where(square > 0, square, 1.0)), 0.0)


@triton.jit
def unit_factors(rows):
    """For rows ``[n, D]``: their power of two, and 1 / norm of the rows scaled by it."""
    rows = rows.to(tl.float32)
    scale = power_of_two(tl.max(tl.abs(rows), 1))
    rows = rows * scale[:, None]
    return scale, inverse_root(tl.sum(rows * rows, 1))


@triton.jit
def scaled(rows, scale):
    """Rows times their power of two, in their own type."""
    return (rows.to(tl.float32) * scale[:, None]).to(rows.dtype)


@triton.jit
def product(a, b):
    """The product a @ b with float32 sums."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    # "ieee": float32 operands are not rounded to TF32, so that similarities are as precise as the reference's.
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def load_rows(base, slot, column, stride_t, stride_d, live, size):
    """``base [slot [n], column [m]]``; zeros where not ``live`` and in columns from ``size`` on."""
    place = slot.to(tl.int64)[:, None] * stride_t + column.to(tl.int64)[None, :] * stride_d
    return tl.load(base + place, mask=live[:, None] & (column < size)[None, :], other=0.0)


@triton.jit
def store_rows(base, rows, place, column, live, size):
    """``rows`` to the places ``[n]`` of a contiguous ``base [..., size]``, where ``live``."""
    where = place.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(base + where, rows, mask=live[:, None] & (column < size)[None, :])


@triton.jit
def _best_targets(
    keys, score, target, stride_b, stride_h, stride_t, stride_d, heads, slots, size, chunk, tiles, listed,
    SIZE: tl.constexpr, SLICE: tl.constexpr, SOURCES: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    # One program: a tile of the sources of one chunk of one (row, head), against all targets of that chunk.
    program = tl.program_id(0)
    tile = program % tiles
    chunks = tl.cdiv(slots, chunk)
    number = program // tiles % chunks
    row = program // tiles // chunks
    first = number * chunk
    length = tl.minimum(chunk, slots - first)
    targets = length // 2
    sources = tl.where(targets > 0, length - targets, 0)  # a lone last slot has no target and is not listed
    if tile * SOURCES < sources:
        base = keys + (row // heads).to(tl.int64) * stride_b + (row % heads).to(tl.int64) * stride_h
        base += first.to(tl.int64) * stride_t
        source = tile * SOURCES + tl.arange(0, SOURCES)
        column = tl.arange(0, SIZE)
        a = load_rows(base, 2 * source, column, stride_t, stride_d, source < sources, size)
        scale_a, inverse_a = unit_factors(a)
        a = scaled(a, scale_a)
        best = tl.full((SOURCES,), float("-inf"), tl.float32)
        which = tl.zeros((SOURCES,), tl.int32)
        for start in range(0, targets, TARGETS):
            place = start + tl.arange(0, TARGETS)
            b = load_rows(base, 2 * place + 1, column, stride_t, stride_d, place < targets, size)
            scale_b, inverse_b = unit_factors(b)
            if SLICE == SIZE:
                similarity = product(a, tl.trans(scaled(b, scale_b)))
            else:  # float32 products keep their operands in registers, which do not hold whole rows: from cache again
                similarity = tl.zeros((SOURCES, TARGETS), tl.float32)
                for left in range(0, SIZE, SLICE):
                    part = left + tl.arange(0, SLICE)
                    c = load_rows(base, 2 * source, part, stride_t, stride_d, source < sources, size)
                    d = load_rows(base, 2 * place + 1, part, stride_t, stride_d, place < targets, size)
                    similarity += product(scaled(c, scale_a), tl.trans(scaled(d, scale_b)))
            similarity *= inverse_b[None, :]
            similarity = tl.where((place < targets)[None, :], similarity, float("-inf"))
            top, at = tl.max(similarity, 1, return_indices=True, return_indices_tie_break_left=True)
            which = tl.where(top > best, start + at, which)  # an equal score found later does not replace the earlier
            best = tl.maximum(top, best)
        out = row.to(tl.int64) * listed + number * ((chunk + 1) // 2) + source
        tl.store(score + out, best * inverse_a, mask=source < sources)
        tl.store(target + out, (first + 2 * which + 1).to(tl.int64), mask=source < sources)


def best_targets_triton(keys: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """b*(a) = argmax_b cos(k_a, k_b) over the odd slots b of the chunk of every even slot a.

    What ``candidates.best_targets`` finds for ``Alternating(chunk)`` and ``Cosine()``: ties go to the earliest target,
    the cosine of a zero vector is 0, a lone last slot is not listed, sources are in slot order.

    Args:
        keys: ``[B, H, T, D]``, bfloat16, float16 or float32, finite, any strides, D <= 256.
        chunk: slots per chunk, >= 2; T or more for the whole sequence.

    Returns:
        ``score [B, H, S]`` float32 and ``target [B, H, S]`` int64 for the S sources that have a target.

    Raises:
        BackendError: Triton cannot run on this device, or D > 256.
        ShapeError, DtypeError, StageError: keys or chunk are not as above.

    O(T chunk D / 4) multiply-adds. Where a chunk has more sources than a tile, each tile reads its targets again.
    """
    check_rows(keys, "keys")
    if not isinstance(chunk, int) or chunk < 2:
        raise StageError(f"a chunk is a whole number of slots >= 2 (a source needs a target), got {chunk!r}")
    require_triton(keys.device)
    batch, heads, slots, size = keys.shape
    chunk = min(chunk, max(slots, 2))
    listed = slots // chunk * ((chunk + 1) // 2) + (slots % chunk + 1) // 2 - (slots % chunk == 1)
    score = torch.empty(batch, heads, listed, dtype=torch.float32, device=keys.device)
    target = torch.empty(batch, heads, listed, dtype=torch.int64, device=keys.device)
    if not score.numel():
        return score, target
    blocks, warps = _tiles(size, chunk, keys.dtype)
    tiles = triton.cdiv((chunk + 1) // 2, blocks["SOURCES"])
    grid = (batch * heads * triton.cdiv(slots, chunk) * tiles,)
    with torch.cuda.device_of(keys):
        _best_targets[grid](
            keys, score, target, *keys.stride(), heads, slots, size, chunk, tiles, listed,
            **blocks, num_warps=warps, num_stages=1,
        )  # fmt: skip
    return score, target


def _tiles(size: int, chunk: int, dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """Tile sizes and warps: as large as registers allow (``analysis/tools/compile_kernels.py`` shows them)."""
    wide, half = padded(size), padded((chunk + 1) // 2)
    if dtype == torch.float32:
        sources, targets, warps = 32, 32, 4
    elif wide <= 128:
        sources, targets, warps = 128, 64, 8
    else:
        sources, targets, warps = 64, 64, 8
    part = wide if dtype != torch.float32 else 64 if wide > 64 else min(wide, 32)
    return {"SIZE": wide, "SLICE": part, "SOURCES": min(sources, half), "TARGETS": min(targets, half)}, warps


def cases() -> list[KernelCase]:
    """The configurations that calls use with chunks of 256 or more."""
    numbers = dict.fromkeys(("heads", "slots", "size", "chunk", "tiles", "listed"), "i32")
    strides = dict.fromkeys(("stride_b", "stride_h", "stride_t"), "i64")
    found = []
    for dtype, kind in TYPES.items():
        signature = {"keys": f"*{kind}", "score": "*fp32", "target": "*i64"} | strides | numbers
        for size in (64, 96, 128, 256):
            blocks, warps = _tiles(size, 256, dtype)
            constants = {**blocks, "stride_d": 1}
            found.append(KernelCase(f"matching d{size} {kind}", _best_targets, signature, constants, warps, stages=1))
    return found
