"""One cell of the sweep: a family, an attention, with or without ``enable``; what became of it."""

from __future__ import annotations

import copy
import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from sweep_families import Family
from sweep_oracle import placed
from sweep_text import STEPS, TOKENS, Text

from centroidkv import Budget, Compressor
from centroidkv.errors import CentroidKVError
from centroidkv.integrations.transformers import CentroidCache, enable
from centroidkv.matching import BipartiteSoftMatching
from centroidkv.partition import Alternating
from centroidkv.preserve import Recent, Sinks
from centroidkv.schedule import Constant, LinearAnnealing
from centroidkv.similarity import Cosine

ATTENTIONS = ("sdpa", "eager")

TOLERANCE = float(torch.finfo(torch.float32).eps ** 0.5)
"""Of the largest logit: half the digits of float32, 3.5e-4. The order of a sum changes less (2.3e-6 was the most), a
fault more (1.5e-2 was the least)."""

HEARD = 0.01
"""By how much, at least, clustering must change a model's logits for its cell to say anything."""


def per_head(budget: Any = 0.4) -> Compressor:
    """Every KV head decides for itself."""
    builder = Compressor.builder().preserve(Sinks(2), Recent(8)).partition(Alternating(chunk_size=32))
    return builder.matching(BipartiteSoftMatching()).schedule(LinearAnnealing(0.3, 0.02)).budget(budget).build()


def pooled(budget: Any = 0.4) -> Compressor:
    """All heads of a layer merge the same tokens."""
    builder = Compressor.builder().preserve(Sinks(2), Recent(8)).partition(Alternating(chunk_size=None))
    builder = builder.similarity(Cosine(heads="mean")).matching(BipartiteSoftMatching())
    return builder.schedule(Constant(0.3)).budget(budget).build()


def one_merge() -> Compressor:
    """A single pair."""
    return per_head(Budget.tokens(TOKENS - 1))


COMPRESSORS = {"per head": per_head, "pooled": pooled}


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    ``kind``: "right", "right for single tokens" (several at once are refused), "left alone", "refused"; "not there"
    (transformers has no such attention for the family) or "not run" (its model cannot be made here). Anything else is a
    failure: "wrong", "raw error", or "deaf" (clustering changes nothing, so the cell would say nothing).
    """

    kind: str
    reason: str = ""
    stage: str = ""
    distance: float = 0.0

    @property
    def fine(self) -> bool:
        return self.kind in ("right", "right for single tokens", "left alone", "refused", "not there", "not run")


@dataclass
class Plain:
    """A model without us: its stock cache after the prompt, and what it says; or why it cannot run so."""

    text: Text
    after: Any = None
    prompt: Any = None
    steps: Any = None
    error: Exception | None = None


@lru_cache(maxsize=1)
def plain(family: Family, attention: str) -> Plain:
    """The family's model with its stock cache, once for all cells of an attention."""
    told = Plain(Text(family, family.make(attention)))
    cache = told.text.stock_cache()
    try:
        told.prompt = told.text.prompt(cache)
        told.after = copy.deepcopy(cache)
        told.steps = [told.text.step(cache, index) for index in range(len(STEPS))]
    except Exception as error:
        told.error = error
    return told


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference, of the largest logit."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-9))


def cell(family: Family, attention: str, enabled: bool, compressor: str) -> Outcome:
    """What becomes of a text in one cell."""
    try:
        stock = plain(family, attention)
    except Exception as error:
        absent = "does not support an attention implementation" in str(error)
        return Outcome("not there") if absent else Outcome("not run", f"{type(error).__name__}: {error}")
    run = Run(stock, CentroidCache(COMPRESSORS[compressor](), interval=1000))
    try:
        with enable(stock.text.model) if enabled else nullcontext():
            run.go()
    except CentroidKVError as error:
        return run.refused(f"{type(error).__name__}: {error}")
    except Exception as error:
        # What the model says of any cache but its own is not ours to mend.
        known = stock.error is not None and type(error) is type(stock.error)
        if known and str(stock.error) == str(error).replace(*_names(error)):
            return Outcome("refused", f"by the model itself: {_told(error)}", run.stage)
        return Outcome("raw error", f"{_told(error)} ({place(error)})", run.stage)
    if stock.error is not None:
        return Outcome("not run", f"with its stock cache: {_told(stock.error)}")
    return run.judged()


class Run:
    """A text read with our cache, step by step, and what it should have said."""

    def __init__(self, stock: Plain, own: CentroidCache) -> None:
        self.stock, self.own, self.stage = stock, own, "in enable"
        self.oracle: Any = None
        self.got: list[torch.Tensor] = []

    def go(self) -> None:
        """Prompt and steps; ``stage`` says where it is."""
        text = self.stock.text
        cache = text.paired(self.own)
        self.stage = "at the first forward pass"
        self.prompt = text.prompt(cache)
        if self.stock.error is not None:
            return
        if self.own.stats().merged:
            self.oracle = placed(self.stock.after, cache)
        for index, new in enumerate(STEPS):
            self.stage = "at the first token after the prompt" if index == 0 else f"at step {index} ({new} tokens)"
            self.got.append(text.step(cache, index))

    def judged(self) -> Outcome:
        """Of all that was said."""
        if not torch.equal(self.prompt, self.stock.prompt):
            return Outcome("wrong", "the prompt's logits differ", "prompt", distance(self.prompt, self.stock.prompt))
        if self.oracle is None:
            same = all(torch.equal(a, b) for a, b in zip(self.got, self.stock.steps, strict=False))
            return Outcome("left alone" if same else "wrong", "nothing was merged")
        text, cache = self.stock.text, copy.deepcopy(self.oracle)
        want = [text.step(cache, index) for index in range(len(self.got))]
        told = [distance(*pair) for pair in zip(self.got, want, strict=True)]
        if max(told, default=0.0) >= TOLERANCE:
            return Outcome("wrong", " ".join(f"{far:.1e}" for far in told), distance=max(told))
        heard = max(distance(*pair) for pair in zip(want, self.stock.steps, strict=False)) if want else HEARD
        return Outcome("right" if heard >= HEARD else "deaf", f"heard {heard:.1e}", distance=max(told, default=0.0))

    def refused(self, reason: str) -> Outcome:
        """A refusal; but what was said before it must be right."""
        if self.got:
            before = self.judged()
            if before.kind != "right":
                return before
            if len(self.got) == STEPS.index(4):
                return Outcome("right for single tokens", reason, self.stage, before.distance)
        return Outcome("refused", reason, self.stage)


def _names(error: Exception) -> tuple[str, str]:
    ours = "centroidkv.integrations.transformers.cache.CentroidCache"
    return (ours, "transformers.cache_utils.DynamicCache") if ours in str(error) else ("CentroidCache", "DynamicCache")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def place(error: Exception) -> str:
    """Where an error of somebody else comes from, for the report of a failure."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename.split('site-packages/')[-1]}:{frame.lineno}"
