"""One compressor's back ends on one state, against the stages one by one. Copied into failing scripts."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from centroidkv import KVState, Rotary
from centroidkv.errors import BackendError, CentroidKVError
from centroidkv.queries import QUERIES
from centroidkv.rounds import BLOCKED, NATIVE
from centroidkv.testing.strategies import make_keys
from tools.fuzz.found import Wrong, expect
from tools.fuzz.recipe import make_compressor


class BackEnds:
    """A state with an odd mixture of keys, and a compressor to reduce it, again and again."""

    def __init__(
        self, slots: int = 40, text: str = "gaussian", batch: int = 1, heads: int = 1, size: int = 8,
        value_size: int | None = None, dtype: str = "float32", pad: int = 0, key_factor: float = 1.0,
        value_factor: float = 1.0, merged: bool = False, seed: int = 0, **recipe: Any,
    ) -> None:  # fmt: skip
        self.refusals: list[str] = []
        self.recipe, self.generator = recipe, torch.Generator().manual_seed(seed)
        kind, rank = (text, None) if text != "low rank" else ("gaussian", 2)
        shape = (batch, heads, slots, size)
        keys = make_keys(kind, shape, self.generator)
        if rank:
            keys = keys[..., :rank] @ torch.randn(min(rank, size), size, generator=self.generator)
        values = torch.randn(*shape[:3], value_size or size, generator=self.generator)
        largest = min(torch.finfo(getattr(torch, dtype)).max, torch.finfo(torch.float32).max)
        keys, values = (_scaled(x, f, largest).to(getattr(torch, dtype))
                        for x, f in ((keys, key_factor), (values, value_factor)))  # fmt: skip
        mask = torch.ones(batch, slots, dtype=torch.bool)
        mask[-1, : min(pad, slots)] = False
        rotary = Rotary.from_theta(1e4, size) if size % 2 == 0 else None
        state = KVState.from_kv(keys, values, mask, rotary=rotary)
        if merged:
            times = torch.randint(1, 9, (batch, 1, slots), generator=self.generator).float().expand(shape[:3])
            degree = (times * state.degree).contiguous()
            state = replace(state, degree=degree, seen=degree[:, 0].sum(-1).long())
        asked = torch.randn(batch, heads, 12, size, generator=self.generator)
        self.state = replace(state, head_data={QUERIES: asked})

    def compress(self, budget: float | int = 0.4) -> None:
        """To that budget, by every back end that takes it; go on with what the reference says."""
        state = self.state
        try:
            built = make_compressor(**{**self.recipe, "budget": budget})
        except CentroidKVError as error:
            self.refusals.append(f"configuration: {error}")
            return
        reference, refused = self._run(built.with_(backend="reference"), state)
        names = ["auto", "fastest"] + [b.name for b in (BLOCKED, NATIVE) if b.why_not(built.stages) is None]
        for name in names:
            try:
                got, why = self._run(built.with_(backend=name), state)
            except BackendError as error:
                self.refusals.append(f"{name}: {error}")
                continue
            expect((got is None) == (reference is None), "refusal", f"{name}: {why}; reference: {refused}")
            if got is not None and reference is not None:
                check_result(state, got, name)
                if not self._same_decisions(built, state, reference, got):
                    raise Wrong("difference", f"{name} decides otherwise than the reference, without a close call")
                self._close(state, reference, got, name)
        if reference is None:
            self.refusals.append(str(refused))
            return
        check_result(state, reference, "reference")
        self.state = replace(reference, head_data=state.head_data)

    def beside(self, times: int = 4, budget: float | int = 0.4) -> None:
        """Another thread compresses this state; threads that begin meanwhile have PyTorch's usual number of threads."""
        try:
            built = make_compressor(**{**self.recipe, "budget": budget})
        except CentroidKVError:
            return
        usual, found = torch.get_num_threads(), set()

        def compress() -> None:
            with contextlib.suppress(CentroidKVError):
                for _ in range(times):
                    built(self.state, strict=False)

        thread = threading.Thread(target=compress)
        thread.start()
        while thread.is_alive():
            other = threading.Thread(target=lambda: found.add(torch.get_num_threads()))
            other.start()
            other.join()
        thread.join()
        expect(found <= {usual}, "threads", f"threads begun meanwhile have {sorted(found)} of PyTorch's, not {usual}")

    def _run(self, compressor: Any, state: KVState) -> tuple[KVState | None, str]:
        before = [x.clone() for x in (state.keys, state.values, state.degree, state.positions)]
        try:
            result, why = compressor(state, strict=False), ""
        except BackendError:
            raise
        except CentroidKVError as error:
            result, why = None, f"{type(error).__name__}: {error}"
        for old, now in zip(before, (state.keys, state.values, state.degree, state.positions), strict=True):
            expect(old.equal(now), "state", f"{compressor.backend} changed its input")
        return result, why

    def _same_decisions(self, built: Any, state: KVState, a: KVState, b: KVState) -> bool:
        """Whether both kept the same slots with the same members, or the decision was so close that rounding decides.

        It was close if the reference itself decides otherwise, in float64 or in float32, where keys or values are moved
        by a few units in the last place. Both types: between keys of nearly the same direction a cosine hardly moves
        with its keys, and what decides is the rounding of the cosine itself.
        """
        if _decided(a, b):
            return True
        compressor = replace(built, backend="reference")
        unit = torch.finfo(torch.float32).eps
        for trial, dtype in product(range(6), (torch.float64, torch.float32)):
            noise = [1 + (trial + 1) * unit * torch.randn(x.shape, generator=self.generator, dtype=torch.float64)
                     for x in (state.keys, state.values)]  # fmt: skip
            moved = [(x.double() * by).to(dtype) for x, by in zip((state.keys, state.values), noise, strict=True)]
            wide = replace(state, keys=moved[0], values=moved[1])
            other, _ = self._run(compressor, replace(wide, head_data=state.head_data))
            if other is None or not _decided(a, other):
                return True
        return False

    def _close(self, state: KVState, a: KVState, b: KVState, name: str) -> None:
        """Same members, hence the same means, to rounding: of every round, in the type that is stored."""
        if not _decided(a, b):
            return
        live = a.degree > 0
        unit = torch.finfo(state.keys.dtype).eps
        for what in ("keys", "values"):
            x, y = (getattr(s, what).double()[live] for s in (a, b))
            size = getattr(state, what).double()
            size = size[state.degree > 0].abs().max() if bool((state.degree > 0).any()) else torch.zeros(())
            off = (x - y).abs().max() if x.numel() else torch.zeros(())
            rounds = max(a.rounds - state.rounds, 1)
            expect(off <= 4 * rounds * unit * size, "difference", f"{name}: {what} off by {off:.2e} of {size:.2e}")

    def finish(self) -> None:
        """Nothing is left."""


