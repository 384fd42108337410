"""Which keys a similarity compares: the options all similarities share. Not a stage itself."""

from __future__ import annotations

from dataclasses import dataclass

from centroidkv.errors import StageError


@dataclass(frozen=True)
class KeyView:
    """Keyword options of every similarity here.

    Args:
        rope: "after" compares keys as cached; "before" un-rotates them by their positions first, so that two equal
            contents far apart are alike.
        heads: "each" lets every KV head decide for itself; "mean" makes one decision on the mean of the heads' keys.
    """

    rope: str = "after"
    heads: str = "each"

    def __post_init__(self) -> None:
        if self.rope not in ("before", "after"):
            raise StageError(f"rope is 'before' or 'after' (which keys to compare), got {self.rope!r}")
        if self.heads not in ("each", "mean"):
            raise StageError(f"heads is 'each' or 'mean' (who decides), got {self.heads!r}")
