"""What the line of JSON in a saved cache may say: one table, checked before any tensor is read.

A field that is added to what :meth:`~centroidkv.cache.GrowingState.pack` says is added to COMPRESSED here, one of the
file's own to FILE. Clocks have as many numbers as RowClock has fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from centroidkv.cache import GrowingState
from centroidkv.cache.clock import RowClock
from centroidkv.errors import SavedCacheError

Check = Callable[[Any], str | None]
"""What is wrong with a value, as "(where) what it should be"; None if nothing is."""


def whole(least: int) -> Check:
    """A whole number from ``least`` on, as any size in memory can be."""
    return lambda x: None if type(x) is int and least <= x < 2**62 else f" must be a whole number >= {least}"


def number(x: Any) -> str | None:
    """A finite number >= 0."""
    fits = type(x) in (int, float) and 0 <= x < 2**62 and math.isfinite(x)
    return None if fits else " must be a number >= 0"


def kind(wanted: type, name: str) -> Check:
    """A value of one type."""
    return lambda x: None if type(x) is wanted else f" must be {name}"


text, flag, table = kind(str, "a text"), kind(bool, "true or false"), kind(dict, "a table")


def optional(check: Check) -> Check:
    """Null, or what ``check`` says."""
    return lambda x: None if x is None else check(x)


def many(check: Check, least: int = 0, exactly: int | None = None) -> Check:
    """A list, each entry of which passes ``check``."""

    def wrong(x: Any) -> str | None:
        if type(x) is not list:
            return " must be a list"
        if len(x) < least or exactly not in (None, len(x)):
            return f" must have {exactly or f'at least {least}'} entries, has {len(x)}"
        return next((f"[{i}]{found}" for i, entry in enumerate(x) if (found := check(entry)) is not None), None)

    return wrong


def record(**checks: Check) -> Check:
    """A table of just these fields."""

    def wrong(x: Any) -> str | None:
        if type(x) is not dict:
            return " must be a table"
        if set(x) != set(checks):
            return f" must have the fields {sorted(checks)}, has {sorted(x)}"
        return next((f".{n}{found}" for n, check in checks.items() if (found := check(x[n])) is not None), None)

    return wrong


def either(field: str, with_it: Check, without: Check) -> Check:
    """One of two tables, told apart by a field."""
    return lambda x: with_it(x) if type(x) is dict and field in x else without(x)


def held(x: Any) -> str | None:
    """Plain facts of a storage's own; "rounds" counts, whoever says it."""
    return table(x) or (whole(0)(x["rounds"]) if "rounds" in x else None)


COMPRESSED = record(
    compressed=record(
        form=text,
        layout=either(
            "rows", record(rows=many(many(optional(whole(1)), exactly=2), least=1), slots=whole(0)), record()
        ),
        logical=whole(1),
        seconds=number,
        clocks=many(many(whole(0), exactly=len(fields(RowClock))), least=1),
    ),
    held=many(held, least=2),
)
WINDOW = record(sliding_window=whole(1), cumulative_length=whole(1))
FILE = record(
    version=whole(1),
    interval=whole(1),
    compressor=text,
    storage=optional(text),
    model=table,
    rotary=optional(record(scaling=number, interleaved=flag)),
    padding=optional(many(many(whole(0), least=1), least=1)),
    layers=many(either("compressed", COMPRESSED, WINDOW), least=1),
)


def check_header(path: Any, header: Any, version: int) -> dict[str, Any]:
    """``header``, if it is one of this version.

    Raises:
        SavedCacheError: says which field is wrong, and what it should be.
    """
    if type(header) is not dict or "version" not in header:
        raise SavedCacheError(f"{path} is not a saved cache: its header is not a table with a version")
    if type(header["version"]) is not int or header["version"] != version:
        raise SavedCacheError(
            f"{path} has format version {str(header['version'])[:40]}, this release reads {version}; use the release "
            "that wrote it, or process the prompt again"
        )
    wrong = FILE(header)
    if wrong is not None:
        raise SavedCacheError(f"{path} is not a saved cache as this release writes them: header{wrong[:300]}")
    for index, layer in enumerate(header["layers"]):
        if "compressed" in layer:
            _check_layer(f"{path} contradicts itself: layers[{index}]", layer, header)
    lengths = {_length(layer) for layer in header["layers"]}
    if len(lengths) > 1:
        raise SavedCacheError(f"{path} contradicts itself: its layers have seen {sorted(lengths)} tokens")
    batches = {len(layer["compressed"]["clocks"]) for layer in header["layers"] if "compressed" in layer}
    if len(batches) > 1:
        raise SavedCacheError(f"{path} contradicts itself: its layers have {sorted(batches)} rows")
    if header["padding"] is not None:
        columns = {sum(runs) for runs in header["padding"]}
        if len(columns) > 1 or max(columns) > max(lengths) or batches - {len(header["padding"])}:
            raise SavedCacheError(
                f"{path} contradicts itself: padding of {len(header['padding'])} rows, {sorted(columns)[:3]} columns "
                f"for {sorted(batches)} rows of {sorted(lengths)} tokens"
            )
    for layer in header["layers"]:
        if "compressed" in layer:
            _check_padding(path, layer["compressed"], header["padding"])
    return header


def _check_padding(path: Any, facts: Mapping[str, Any], padding: list[list[int]] | None) -> None:
    """Every row has seen as many tokens as its columns are no padding."""
    hidden = [sum(runs[1::2]) for runs in padding] if padding is not None else [0] * len(facts["clocks"])
    real = [facts["logical"] - count for count in hidden]
    seen = [clock[0] for clock in facts["clocks"]]  # RowClock's first number
    if seen != real:
        raise SavedCacheError(
            f"{path} contradicts itself: its rows have seen {seen[:5]} tokens, by their padding it would be {real[:5]}"
        )