def _decided(a: KVState, b: KVState) -> bool:
    live = a.degree > 0
    same = a.degree.shape == b.degree.shape and a.degree.equal(b.degree)
    return bool(same and a.positions[live].equal(b.positions[live].to(a.positions.dtype)))


def _scaled(x: torch.Tensor, factor: float, largest: float) -> torch.Tensor:
    """``x`` times ``factor`` times what a type holds at most, if ``factor`` < 0; else times ``factor``."""
    if factor >= 0:
        return (x * factor).clamp(-largest, largest)
    return x.sign() * (-factor) * largest


def check_result(before: KVState, after: KVState, name: str) -> None:
    """Mass, order, and finite numbers."""
    live = after.degree > 0
    for what in ("keys", "values"):
        finite = getattr(after, what)[live].isfinite().all()
        expect(finite, "difference", f"{name}: {what} are not finite, though they were")
    evicted = after.degree.sum(-1).double()
    expect((evicted <= before.degree.sum(-1).double()).all(), "state", f"{name}: mass grew to {evicted.tolist()}")
    expect(after.degree.equal(after.degree.round()), "state", f"{name}: degrees are no counts")
    if after.degree.sum(-1).equal(before.degree.sum(-1)):  # nothing was evicted: the mean keeps the sum of all tokens
        unit = torch.finfo(before.keys.dtype).eps * max(after.rounds - before.rounds, 1)
        for what in ("keys", "values"):
            sums = []
            for state in (before, after):
                numbers = getattr(state, what).double().masked_fill((state.degree == 0)[..., None], 0.0)
                sums.append((state.degree[..., None].double() * numbers).sum(2))
            # A mean is taken around the slot that stays: it is rounded by that slot's size, not by its own.
            if not sums[0].numel() or not before.slots:
                continue
            size = float(before.degree.sum(-1).max()) * float(getattr(before, what).double().abs().max())
            off = float((sums[1] - sums[0]).abs().amax()) - 8 * unit * size - 1e-30
            expect(off <= 0, "difference", f"{name}: the sum of all {what} moved, by {off:.2e} too much")
    expect(after.seen.equal(before.seen), "state", f"{name}: seen {after.seen.tolist()}")
    for row in range(after.batch):
        for head in range(after.heads):
            places = after.positions[row, head, live[row, head]]
            old = set(before.positions[row, head, before.degree[row, head] > 0].tolist())
            expect((places.diff() > 0).all(), "state", f"{name}: positions {places.tolist()}")
            expect(set(places.tolist()) <= old, "state", f"{name}: positions of nobody in {places.tolist()}")
