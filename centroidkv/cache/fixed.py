"""One layer's state in buffers of constant size, so that a compiled decoding step never sees a new shape."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from centroidkv.cache.clock import after_event, after_packing
from centroidkv.cache.growing import GrowingState
from centroidkv.cache.parts import Whole
from centroidkv.cache.slots import Slots
from centroidkv.cache.storage import Held
from centroidkv.compressor import Compressor
from centroidkv.dense import last_live, map_rows
from centroidkv.errors import BudgetError, CacheError, SavedCacheError, StageError
from centroidkv.guards import check_types
from centroidkv.rotary import Rotary
from centroidkv.state import KVState
from centroidkv.state_ops import fill_of, tensors_of, with_tensors


class FixedState(GrowingState):
    """A GrowingState of constant size: budget + interval slots, of which those not in use have degree 0.

    :meth:`step` writes one token and has neither data-dependent shapes nor Python state, so a compiler may take it into
    its graph. Clustering is not part of a step: :meth:`begin`, called between steps, catches up with what was written
    and clusters into the same buffers. Results are those of a GrowingState of the same compressor and interval; an
    event runs before the next token instead of after the last. Prompts and other pieces of several tokens go through
    :meth:`append`, which is not for compilers.

    Args:
        compressor: with a token budget that its schedule always meets.
        interval: tokens between two compressions, >= 1.
        rotary: how keys are rotated, for stages that look at keys before RoPE.

    Raises:
        BudgetError: a ratio, which grows with the tokens seen, or a budget that the stages cannot keep to.
        StageError: the compressor needs queries, which cannot be seen inside a compiled step.

    >>> from centroidkv import Budget, presets
    >>> state = FixedState(presets.centroidkv(Budget.tokens(128)), interval=16)
    >>> prompt = torch.randn(1, 2, 200, 8)
    >>> _ = state.append(prompt, prompt)
    >>> for _ in range(40):
    ...     state.begin(1)
    ...     keys, values, degree = state.step(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8))
    >>> keys.shape[2], state.logical, degree.sum(-1).tolist()
    (144, 240, [[240.0, 240.0]])
    """

    def __init__(self, compressor: Compressor, interval: int, rotary: Rotary | None = None) -> None:
        budget = compressor.budget
        if budget.kind != "tokens":
            raise BudgetError(
                f"a fixed capacity needs a fixed budget, got {budget!r}, which grows with every token; use "
                "Budget.tokens(...), or capacity='growing'"
            )
        if compressor.needs_queries:
            raise StageError(
                "this compressor weighs slots by the model's queries, which a cache cannot see inside a compiled step; "
                f"choose one that needs none, such as presets.distinctive, or capacity='growing': {compressor!r}"
            )
        super().__init__(compressor, interval, rotary)
        self.capacity = int(budget.amount) + interval
        """C, the slots held and attended to."""
        if compressor.plannable and not compressor.plan(self.capacity).met:
            raise BudgetError(
                f"from {self.capacity} slots (budget + interval) this compressor comes down to "
                f"{compressor.plan(self.capacity).final}, over its {budget!r}, so no fixed number of slots would do; "
                f"use a schedule that ends at the budget: {compressor!r}"
            )

    def clear(self) -> None:
        """Forget everything but the configuration, buffers included."""
        self.slots: Slots | None = None
        self._known = 0  # the cursor when it was last read
        self._wait = 0  # tokens after which clustering may be due, counted from then
        self._announced = 0  # steps begun since then: at least as many as were taken
        self._torn = False  # whether the buffers are being written anew
        super().clear()

    # -- decoding, one token at a time ----------------------------------------------------------------------------

    def step(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write one token, ``keys [B, H, 1, D]`` and ``values [B, H, 1, Dv]``, real in every row.

        Returns:
            All C slots to attend to: keys, values, and degrees ``[B, H, C]`` float32. They are the buffers themselves.

        Raises:
            CacheError, DtypeError: the token does not fit the buffers, or there are none yet (append a prompt first).
            RuntimeError: no slot is left, because :meth:`begin` was not called before every step.
        """
        slots = self.slots
        if slots is None or keys.shape[:2] != slots.keys.shape[:2] or keys.shape[2] != 1:
            held = "nothing yet" if slots is None else f"{slots.keys.shape[0]} rows of {slots.keys.shape[1]} KV heads"
            raise CacheError(
                f"a step takes one token for the rows and KV heads held; held: {held}, got {tuple(keys.shape)}"
            )
        check_types(slots, keys, values)
        torch._assert_async(
            slots.cursor[0] < self.capacity,
            f"all {self.capacity} slots are taken: clustering was due and the cache was not asked between the steps. "
            "Pass no 4-D mask of your own to a compiled forward pass, or call the cache's get_mask_sizes before it",
        )
        slots.keys.index_copy_(2, slots.cursor, keys.detach())
        slots.values.index_copy_(2, slots.cursor, values.detach())
        slots.degree.index_fill_(2, slots.cursor, 1.0)
        place = slots.seen.to(slots.positions.dtype)[:, None, None].expand(*keys.shape[:3])
        slots.positions.index_copy_(2, slots.cursor, place)
        for count in (slots.seen, slots.cursor, slots.tokens):
            count.add_(1)
        return slots.keys, slots.values, slots.degree

    def begin(self, new: int) -> None:
        """Say that ``new`` tokens are about to come; clusters if it is due. Between steps, outside compiled graphs.

        The cursor is read, and a GPU waited for, only when clustering may be due: once in ``interval`` tokens.
        Announcing a step twice, or one that is not taken, does no harm.
        """
        if self._announced >= self._wait:
            self.settle()
        self._announced += new

    def settle(self) -> None:
        """Catch up with the steps taken, and cluster if it is due.

        Raises:
            CacheError: clustering was due some tokens ago, because :meth:`begin` was not called before every step.
        """
        if self.slots is None:
            return
        if self._torn:
            raise CacheError("an earlier step stopped while the buffers were written; reset() the cache")
        self._announced = 0
        taken = int(self.slots.cursor) - self._known
        if taken == 0:
            return
        if taken > self._wait:
            raise CacheError(
                f"{taken} tokens were written since the cache was last asked, and clustering was due after "
                f"{self._wait}; it must be asked before every step, which transformers does unless a compiled forward "
                "pass is given a 4-D mask of your own. reset() the cache"
            )
        grown = self._front(self._known + taken)
        clocks = [clock.after(taken, taken) for clock in self._clocks]
        due = [row for row, clock in enumerate(clocks) if clock.due(self.trigger)]
        start = time.perf_counter()
        kept = map_rows(grown, due, lambda rows: self._compress(rows, None, due)) if due else grown
        clocks = after_event(clocks, due, grown, kept) if due else clocks
        # From here on nothing of the compressor's can fail: an error above leaves everything to be settled again.
        self._known += taken
        self._logical += taken
        self._clocks, self._kept = clocks, Whole(kept)
        if due:
            self._store()
            self.seconds += time.perf_counter() - start
        self._wait = self._until_due()

    def _until_due(self) -> int:
        """Tokens until some row may be due, at least 1."""
        return min((clock.wait(self.trigger) for clock in self._clocks), default=1)

    def _front(self, width: int) -> KVState:
        """The slots in use; views of the buffers, valid until the next event."""
        assert self.slots is not None  # callers saw to both
        assert self._kept is not None
        views = {name: buffer[:, :, :width] for name, buffer in self.slots.by_slot.items()}
        return with_tensors(self._kept.state(), views, seen=self.slots.seen.clone(), rotary=self.rotary)

    def _store(self) -> None:
        """Move what is kept into the buffers; new buffers only if the batch is another one.

        Rows end at the cursor, behind as many empty slots as the longest row has more.
        """
        if self._kept is None:
            return
        width = max((clock.live for clock in self._clocks), default=0)
        wait = self._until_due()
        if width + wait > self.capacity:
            raise CacheError(
                f"{width} slots are left after {self._logical} tokens, and {wait} more may come until clustering is "
                f"due, but the capacity is {self.capacity} (budget {self.compressor.budget.slots(0)} + interval "
                f"{self.interval}): the compressor did not come down to its budget. reset() the cache and use "
                f"capacity='growing', or a schedule that ends at the budget: {self.compressor!r}"
            )
        held = self._kept.state()
        state, self._clocks = last_live(held, width), after_packing(self._clocks, held)
        if self.slots is None or not self.slots.fits(state):
            self.slots = Slots.for_state(state, self.capacity)
        self._torn, mine = True, self.slots.by_slot
        for name, tensor in tensors_of(state).items():
            mine[name][:, :, :width] = tensor
            if name not in ("keys", "values", "positions"):  # these are not looked at where the degree is 0
                mine[name][:, :, width:] = fill_of(state, name)
        self.slots.seen.copy_(state.seen)
        self.slots.cursor.fill_(width)
        self.slots.tokens.fill_(self._logical)
        self._known, self._wait, self._announced = width, wait, 0
        self._kept, self._torn = Whole(self._front(width)), False

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Change what is kept, then the buffers. If interrupted, both tell the same afterwards, or say reset()."""
        before = dict(vars(self))
        try:
            yield
            self._store()
        except BaseException:
            vars(self).update(before, _torn=self._torn)
            raise

    # -- everything else: catch up first, go back into the buffers afterwards ---------------------------------------

    def append(
        self, keys: Tensor, values: Tensor, real: Tensor | None = None, queries: Tensor | None = None,
        degrees: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """As in a GrowingState, any number of tokens; not inside a compiled graph."""
        self.settle()
        # Buffers hold no padding, so their slots are not the mask's columns even before anything was merged.
        packed = any(clock.live != self._logical for clock in self._clocks)
        with self._all_or_nothing():
            return super().append(keys, values, real, queries, degrees or packed)

    def restore(self, state: KVState, logical: int) -> None:
        """As in a GrowingState."""
        with self._all_or_nothing():
            super().restore(state, logical)

    def reorder(self, rows: Tensor) -> None:
        """As in a GrowingState; another number of rows means new buffers, and so another compilation."""
        self.settle()
        with self._all_or_nothing():
            super().reorder(rows)

    def crop(self, tokens: int) -> None:
        """As in a GrowingState."""
        self.settle()
        with self._all_or_nothing():
            super().crop(tokens)

    def pack(self) -> tuple[list[Held], dict[str, object]]:
        """Not supported: SavedCacheError."""
        raise SavedCacheError("a cache of fixed capacity cannot be saved; use CentroidCache(capacity='growing')")

    @property
    def known_logical(self) -> int:
        """Columns seen when the state last caught up; waits for nothing."""
        return self._logical

    @property
    def logical(self) -> int:
        """Columns seen, padding included; on a GPU this waits for the last step."""
        self.settle()
        return self._logical

    @logical.setter
    def logical(self, columns: int) -> None:
        self._logical = columns

    @property
    def state(self) -> KVState | None:
        """The slots in use, as attention sees them: views of the buffers, valid until the next event."""
        self.settle()
        return super().state

    @property
    def events(self) -> int:
        """How often clustering ran, of the row where it ran most."""
        self.settle()
        return super().events

    @property
    def physical(self) -> int:
        """Slots in use; :attr:`capacity` are held."""
        self.settle()
        return super().physical

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, empty slots included: constant from the first token on."""
        return 0 if self.slots is None else sum(tensor.nbytes for tensor in self.slots.tensors)
