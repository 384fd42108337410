"""What an engine asks of one layer's cache, however that holds its slots."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from centroidkv.cache.storage import Held
from centroidkv.compressor import Compressor
from centroidkv.state import KVState


class LayerState(Protocol):
    """One layer's slots from token to token: :class:`~centroidkv.cache.GrowingState`, which grows between two
    compressions, or :class:`~centroidkv.cache.FixedState`, in buffers of constant size. Neither inherits the other.
    """

    compressor: Compressor
    waits: bool

    @property
    def state(self) -> KVState | None:
        """Everything held, as attention sees it."""

    @property
    def like(self) -> KVState | None:
        """Some state of the same batch, heads, channels, types and device."""

    @property
    def logical(self) -> int:
        """Columns seen, padding included."""

    @property
    def physical(self) -> int:
        """Slots held."""

    @property
    def events(self) -> int:
        """How often clustering ran, of the row where it ran most."""

    @property
    def moved(self) -> bool:
        """Whether slots may stand for other columns than their places say."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    @property
    def nbytes_full(self) -> int:
        """Bytes of keys and values had nothing been compressed."""

    @property
    def seconds(self) -> float:
        """Time spent compressing."""

    def append(
        self, keys: Tensor, values: Tensor, real: Tensor | None = None, queries: Tensor | None = None,
        degrees: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Take new tokens; what to attend to in this step."""

    def reorder(self, rows: Tensor) -> None:
        """Keep, repeat or permute rows."""

    def check_crop(self, tokens: int) -> None:
        """Raise what :meth:`crop` would raise."""

    def crop(self, tokens: int) -> None:
        """Take back the last tokens."""

    def restore(self, state: KVState, logical: int) -> None:
        """Go on from a compressed state."""

    def fetch(self) -> None:
        """Start to bring near what the next :meth:`append` attends to."""

    def pack(self) -> tuple[list[Held], dict[str, Any]]:
        """Everything, for saving."""

    def clear(self) -> None:
        """Forget everything but the configuration."""
