"""Paged attention over clusters as a Triton kernel; softmax steps and the joining of splits are those of attention."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from centroidkv.attention.limits import require_kernel
from centroidkv.attention.triton import (
    LOG2_E,
    Tiles,
    absorb,
    choose_splits,
    choose_tiles,
    join,
    product,
    scratch,
    store,
    widen,
)
from centroidkv.kernels import TYPES, KernelCase, padded


@triton.jit(do_not_specialize=["splits"])
def paged_kernel(
    query, key_blocks, value_blocks, log_degree, block_table, lengths, out, lse, scale, log2_e,
    q_r, q_h, q_d, k_n, k_t, k_h, k_d, v_n, v_t, v_h, v_d, n_n, n_t, n_h, b_r, b_m, l_r,
    heads, groups, splits, block,
    D: tl.constexpr, DV: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Grouped heads of one request and KV head over one split: out [R, H, G, splits, Dv], lse [R, H, G, splits]."""
    tiles = tl.cdiv(groups, BLOCK_R)
    pair = tl.program_id(0) // tiles
    split = tl.program_id(1)
    r = (pair // heads).to(tl.int64)
    h = (pair % heads).to(tl.int64)
    row = (tl.program_id(0) % tiles) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = row < groups
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    e = tl.arange(0, BLOCK_DV).to(tl.int64)
    at = r * q_r + (h * groups + row) * q_h
    q = tl.load(query + at[:, None] + d[None, :] * q_d, mask=live[:, None] & (d < D)[None, :], other=0.0)
    key_blocks += h * k_h
    value_blocks += h * v_h
    log_degree += h * n_h
    block_table += r * b_r

    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    sums = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    # Lengths stay on the device, so every request divides its own slots among the splits all requests have.
    length = tl.load(lengths + r * l_r)
    stretch = tl.cdiv(tl.cdiv(length, splits), BLOCK_T) * BLOCK_T
    end = tl.minimum((split + 1) * stretch, length)
    for start in range(split * stretch, end, BLOCK_T):
        slot = start + tl.arange(0, BLOCK_T)
        inside = slot < end
        n = tl.load(block_table + (slot // block).to(tl.int64) * b_m, mask=inside, other=0).to(tl.int64)
        t = (slot % block).to(tl.int64)
        k_at = n * k_n + t * k_t
        k = tl.load(key_blocks + k_at[None, :] + d[:, None] * k_d, mask=inside[None, :] & (d < D)[:, None], other=0.0)
        bias = tl.load(log_degree + n * n_n + t * n_t, mask=inside, other=float("-inf")) * log2_e
        logits = product(q, k, WIDEN) * scale + bias[None, :]
        v_at = n * v_n + t * v_t
        v = tl.load(
            value_blocks + v_at[:, None] + e[None, :] * v_d, mask=inside[:, None] & (e < DV)[None, :], other=0.0
        )
        peak, total, sums = absorb(logits, v, peak, total, sums, WIDEN)

    place = (pair.to(tl.int64) * groups + row) * splits + split
    store(out, lse, place, live, peak, total, sums, DV, BLOCK_DV)


def choose_paged_tiles(groups: int, size: int, value_size: int, dtype: torch.dtype) -> Tiles:
    """As for a cache in one piece, but the addresses of blocks need registers too."""
    tiles, widest = choose_tiles(groups, size, value_size, dtype), padded(max(size, value_size))
    if widest > 128 and dtype == torch.float32:
        return replace(tiles, warps=4)  # eight warps would spill a few of them
    return replace(tiles, warps=8) if widest > 64 else tiles


def paged_degree_attention_triton(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    log_degree: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    tiles: Tiles | None = None,
    splits: int | None = None,
) -> Tensor:
    """The same sum on a GPU; see paged_degree_attention.

    Nothing is read back from the device, so a call can be part of a CUDA graph. ``tiles`` and ``splits`` (1 to 128)
    replace the choice by sizes; the last bits depend on them.

    Raises:
        BackendError, DtypeError, ShapeError: see :func:`~centroidkv.attention.limits.require_kernel`.
    """
    require_kernel(query, key_blocks, value_blocks)
    requests, query_heads, size = query.shape
    block, heads, value_size = value_blocks.shape[1:]
    groups = query_heads // heads
    tiles = choose_paged_tiles(groups, size, value_size, query.dtype) if tiles is None else tiles
    programs = requests * heads * triton.cdiv(groups, tiles.rows)
    splits = choose_splits(programs, block_table.shape[1] * block, query.device) if splits is None else splits
    out = torch.empty(requests, query_heads, value_size, dtype=query.dtype, device=query.device)
    parts, lse = scratch(out, requests * query_heads, splits)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        paged_kernel[(programs, splits)](
            query, key_blocks, value_blocks, log_degree, block_table, lengths, parts, lse, scale * LOG2_E, LOG2_E,
            *query.stride(), *key_blocks.stride(), *value_blocks.stride(), *log_degree.stride(),
            *block_table.stride(), *lengths.stride(), heads, groups, splits, block,
            size, value_size, widen(query.dtype), tiles.rows, tiles.slots, padded(size), padded(value_size),
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        join(parts, lse, out)
    return out


def cases() -> list[KernelCase]:
    """The kernel in the configurations that calls use, 4 grouped heads; it is joined by attention's ``join_kernel``."""
    strides = ["q_r", "q_h", "k_n", "k_t", "k_h", "v_n", "v_t", "v_h", "n_n", "n_t", "b_r", "l_r"]
    found = []
    for size, (dtype, kind) in itertools.product((64, 96, 128, 256), TYPES.items()):
        tiles = choose_paged_tiles(4, size, size, dtype)
        found.append(
            KernelCase(
                name=f"paged attention split d{size} {kind}",
                kernel=paged_kernel,
                signature=dict.fromkeys(("query", "key_blocks", "value_blocks"), f"*{kind}")
                | dict.fromkeys(("log_degree", "out", "lse"), "*fp32")
                | dict.fromkeys(("block_table", "lengths"), "*i32")
                | dict.fromkeys(("scale", "log2_e"), "fp32")
                | dict.fromkeys([*strides, "heads", "groups", "splits", "block"], "i32"),
                constants={"q_d": 1, "k_d": 1, "v_d": 1, "n_h": 1, "b_m": 1, "D": size, "DV": size, "WIDEN": False}
                | {"BLOCK_R": tiles.rows, "BLOCK_T": tiles.slots, "BLOCK_D": padded(size), "BLOCK_DV": padded(size)},
                warps=tiles.warps,
                stages=tiles.stages,
            )
        )
    return found
