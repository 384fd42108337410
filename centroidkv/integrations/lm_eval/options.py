"""The options that the model ``centroidkv`` adds to lm-eval's ``--model_args``, checked before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from centroidkv import presets
from centroidkv.compressor import Compressor
from centroidkv.errors import EvaluationError
from centroidkv.integrations.transformers import CentroidCache
from centroidkv.records import Budget

PLAIN = ("full", "none")
"""Names for the model as it is, the baseline of every table."""
PROTOCOLS = ("query-aware", "query-agnostic")
OVERLONG = ("refuse", "middle")
INTERVAL = 128


@dataclass(frozen=True)
class Options:
    """What is compressed, how far and when.

    Args:
        preset: a name in ``presets.ALL``; ``"full"`` or ``"none"`` (also None) leaves the cache alone.
        budget: a float in (0, 1] is a share of the tokens seen, a whole number is a number of slots per KV head;
            None is the presets' own default, a quarter.
        interval: tokens between two compressions; None is 128.
        protocol: ``"query-aware"`` compresses the whole prompt, ``"query-agnostic"`` its context only, before the
            question is appended.
        overlong: ``"refuse"`` raises on a prompt that does not fit the model; ``"middle"`` keeps its first and last
            halves, as LongBench does.

    Raises:
        EvaluationError: an option is unknown, or is given although ``preset`` makes it void.
        BudgetError: the budget is no share and no number of slots.

    Example:
        >>> Options(preset="distinctive", budget=0.25).label
        'distinctive 0.25'
    """

    preset: str | None = "distinctive"
    budget: Budget | float | None = None
    interval: int | None = None
    protocol: str = "query-aware"
    overlong: str = "refuse"

    def __post_init__(self) -> None:
        if self.preset is None or self.preset in PLAIN:
            object.__setattr__(self, "preset", "full")
            for name in ("budget", "interval"):
                if (given := getattr(self, name)) is not None:
                    raise EvaluationError(
                        f"preset=full runs the plain model, where {name}={given!r} would have no effect; leave "
                        f"{name} out, or choose a preset that compresses: {', '.join(presets.ALL)}"
                    )
        elif not isinstance(self.preset, str) or self.preset not in presets.ALL:
            raise EvaluationError(
                f"no preset is named {self.preset!r}; there are {', '.join(presets.ALL)}, and full for the plain model"
            )
        for name, known in (("protocol", PROTOCOLS), ("overlong", OVERLONG)):
            if getattr(self, name) not in known:
                raise EvaluationError(f"{name} is one of {', '.join(known)}; got {getattr(self, name)!r}")
        if not self.plain:
            self.new_cache()  # refuses a bad budget, interval or compressor now, not at the first request

    @property
    def plain(self) -> bool:
        """Whether the model runs as it is."""
        return self.preset == "full"

    @property
    def label(self) -> str:
        """Preset and budget, for tables."""
        return "full" if self.plain else f"{self.preset} {self.slots.amount}"

    @property
    def slots(self) -> Budget:
        """The budget of a compressed run."""
        return presets.QUARTER if self.budget is None else Budget.of(self.budget)

    @property
    def every(self) -> int:
        """Tokens between two compressions."""
        return INTERVAL if self.interval is None else self.interval

    def compressor(self) -> Compressor | None:
        """The preset under the budget; None for the plain model."""
        if self.plain:
            return None
        return presets.ALL[str(self.preset)](self.slots)

    def new_cache(self) -> CentroidCache | None:
        """An empty cache for one batch; None for the plain model, which then makes its own."""
        compressor = self.compressor()
        return None if compressor is None else CentroidCache(compressor, interval=self.every)

    def as_dict(self) -> dict[str, Any]:
        """What a result file should say about the run."""
        return {
            "preset": self.preset,
            "budget": None if self.plain else repr(self.slots),
            "interval": None if self.plain else self.every,
            "protocol": self.protocol,
            "overlong": self.overlong,
            "compressor": repr(self.compressor()),
        }
