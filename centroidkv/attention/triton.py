"""Attention over clusters as Triton kernels: the slots are split over programs, and a second kernel joins the splits.

One query has too little work for one program, but its cache may be long. Each program reads one stretch of slots for
all queries that share a KV head (G grouped heads times L tokens, so that every key is read once), keeps softmax sums in
float32, and stores a normalised partial output with its log-sum. The second kernel weighs the partial outputs in a
fixed order: no atomics, so equal inputs give equal bits on one device.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from centroidkv.attention.limits import require_kernel
from centroidkv.kernels import TYPES, KernelCase, padded

LOG2_E = math.log2(math.e)
MOST_SPLITS = 128
JOINED_AT_ONCE = 16
FEWEST_SLOTS = 128
"""Slots per program: below this, starting a program and joining its result cost more than they save."""
UNITS_OFF_GPU = 132
"""Multiprocessors assumed by the interpreter: those of an H100."""


@dataclass(frozen=True)
class Tiles:
    """Query rows and slots per step of a program, and how it is scheduled."""

    rows: int
    slots: int
    warps: int
    stages: int


def choose_tiles(rows: int, size: int, value_size: int, dtype: torch.dtype) -> Tiles:
    """The tiles of a call with ``rows`` query rows per KV head.

    The largest that spill no registers on sm_90 even where strides and addresses are unaligned, so that every element
    needs an address of its own (``cases`` compiles these).
    """
    widest = padded(max(size, value_size))
    if dtype == torch.float32:  # multiplied without tensor cores, and twice the bytes
        return Tiles(16, 32 if widest <= 64 else 16, 4 if widest <= 128 else 8, 2)
    return Tiles(16 if rows <= 16 else 32, 64 if widest <= 128 else 32, 4 if widest <= 64 else 8, 2)


@triton.jit
def product(a, b, WIDEN: tl.constexpr):
    """The matrix product in float32. WIDEN: Triton's interpreter multiplies bfloat16 numbers by their bit patterns."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def absorb(logits, values, peak, total, out, WIDEN: tl.constexpr):
    """One step of softmax in base 2: what has been summed so far, and one more tile of logits and values."""
    higher = tl.maximum(peak, tl.max(logits, 1))
    # A row that has seen no live slot has peak -inf, and -inf - -inf is NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(logits - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, 1)
    out = out * shrink[:, None] + product(weights.to(values.dtype), values, WIDEN)
    return higher, total, out


