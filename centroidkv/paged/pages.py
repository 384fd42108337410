"""How a block of the cache is laid out: keys, values, ln N and, if needed, positions of one KV head after the other.

An engine allots ``[blocks, heads, slots, channels]`` numbers of the cache's type, whose meaning is the attention's
affair. Here the page of one block and head holds all keys, then all values, then ln N of every slot in float32, then
the slots' positions in int32 where a compressor asks for them, then whatever else its stages want to keep of a slot,
one datum after the other: no slot is padded, and the numbers beside keys and values cost 4 bytes each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from centroidkv.compressor import Compressor
from centroidkv.errors import ServingError
from centroidkv.rotary import Rotary
from centroidkv.slot_data import SlotDatum
from centroidkv.state import KVState


@dataclass(frozen=True)
class PageDatum:
    """A datum of every slot that lasts from one compression to the next.

    Args:
        name: in ``KVState.slot_data``.
        shape: of a slot's part; () for one number.
        dtype: float32 or int32, as pages are read in words of 4 bytes.
        rule: how it merges, and what raw tokens have.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rule: SlotDatum

    @property
    def words(self) -> int:
        """Numbers per slot."""
        return prod(self.shape)


def lasting_data(
    compressor: Compressor, key_size: int, value_size: int, dtype: torch.dtype, rotary: Rotary | None = None
) -> tuple[PageDatum, ...]:
    """What the stages of ``compressor`` keep of every slot; found by letting them prepare two tokens.

    Raises:
        ServingError: a datum is neither float32 nor int32.
    """
    keys, values = (torch.ones(1, 1, 2, size, dtype=dtype) for size in (key_size, value_size))
    state = KVState.from_kv(keys, values, rotary=rotary)
    state = compressor.stages.prepare(state, torch.ones(1, 1, 2, dtype=torch.bool))
    data = {name: x for name, x in sorted(state.slot_data.items()) if state.rule(name).lasting}
    for name, x in data.items():
        if x.dtype not in (torch.float32, torch.int32):
            raise ServingError(f"pages hold slot data of float32 or int32, and {name!r} is {x.dtype}")
    return tuple(PageDatum(name, tuple(x.shape[3:]), x.dtype, state.rule(name)) for name, x in data.items())


def slot_bytes(
    key_size: int, value_size: int, dtype: torch.dtype, positions: bool, data: Sequence[PageDatum] = ()
) -> int:
    """Bytes of one slot of one KV head.

    >>> slot_bytes(64, 64, torch.bfloat16, positions=False)
    260
    """
    return (key_size + value_size) * dtype.itemsize + 4 * (1 + positions + sum(datum.words for datum in data))


@dataclass(frozen=True, eq=False)
class Pages:
    """Views into one layer's cache, all of shape ``[blocks, H, slots, ...]``.

    Args:
        keys: ``[..., D]``.
        values: ``[..., Dv]``.
        log_degree: float32, ln N; 0 = a raw token.
        positions: int32, of the token whose slot stayed; None if no stage asks.
        data: what else is kept of a slot. This and positions are never written for raw tokens: a token's place in its
            request says the one, the datum's rule the other.
    """

    keys: Tensor
    values: Tensor
    log_degree: Tensor
    positions: Tensor | None
    data: tuple[tuple[PageDatum, Tensor], ...] = ()

    @classmethod
    def of(
        cls, cache: Tensor, key_size: int, value_size: int, positions: bool, data: Sequence[PageDatum] = ()
    ) -> Pages:
        """Views into ``cache [blocks, H, slots, C]`` as an engine allots it; ``data`` as :func:`lasting_data` says."""
        blocks, heads, slots, channels = cache.shape
        wanted = slot_bytes(key_size, value_size, cache.dtype, positions, data)
        if channels * cache.element_size() != wanted or cache.stride()[2:] != (channels, 1):
            raise ServingError(
                f"a page must hold {wanted} bytes a slot in one piece, got {channels * cache.element_size()} with "
                f"strides {cache.stride()}"
            )
        flat = cache.as_strided((blocks, heads, slots * channels), (*cache.stride()[:2], 1))
        split = slots * key_size
        end = split + slots * value_size
        words = flat[..., end:].view(torch.float32).split(
            [slots] * (1 + positions) + [slots * datum.words for datum in data], -1
        )  # fmt: skip
        return cls(
            keys=flat[..., :split].unflatten(-1, (slots, key_size)),
            values=flat[..., split:end].unflatten(-1, (slots, value_size)),
            log_degree=words[0],
            positions=words[1].view(torch.int32) if positions else None,
            data=tuple(
                (datum, x.view(datum.dtype).unflatten(-1, (slots, *datum.shape)))
                for datum, x in zip(data, words[1 + positions :], strict=True)
            ),
        )

    @property
    def block_size(self) -> int:
        """Slots per block."""
        return self.keys.shape[2]

    def write(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        """Store raw tokens ``keys [T, H, D]``, ``values [T, H, Dv]`` at slots ``places [T]`` of the whole cache."""
        blocks, slots = places // self.block_size, places % self.block_size
        for held, new in ((self.keys, keys), (self.values, values)):
            held.permute(0, 2, 1, 3)[blocks, slots] = new
        self.log_degree.permute(0, 2, 1)[blocks, slots] = 0.0

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys ``[H, T, D]``, values ``[H, T, Dv]`` and ln N ``[H, T]`` of these blocks, one after the other."""
        return _in_a_row(self.keys[blocks]), _in_a_row(self.values[blocks]), _in_a_row(self.log_degree[blocks])

    def read_positions(self, blocks: Tensor) -> Tensor:
        """Positions ``[H, T]`` of these blocks."""
        assert self.positions is not None
        return _in_a_row(self.positions[blocks])

    def read_data(self, name: str, blocks: Tensor) -> Tensor:
        """The datum ``[H, T, ...]`` of these blocks."""
        return next(_in_a_row(x[blocks]) for datum, x in self.data if datum.name == name)

    def check_data(self, state: KVState) -> None:
        """Refuse a state whose slot data are not those that these pages hold, before anything is written.

        Raises:
            ServingError: names those without a place, and the places without data.
        """
        held, brought = {datum.name for datum, _ in self.data}, set(state.slot_data)
        if held != brought:
            raise ServingError(
                f"these pages have no room for {sorted(brought - held)}, which stages of the compressor want to last "
                f"and would lose, and nothing to hold for {sorted(held - brought)}, which no stage brings; make them "
                "with data=lasting_data(...) of this compressor"
            )

    def fill(self, blocks: Tensor, state: KVState, row: int) -> None:
        """Overwrite whole blocks with the slots of one row of ``state``, as many as these blocks have.

        Raises:
            ServingError: see :meth:`check_data`.
        """
        self.check_data(state)
        pairs = [(self.keys, state.keys[row]), (self.values, state.values[row])]
        pairs.append((self.log_degree, state.degree[row].log()))
        if self.positions is not None:
            pairs.append((self.positions, state.positions[row].int()))
        pairs += [(held, state.slot_data[datum.name][row]) for datum, held in self.data]
        for held, new in pairs:
            held[blocks] = new.unflatten(1, (len(blocks), self.block_size)).transpose(0, 1)


def _in_a_row(blocks: Tensor) -> Tensor:
    """``[blocks, H, slots, ...]`` -> ``[H, blocks * slots, ...]``"""
    return blocks.transpose(0, 1).flatten(1, 2)