def _length(layer: Mapping[str, Any]) -> int:
    return layer["compressed"]["logical"] if "compressed" in layer else layer["cumulative_length"]


def _check_layer(where: str, layer: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    facts, parts = layer["compressed"], len(layer["held"]) - 1  # the first is the queries'
    layout = facts["layout"]
    if (header["storage"] is None) == bool(layout):
        raise SavedCacheError(f"{where} is laid out by rows or not, against storage {header['storage']!r}")
    if not layout:
        if parts != 1:
            raise SavedCacheError(f"{where} has {parts} parts, a whole state is one")
        return
    named = [number for row in layout["rows"] for number in row if number is not None]
    if any(number >= parts for number in named):
        raise SavedCacheError(f"{where} names part {max(named)}, there are {parts}")
    if len(layout["rows"]) != len(facts["clocks"]) or layout["slots"] > facts["logical"]:
        raise SavedCacheError(
            f"{where} has {len(layout['rows'])} rows of {layout['slots']} slots, clocks say otherwise"
        )
    if any(row == [None, None] for row in layout["rows"]):
        raise SavedCacheError(f"{where} has a row that holds nothing")


def check_names(path: Any, header: Mapping[str, Any], names: Any) -> None:
    """Every tensor belongs to something that the header names, and windows have theirs.

    Raises:
        SavedCacheError: one does not, or is missing.
    """
    starts, needed = set(), set()
    for index, layer in enumerate(header["layers"]):
        if "compressed" in layer:
            starts |= {f"layers.{index}.{number}." for number in range(len(layer["held"]))}
        else:
            needed |= {f"layers.{index}.keys", f"layers.{index}.values"}
    if header["rotary"] is not None:
        needed.add("rotary.inv_freq")
    strangers = [name for name in names if name not in needed and ".".join(name.split(".")[:3]) + "." not in starts]
    if strangers or needed - set(names):
        raise SavedCacheError(
            f"{path} contradicts itself: tensors without a place {[name[:60] for name in strangers[:3]]}, missing "
            f"{sorted(needed - set(names))[:3]}"
        )


def check_state(growing: GrowingState, form: tuple[int, ...] | None, where: str) -> tuple[int, ...]:
    """What a layer holds fits together, and the layers before it: ``form`` is what this returned for them.

    Raises:
        SavedCacheError: shapes, types or numbers that no layer could have come to.
    """

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise SavedCacheError(f"{where} contradicts itself: {what}")

    like, clocks = growing.like, growing._clocks
    assert like is not None
    batch, heads = like.batch, like.heads
    need(batch == len(clocks), f"{batch} rows, {len(clocks)} clocks")
    need(form is None or form[0] == batch, "its rows are not as many as those of other layers")
    need(like.seen.dtype == torch.int64, "tokens seen are whole numbers")
    seen = like.seen.tolist()
    need(all(0 <= n <= growing.logical for n in seen), f"rows have seen {seen} of {growing.logical} tokens")
    need(all(clock.live <= clock.seen <= growing.logical for clock in clocks), "clocks that count more than there was")
    need(growing.physical <= growing.logical, f"{growing.physical} slots of {growing.logical} tokens")
    live: list[int] = []
    for pieces in growing.pieces():
        live += torch.stack([piece.live.sum(-1) for piece in pieces]).sum(0).amax(-1).tolist()
        slots = sum(piece.slots for piece in pieces)
        need(slots <= growing.physical, f"a row of {slots} slots among {growing.physical}")
        for piece in pieces:
            need(
                (piece.heads, piece.keys.shape[-1], piece.values.shape[-1], piece.keys.dtype)
                == (heads, like.keys.shape[-1], like.values.shape[-1], like.keys.dtype),
                "parts of different heads, channels or types",
            )
            need(piece.seen.dtype == torch.int64, "tokens seen are whole numbers")
            need(bool((piece.degree.isfinite() & (piece.degree >= 0)).all()), "degrees are numbers >= 0")
            need(bool((piece.positions.diff(dim=-1) >= 0).all()), "positions ascend")
            places = piece.positions[piece.live]
            need(bool(((places >= 0) & (places < growing.logical)).all()), "positions are those of tokens seen")
    need(live == [clock.live for clock in clocks], f"rows hold {live} slots, their clocks say otherwise")
    for queries, counts in growing._queries.steps:
        need(
            queries.ndim == 4 and queries.is_floating_point() and counts.dtype == torch.bool
            and queries.shape[0] == batch and counts.shape == (batch, queries.shape[2]),
            "queries that are not [B, Hq, L, D], or not marked [B, L]",
        )  # fmt: skip
    return (batch,)


def check_window(keys: Tensor, values: Tensor, facts: Mapping[str, Any], layer: Any, where: str) -> tuple[int, ...]:
    """The same for a sliding window; returns its rows.

    Raises:
        SavedCacheError: it is not one.
    """
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        raise SavedCacheError(f"{where} contradicts itself: keys {tuple(keys.shape)}, values {tuple(values.shape)}")
    if facts["sliding_window"] != layer.sliding_window:
        raise SavedCacheError(
            f"{where} is a window of {facts['sliding_window']} tokens in the file, of {layer.sliding_window} here"
        )
    floats = keys.is_floating_point() and values.is_floating_point()
    if not floats or not 0 < keys.shape[2] <= min(facts["sliding_window"], facts["cumulative_length"]):
        raise SavedCacheError(f"{where} contradicts itself: a window of {tuple(keys.shape)}, {keys.dtype}")
    return (keys.shape[0],)