@triton.jit
def store(out, lse, at, live, peak, total, sums, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Normalised rows to ``out [..., Dv]`` and their log-sums to ``lse``; zeros and -inf where nothing was seen."""
    seen = total > 0
    safe = tl.where(seen, total, 1.0)
    d = tl.arange(0, BLOCK_DV)
    where = at[:, None] * DV + d[None, :]
    tl.store(out + where, (sums / safe[:, None]).to(out.dtype.element_ty), mask=live[:, None] & (d < DV)[None, :])
    tl.store(lse + at, tl.where(seen, peak + tl.log2(safe), float("-inf")), mask=live)


@triton.jit(do_not_specialize=["n_b", "n_h", "length", "slots", "stretch", "splits"])
def split_kernel(
    query, keys, values, degree, out, lse, scale,
    q_b, q_h, q_l, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, n_b, n_h, n_t,
    heads, groups, length, slots, stretch, splits,
    D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Rows of one KV head over one stretch of slots: out [B, H, G * L, splits, Dv], lse [B, H, G * L, splits]."""
    rows = groups * length
    tiles = tl.cdiv(rows, BLOCK_R)
    pair = tl.program_id(0) // tiles
    split = tl.program_id(1)
    # Offsets into a cache pass 2^31 elements.
    b = (pair // heads).to(tl.int64)
    h = (pair % heads).to(tl.int64)
    row = (tl.program_id(0) % tiles) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = row % length
    live = row < rows
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    e = tl.arange(0, BLOCK_DV).to(tl.int64)
    at = b * q_b + (h * groups + row // length) * q_h + token.to(tl.int64) * q_l
    q = tl.load(query + at[:, None] + d[None, :] * q_d, mask=live[:, None] & (d < D)[None, :], other=0.0)
    keys += b * k_b + h * k_h
    values += b * v_b + h * v_h
    degree += b * n_b + h * n_h

    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    sums = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    end = tl.minimum((split + 1) * stretch, slots)
    for start in range(split * stretch, end, BLOCK_T):
        slot = start + tl.arange(0, BLOCK_T)
        inside = slot < end
        t = slot.to(tl.int64)
        k = tl.load(keys + t[None, :] * k_t + d[:, None] * k_d, mask=inside[None, :] & (d < D)[:, None], other=0.0)
        n = tl.load(degree + t * n_t, mask=inside, other=0.0).to(tl.float32)
        bias = tl.where(n == 0, float("-inf"), tl.log2(tl.where(n == 0, 1.0, n)))
        logits = product(q, k, WIDEN) * scale + bias[None, :]
        if CAUSAL:
            logits = tl.where(slot[None, :] <= (slots - length + token)[:, None], logits, float("-inf"))
        v = tl.load(values + t[:, None] * v_t + e[None, :] * v_d, mask=inside[:, None] & (e < DV)[None, :], other=0.0)
        peak, total, sums = absorb(logits, v, peak, total, sums, WIDEN)

    place = (pair.to(tl.int64) * rows + row) * splits + split
    store(out, lse, place, live, peak, total, sums, DV, BLOCK_DV)


@triton.jit(do_not_specialize=["splits"])
def join_kernel(
    parts, lse, out, splits, DV: tl.constexpr, BLOCK_S: tl.constexpr, STEP: tl.constexpr, BLOCK_DV: tl.constexpr
):
    """One row of out [rows, Dv]: the partial outputs [rows, splits, Dv], weighted by their share of the sum."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    peak = tl.max(tl.load(lse + row * splits + s, mask=s < splits, other=float("-inf")), 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(tl.load(lse + row * splits + s, mask=s < splits, other=float("-inf")) - base), 0)
    e = tl.arange(0, BLOCK_DV)
    sums = tl.zeros([BLOCK_DV], tl.float32)
    for first in range(0, splits, STEP):
        part = first + tl.arange(0, STEP)
        share = tl.exp2(tl.load(lse + row * splits + part, mask=part < splits, other=float("-inf")) - base)
        where = (row * splits + part)[:, None] * DV + e[None, :]
        sums += tl.sum(
            share[:, None] * tl.load(parts + where, mask=(part < splits)[:, None] & (e < DV)[None, :], other=0.0), 0
        )
    sums = sums / tl.where(total > 0, total, 1.0)
    tl.store(out + row * DV + e, sums.to(out.dtype.element_ty), mask=e < DV)


def widen(dtype: torch.dtype) -> bool:
    """Whether ``product`` must convert its factors first."""
    return dtype == torch.bfloat16 and not isinstance(split_kernel, triton.JITFunction)


def choose_splits(programs: int, slots: int, device: torch.device) -> int:
    """How many stretches the slots are split into, so that ``programs`` times that keep the device busy."""
    units = UNITS_OFF_GPU
    if device.type == "cuda":
        units = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = triton.cdiv(4 * units, programs)
    return max(1, min(wanted, triton.cdiv(slots, FEWEST_SLOTS), MOST_SPLITS))


def scratch(out: Tensor, rows: int, splits: int) -> tuple[Tensor, Tensor]:
    """Where splits leave outputs and log-sums; a single split writes to ``out`` itself."""
    lse = torch.empty(rows, splits, dtype=torch.float32, device=out.device)
    if splits == 1:
        return out, lse
    return torch.empty(rows, splits, out.shape[-1], dtype=torch.float32, device=out.device), lse


def join(parts: Tensor, lse: Tensor, out: Tensor) -> None:
    """Fill ``out [..., Dv]`` from the parts of every row."""
    rows, splits = lse.shape
    if splits > 1:
        size = out.shape[-1]
        join_kernel[(rows,)](parts, lse, out, splits, size, MOST_SPLITS, JOINED_AT_ONCE, padded(size), num_warps=4)


def degree_attention_triton(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    degree: Tensor,
    scale: float,
    causal: bool,
    tiles: Tiles | None = None,
    splits: int | None = None,
) -> Tensor:
    """The same sum on a GPU; see degree_attention.

    Args:
        query: ``[B, Hq, L, D]``, any strides; meant for small L, right for all.
        keys: ``[B, H, T, D]``, D <= 256, any strides.
        values: ``[B, H, T, Dv]``, Dv <= 256, any strides.
        degree: ``[B, H, T]``.
        scale: factor on q.k.
        causal: whether query i of L stops at slot T - L + i.
        tiles: tile sizes instead of :func:`choose_tiles`'.
        splits: at most so many stretches (1 to 128) instead of :func:`choose_splits`'; the last bits depend on it.

    Raises:
        BackendError, DtypeError, ShapeError: see :func:`~centroidkv.attention.limits.require_kernel`.
    """
    require_kernel(query, keys, values)
    batch, query_heads, length, size = query.shape
    heads, slots, value_size = keys.shape[1], keys.shape[2], values.shape[3]
    groups = query_heads // heads
    tiles = choose_tiles(groups * length, size, value_size, query.dtype) if tiles is None else tiles
    programs = batch * heads * triton.cdiv(groups * length, tiles.rows)
    splits = choose_splits(programs, slots, query.device) if splits is None else splits
    stretch = triton.cdiv(triton.cdiv(slots, splits), tiles.slots) * tiles.slots
    splits = triton.cdiv(slots, stretch)
    out = torch.empty(batch, query_heads, length, value_size, dtype=query.dtype, device=query.device)
    parts, lse = scratch(out, batch * query_heads * length, splits)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        split_kernel[(programs, splits)](
            query, keys, values, degree, parts, lse, scale * LOG2_E,
            *query.stride(), *keys.stride(), *values.stride(), *degree.stride(),
            heads, groups, length, slots, stretch, splits,
            size, value_size, causal and length > 1, widen(query.dtype),
            tiles.rows, tiles.slots, padded(size), padded(value_size),
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        join(parts, lse, out)
    return out


def cases() -> list[KernelCase]:
    """The kernels in the configurations that calls use, one token (4 grouped heads) and eight appended ones."""
    strides = [f"{name}_{axis}" for name, axes in (("q", "bhl"), ("k", "bht"), ("v", "bht")) for axis in axes]
    sizes = ["n_b", "n_h", "heads", "groups", "length", "slots", "stretch", "splits"]
    found = []
    for size, (dtype, kind), length in itertools.product((64, 96, 128, 256), TYPES.items(), (1, 8)):
        tiles = choose_tiles(4 * length, size, size, dtype)
        found.append(
            KernelCase(
                name=f"attention split d{size} {kind} {length} token{'s' * (length > 1)}",
                kernel=split_kernel,
                signature=dict.fromkeys(("query", "keys", "values"), f"*{kind}")
                | dict.fromkeys(("degree", "out", "lse"), "*fp32")
                | {"scale": "fp32"}
                | dict.fromkeys(strides + sizes, "i32"),
                constants={"q_d": 1, "k_d": 1, "v_d": 1, "n_t": 1, "D": size, "DV": size, "CAUSAL": length > 1}
                | {"WIDEN": False, "BLOCK_R": tiles.rows, "BLOCK_T": tiles.slots}
                | {"BLOCK_D": padded(size), "BLOCK_DV": padded(size)},
                warps=tiles.warps,
                stages=tiles.stages,
            )
        )
    for size, kind in itertools.product((64, 96, 128, 256), TYPES.values()):
        found.append(
            KernelCase(
                name=f"attention join d{size} {kind}",
                kernel=join_kernel,
                signature={"parts": "*fp32", "lse": "*fp32", "out": f"*{kind}", "splits": "i32"},
                constants={"DV": size, "BLOCK_S": MOST_SPLITS, "STEP": JOINED_AT_ONCE, "BLOCK_DV": padded(size)},
            )
        )
    return found
