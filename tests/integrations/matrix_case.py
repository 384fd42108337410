"""One model of the matrix with what its situations need: caches, generation with logits, and comparisons."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from matrix_by_hand import ByHand
from matrix_models import CACHE_NAME, Family
from torch import Tensor

from centroidkv import Compressor
from centroidkv.integrations.transformers import CentroidCache, enable
from centroidkv.matching import WardMatching
from centroidkv.preserve import Recent, Sinks
from centroidkv.similarity import ExpectedLogits

QUARTER, INTERVAL, NEW = 0.25, 4, 8
TOLERANCE = 2e-4
"""Of logits of size 1 to 5 after two or three layers in float32; a lost degree or position moves them by 1e-2."""


class Refused(Exception):
    """Raised by a situation that saw the refusal it expected; the text is the reason."""


class NotHere(Exception):
    """Raised by a situation that the model or release does not have; the text is the reason."""


@dataclass
class Text:
    """What was generated: all ids ``[B, L]``, and the logits ``[B, new, V]`` that chose the new ones."""

    ids: Tensor
    logits: Tensor

    @property
    def new(self) -> Tensor:
        return self.ids[:, self.ids.shape[1] - self.logits.shape[1] :]


class Case:
    """One cell's model, in its attention back end, enabled or not."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.model = family.make()

    @contextlib.contextmanager
    def attending(self, attention: str, with_enable: bool = True) -> Iterator[None]:
        """The model in this back end."""
        self.model.set_attn_implementation(attention)
        with enable(self.model) if with_enable else contextlib.nullcontext():
            yield

    def compressor(self, budget: Any = QUARTER, queries: bool = False) -> Compressor:
        parts = Compressor.builder().preserve(Sinks(1), Recent(2)).budget(budget)
        return (parts.similarity(ExpectedLogits()).matching(WardMatching()) if queries else parts).build()

    def cache(self, budget: Any = QUARTER, queries: bool = False) -> CentroidCache:
        return CentroidCache(self.compressor(budget, queries), interval=INTERVAL)

    def hand(self, budget: Any = QUARTER, queries: bool = False, waits: bool = False) -> ByHand:
        return ByHand(self.model, self.family, self.compressor(budget, queries), INTERVAL, waits)

    def prompt(self, length: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + length)
        return torch.randint(3, 97, (1, length), generator=generator)

    @torch.no_grad()
    def forward(self, ids: Tensor, cache: Any, **options: Any) -> Tensor:
        """One forward pass; the logits."""
        return self.model(ids, **{CACHE_NAME: cache}, **options).logits

    def generate(self, ids: Tensor, cache: Any = None, new: int = NEW, **options: Any) -> Text:
        """``model.generate``, greedy unless options say otherwise."""
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, **options}
        if cache is not None:
            options[CACHE_NAME] = cache
        out = self.model.generate(
            ids, max_new_tokens=new, min_new_tokens=None, output_logits=True, return_dict_in_generate=True, **options
        )
        self.last = out
        return Text(out.sequences, torch.stack(out.logits, 1))

    # -- expectations ---------------------------------------------------------------------------------------------

    def same(self, got: Tensor, wanted: Tensor) -> None:
        """Equal to within rounding."""
        error = (got - wanted).abs().max()
        assert got.shape == wanted.shape, (got.shape, wanted.shape)
        assert error < TOLERANCE, f"logits differ by {error:.3g}"

    def compressed(self, cache: CentroidCache) -> None:
        """Something was merged, or the test would prove nothing."""
        if "full" in self.family.kinds:
            assert cache.stats().merged > 0, cache

    def plain_at_full_budget(self, run: Callable[[Any], Text]) -> None:
        """Budget 1.0 equals the plain model token by token."""
        plain, ours = run(None), run(self.cache(1.0))
        assert torch.equal(ours.ids, plain.ids)
        self.same(ours.logits, plain.logits)

    def by_hand(self, text: Text, prompts: list[list[Tensor]], budget: Any = QUARTER, queries: bool = False) -> None:
        """Every row of ``text`` equals its own run by hand over the chunks of its prompt."""
        for row, chunks in enumerate(prompts):
            wanted = self.hand(budget, queries).follow(chunks, text.new[row])
            self.same(text.logits[row], wanted)
