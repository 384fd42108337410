"""One layer's state in buffers of constant size, so that a compiled decoding step never sees a new shape."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TypeVar

import torch
from torch import Tensor

from centroidkv.cache.capacity import capacity_for
from centroidkv.cache.growing import GrowingState
from centroidkv.cache.slots import Slots
from centroidkv.cache.storage import Held
from centroidkv.compressor import Compressor
from centroidkv.dense import last_live
from centroidkv.errors import CacheError, SavedCacheError
from centroidkv.guards import check_types
from centroidkv.rotary import Rotary
from centroidkv.state import KVState
from centroidkv.state_ops import fill_of, tensors_of, with_tensors

Result = TypeVar("Result")


class FixedState:
    """A layer of constant size: budget + interval slots, of which those not in use have degree 0.

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
        BudgetError, StageError: see :func:`~centroidkv.cache.capacity.capacity_for`.

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
        self._grown = GrowingState(compressor, interval, rotary)
        """The same slots and their clocks as they were when last caught up; its tensors are views of the buffers."""
        self.compressor, self.interval, self.rotary = compressor, interval, rotary
        self.trigger = self._grown.trigger
        self.capacity = capacity_for(compressor, interval)
        """C, the slots held and attended to."""
        self.clear()

    def clear(self) -> None:
        """Forget everything but the configuration, buffers included."""
        self._grown.clear()
        self.slots: Slots | None = None
        self._known = 0  # the cursor when it was last read
        self._wait = 0  # tokens after which clustering may be due, counted from then
        self._announced = 0  # steps begun since then: at least as many as were taken
        self._torn = False  # whether the buffers are being written anew

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
        taken = int(self.slots.cursor) - self._known
        if taken == 0:
            self._announced = 0
            return
        if taken > self._wait:
            raise CacheError(
                f"{taken} tokens were written since the cache was last asked, and clustering was due after "
                f"{self._wait}; it must be asked before every step, which transformers does unless a compiled forward "
                "pass is given a 4-D mask of your own. reset() the cache"
            )

        def catch_up() -> bool:
            due = self._grown.take_over(self._front(self._known + taken), taken)
            self._known, self._wait, self._announced = self._known + taken, self._grown.wait, 0
            return due

        self._all_or_nothing(catch_up, store=False)  # but where a row was due

    def _front(self, width: int) -> KVState:
        """The slots in use; views of the buffers, valid until the next event."""
        held = self._grown.state
        assert self.slots is not None  # callers saw to both
        assert held is not None
        views = {name: buffer[:, :, :width] for name, buffer in self.slots.by_slot.items()}
        return with_tensors(held, views, seen=self.slots.seen.clone(), rotary=self.rotary)

    def _store(self) -> None:
        """Move what is kept into the buffers; new buffers only if the batch is another one.

        Rows end at the cursor, behind as many empty slots as the longest row has more.
        """
        held = self._grown.state
        if held is None:
            return
        width, wait = max(self._grown.counts, default=0), self._grown.wait
        if width + wait > self.capacity:
            short = f"the compressor did not come down to its budget; take a schedule that does: {self.compressor!r}"
            reason = "clustering waits for the crop that assisted generation announced" if self.waits else short
            raise CacheError(
                f"{width} slots are left after {self._grown.logical} tokens, and {wait} more may come until clustering "
                f"is due, but the capacity is {self.capacity} (budget {self.compressor.budget.slots(0)} + interval "
                f"{self.interval}): {reason}. reset() the cache; capacity='growing' needs no room ahead"
            )
        state = last_live(held, width)
        if self.slots is None or not self.slots.fits(state):
            self.slots = Slots.for_state(state, self.capacity)
        self._torn, mine = True, self.slots.by_slot
        for name, tensor in tensors_of(state).items():
            mine[name][:, :, :width] = tensor
            if name not in ("keys", "values", "positions"):  # these are not looked at where the degree is 0
                mine[name][:, :, width:] = fill_of(state, name)
        self.slots.seen.copy_(state.seen)
        self.slots.cursor.fill_(width)
        self.slots.tokens.fill_(self._grown.logical)
        self._known, self._wait, self._announced = width, wait, 0
        self._grown.lie_in(self._front(width))

    def _all_or_nothing(self, change: Callable[[], Result], store: bool = True) -> Result:
        """``change()``, then the buffers; whatever ends it, all is as before, or says reset().

        A call, not a context manager: an interrupt at the end of a ``with`` would take back what the buffers hold.
        """
        before, grown = dict(vars(self)), copy(self._grown)
        try:
            result = change()
            if store or result:
                self._store()
        except BaseException:
            vars(self).update(before, _grown=grown, _torn=self._torn)
            raise
        self._torn = False  # an interrupt before this leaves new buffers, which then count as torn
        return result

    # -- everything else: catch up first, go back into the buffers afterwards ---------------------------------------

    def append(
        self, keys: Tensor, values: Tensor, real: Tensor | None = None, queries: Tensor | None = None,
        degrees: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """As :meth:`GrowingState.append`, any number of tokens; not inside a compiled graph."""
        self.settle()
        # Buffers hold no padding, so their slots are not the mask's columns even before anything was merged.
        packed = any(count != self._grown.logical for count in self._grown.counts)
        return self._all_or_nothing(lambda: self._grown.append(keys, values, real, queries, degrees or packed))

    def restore(self, state: KVState, logical: int) -> None:
        """As :meth:`GrowingState.restore`."""
        self._all_or_nothing(lambda: self._grown.restore(state, logical))

    def reorder(self, rows: Tensor) -> None:
        """Keep, repeat or permute rows; another number of rows means new buffers, and so another compilation."""
        self.settle()
        self._all_or_nothing(lambda: self._grown.reorder(rows))

    def crop(self, tokens: int) -> None:
        """As :meth:`GrowingState.crop`."""
        self.settle()
        self._all_or_nothing(lambda: self._grown.crop(tokens))

    def check_crop(self, tokens: int) -> None:
        """As :meth:`GrowingState.check_crop`."""
        self.settle()
        self._grown.check_crop(tokens)

    def fetch(self) -> None:
        """Everything is near."""

    def pack(self) -> tuple[list[Held], dict[str, object]]:
        """Not supported: SavedCacheError."""
        raise SavedCacheError("a cache of fixed capacity cannot be saved; use CentroidCache(capacity='growing')")

    # -- reading: after what was written since is counted -----------------------------------------------------------

    @property
    def known_logical(self) -> int:
        """Columns seen when the state last caught up; waits for nothing."""
        return self._grown.logical

    @property
    def logical(self) -> int:
        """Columns seen, padding included; on a GPU this waits for the last step."""
        return self._caught_up().logical

    @property
    def state(self) -> KVState | None:
        """The slots in use, as attention sees them: views of the buffers, valid until the next event."""
        return self._caught_up().state

    @property
    def like(self) -> KVState | None:
        """Some state of the same batch, heads, channels, types and device, for those who need no contents."""
        return self._grown.like

    @property
    def events(self) -> int:
        """How often clustering ran, of the row where it ran most."""
        return self._caught_up().events

    @property
    def moved(self) -> bool:
        """Whether slots may stand for other columns than their places say."""
        return self._caught_up().moved

    @property
    def physical(self) -> int:
        """Slots in use; :attr:`capacity` are held."""
        return self._caught_up().physical

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, empty slots included: constant from the first token on."""
        return 0 if self.slots is None else sum(tensor.nbytes for tensor in self.slots.tensors)

    @property
    def nbytes_full(self) -> int:
        """Bytes of keys and values had nothing been compressed."""
        return self._caught_up().nbytes_full

    @property
    def seconds(self) -> float:
        """Time spent compressing."""
        return self._grown.seconds

    @property
    def waits(self) -> bool:
        """Whether newly appended tokens are clustered only after the next :meth:`crop`."""
        return self._grown.waits

    @waits.setter
    def waits(self, wanted: bool) -> None:
        self._grown.waits = wanted

    def _caught_up(self) -> GrowingState:
        self.settle()
        return self._grown
