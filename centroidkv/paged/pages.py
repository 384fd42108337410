"""How a block of the cache is laid out: keys, values, ln N and, if needed, positions of one KV head after the other.

vLLM allots ``[blocks, heads, slots, channels]`` numbers of the cache's type and leaves their meaning to the attention
back end. Here the page of one block and head holds all keys, then all values, then ln N of every slot in float32, then
the slots' positions in int32 where a compressor asks for them: no slot is padded, and the numbers beside keys and
values cost 4 or 8 bytes a slot. Needs nothing of vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from centroidkv.errors import ServingError


def slot_bytes(key_size: int, value_size: int, dtype: torch.dtype, positions: bool) -> int:
    """Bytes of one slot of one KV head.

    >>> slot_bytes(64, 64, torch.bfloat16, positions=False)
    260
    """
    return (key_size + value_size) * dtype.itemsize + (8 if positions else 4)


@dataclass(frozen=True, eq=False)
class Pages:
    """Views into one layer's cache, all of shape ``[blocks, H, slots, ...]``.

    Args:
        keys: ``[..., D]``.
        values: ``[..., Dv]``.
        log_degree: float32, ln N; 0 = a raw token.
        positions: int32, of the token whose slot stayed; None if no stage asks. Of raw tokens it is never written:
            a token's place in its request says it.
    """

    keys: Tensor
    values: Tensor
    log_degree: Tensor
    positions: Tensor | None

    @classmethod
    def of(cls, cache: Tensor, key_size: int, value_size: int, positions: bool) -> Pages:
        """Views into ``cache [blocks, H, slots, C]`` as vLLM allots it."""
        blocks, heads, slots, channels = cache.shape
        wanted = slot_bytes(key_size, value_size, cache.dtype, positions)
        if channels * cache.element_size() != wanted or cache.stride()[2:] != (channels, 1):
            raise ServingError(
                f"a page must hold {wanted} bytes a slot in one piece, got {channels * cache.element_size()} with "
                f"strides {cache.stride()}"
            )
        flat = cache.as_strided((blocks, heads, slots * channels), (*cache.stride()[:2], 1))
        split = slots * key_size
        end = split + slots * value_size
        rest = flat[..., end:]
        log_degree = rest.view(torch.float32)[..., :slots]
        return cls(
            keys=flat[..., :split].unflatten(-1, (slots, key_size)),
            values=flat[..., split:end].unflatten(-1, (slots, value_size)),
            log_degree=log_degree,
            positions=rest.view(torch.int32)[..., slots:] if positions else None,
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
        return tuple(x[blocks].transpose(0, 1).flatten(1, 2) for x in (self.keys, self.values, self.log_degree))  # type: ignore[return-value]

    def read_positions(self, blocks: Tensor) -> Tensor:
        """Positions ``[H, T]`` of these blocks."""
        assert self.positions is not None
        return self.positions[blocks].transpose(0, 1).flatten(1, 2)

    def fill(self, blocks: Tensor, keys: Tensor, values: Tensor, degree: Tensor, positions: Tensor) -> None:
        """Overwrite whole blocks with clusters: ``keys [H, T, D]`` and so on, T = blocks times their size."""
        pairs = [(self.keys, keys), (self.values, values), (self.log_degree, degree.log())]
        if self.positions is not None:
            pairs.append((self.positions, positions.int()))
        for held, new in pairs:
            held[blocks] = new.unflatten(1, (len(blocks), self.block_size)).transpose(0, 1)
