"""A tiny model with a CentroidCache, each of whose steps is held against the oracle. Copied into failing scripts."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from centroidkv.errors import CentroidKVError
from centroidkv.integrations.transformers import CentroidCache, enable
from tools.fuzz.alone import Alone, NotAlone
from tools.fuzz.found import Wrong, expect, expect_close
from tools.fuzz.holds import check_holds
from tools.fuzz.models import VOCABULARY, WINDOW, layer_kinds, three_models
from tools.fuzz.oracle import Held, Step, look, plain_step
from tools.fuzz.recipe import STORAGES, make_compressor

HIDDEN = float("-inf")
GRADS = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}
MASKS_2D = (None, "ones", "left", "right", "inside")
MASKS_4D = ("causal", "both", "documents", "soft", "sparse", "old")


class Cached:
    """A model, a cache, and what is known of its tokens.

    Every method is an operation. It does one thing, and checks it: the step's logits are the oracle's, or a
    CentroidKVError refuses the step and leaves the cache as it was. A refusal is noted in :attr:`refusals`.
    """

    def __init__(
        self, family: str = "llama", layers: int = 1, heads: int = 4, kv_heads: int = 2, attention: str = "sdpa",
        enabled: bool = True, dtype: str = "float32", autocast: str | None = None, text: str = "random", batch: int = 1,
        interval: int = 8, storage: str | None = None, capacity: str = "growing", named: bool = False,
        alone: bool = False, seed: int = 0, beside: Cached | None = None, **recipe: Any,
    ) -> None:  # fmt: skip
        warnings.simplefilter("ignore")
        self.kinds, self.batch, self.text, self.autocast, self.dtype = (
            layer_kinds(family, layers), batch, text, autocast, dtype,
        )  # fmt: skip
        self.refusals: list[str] = []
        self.compare_alone, self.interval, self.capacity = alone, interval, capacity
        self.attention = attention
        if beside is None:
            self.model, self.plain, self.exact = three_models(
                family, layers, heads, kv_heads, attention, dtype, seed % 3
            )
            self.model.set_attn_implementation(attention)  # whatever the last life left
        else:  # another user of the same model
            self.model, self.plain, self.exact = beside.model, beside.plain, beside.exact
        self.generator = torch.Generator().manual_seed(seed)
        self.handles: list[Any] = []
        self.storage = STORAGES[storage]()
        self.compressor = make_compressor(**recipe)
        config = self.model.config if named else None
        self.cache = CentroidCache(
            self.compressor,
            interval,
            storage=self.storage,
            capacity=capacity,
            config=config,  # type: ignore[arg-type]
        )
        self.witnesses: list[tuple[Any, list[Held]]] = []
        self.forget()
        if enabled:
            self.switch()

    def forget(self) -> None:
        """Nothing was read yet."""
        self.alone = Alone(self) if self.compare_alone else NotAlone()
        self.columns = torch.zeros(self.batch, 0, dtype=torch.bool)
        self.padded = False

    @property
    def seen(self) -> list[int]:
        """Real tokens per row."""
        return self.columns.sum(-1).tolist()

    def switch(self) -> None:
        """Enter or leave ``enable``."""
        if self.handles:
            self.handles.pop().undo()
            return
        with self.may_refuse("enable"):
            self.handles.append(enable(self.model))

    @contextlib.contextmanager
    def may_refuse(self, what: str) -> Any:
        """A named refusal is allowed, if it leaves the cache as it was, or says reset()."""
        before = look(self.cache)
        try:
            yield
        except Wrong:
            raise
        except CentroidKVError as error:
            self.refusals.append(f"{what}: {type(error).__name__}: {error}")
            same = same_as(before, look(self.cache))
            if "reset()" in str(error):
                self.reset()
            else:
                expect(same, "state", f"{what} was refused and changed the cache all the same: {error}")

    def reset(self) -> None:
        """Forget everything, as after a refusal that says so."""
        self.cache.reset()
        self.forget()

    def words(self, n: int, batch: int) -> torch.Tensor:
        """New token ids ``[batch, n]``."""
        if self.text == "equal":
            return torch.full((batch, n), 7)
        ids = torch.randint(3, VOCABULARY, (batch, n), generator=self.generator)
        if self.text == "repeat":
            return 5 + (torch.arange(n) % 3).expand(batch, n).contiguous()
        return ids

    # -- a step -----------------------------------------------------------------------------------------------------

    def feed(
        self, n: int = 1, mask: str | None = None, pad: Sequence[int] = (), wide: bool = True, additive: bool = False,
        explicit: bool = False, grad: str = "no_grad", cast: bool = True,
    ) -> None:  # fmt: skip
        """``n`` new tokens per row.

        ``mask``: None or "ones"; "left", "right", "inside" with ``pad`` columns of padding per row; or a 4-D one,
        ``additive`` or of booleans, with a column per token (``wide``) or per slot. ``explicit``: position ids are
        given where they need not be. ``grad``: the mode. ``cast``: under autocast, where the life has one.
        """
        if mask in MASKS_4D and ("sliding" in self.kinds or n == 0):
            return
        real = self._real(n, mask, pad)
        among = _among(mask if mask in MASKS_4D else "causal", n, self.generator)
        old, given = None, None
        padded = self.padded or not bool(real.all())
        held = look(self.cache)
        slots = held[0].keys.shape[2] if held and held[0].keys is not None else 0
        if mask in MASKS_4D:
            if padded:
                return
            width = self.columns.shape[1] if wide else slots
            if mask == "old":
                old = torch.zeros(n, width).masked_fill(torch.rand(width, generator=self.generator) < 0.3, HIDDEN)
            given = torch.cat((torch.zeros(n, width) if old is None else old, among), -1)[None, None]
            given = given.expand(self.batch, -1, -1, -1).clone()
            given = given.clamp(min=torch.finfo(self.model.dtype).min).to(self.model.dtype) if additive else given == 0
            if mask == "soft" and not additive:
                return
            if old is not None and width != slots:
                old = "columns are not slots"
        elif mask is not None or padded:
            given = torch.cat((self.columns, real), -1).long()
        ids = self.words(n, self.batch).masked_fill(~real, 0)
        positions = torch.tensor(self.seen)[:, None] + (real.long().cumsum(-1) - 1).clamp(min=0)
        options = {"position_ids": positions} if padded or explicit or mask in MASKS_4D else {}
        self._step(ids, given, options, real, positions, among, old, held, grad, cast)

    def _step(self, ids, given, options, real, positions, among, old, held, grad="no_grad", cast=True) -> None:
        columns = torch.cat((self.columns, real), -1)
        refusals = len(self.refusals)
        logits = None
        if not ids.shape[1] and not self._plain_takes_nothing(options):
            return
        with self.may_refuse(f"feed {tuple(ids.shape)}"), GRADS[grad](), self._casting(cast):
            logits = self.model(ids, attention_mask=given, past_key_values=self.cache, use_cache=True, **options).logits
        if len(self.refusals) > refusals:
            return
        assert logits is not None
        expect(not isinstance(old, str), "difference", "a mask with content over tokens that have no slot was obeyed")
        after = look(self.cache)
        begun = self.columns.shape[1]
        self.columns, self.padded = columns, self.padded or not bool(real.all())
        logits = logits.detach()
        for row in range(self.batch):
            mine = real[row].nonzero()[:, 0]
            if not len(mine):
                continue
            step = Step(ids[row, mine], positions[row, mine], begun + mine, among[mine][:, mine],
                        None if old is None else old[mine], WINDOW)  # fmt: skip
            wanted = []
            for model, casting in ((self.plain, self._casting(cast)), (self.exact, contextlib.nullcontext())):
                with casting:
                    wanted.append(plain_step(model, held, self.kinds, row, step, columns))
            expect_close(logits[row, mine], *wanted, f"logits of row {row} after {begun} columns, {len(mine)} new")
        self.check(held, after)
        self.alone.fed(self, ids, real, positions, given)

    @torch.no_grad()
    def _plain_takes_nothing(self, options: dict[str, Any]) -> bool:
        """Whether the plain model takes no new tokens at all; many reshape by -1 and fail."""
        try:
            self.plain(self.words(0, self.batch), use_cache=True, **options)
        except RuntimeError:
            return False
        return True

    def check(self, before: list[Held], after: list[Held]) -> None:
        """What always holds, after a step or an operation."""
        check_holds(self.cache, self.kinds, self.columns, before, after)

    def _casting(self, cast: bool) -> Any:
        if self.autocast is None or not cast:
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=getattr(torch, self.autocast))

    def _real(self, n: int, mask: str | None, pad: Sequence[int]) -> torch.Tensor:
        """Which of the new columns ``[B, n]`` are tokens."""
        real = torch.ones(self.batch, n, dtype=torch.bool)
        if mask not in ("left", "right", "inside") or n == 0:
            return real
        for row in range(self.batch):
            k = pad[row % len(pad)] if pad else 0
            k = k % (n + 1) if mask == "left" else k % n  # a chunk may be nothing but padding to a row
            start = {"left": 0, "right": n - k, "inside": min(1, n - k)}[mask]
            real[row, start : start + k] = False
        return real


def same_as(before: list[Held], after: list[Held]) -> bool:
    """Whether no layer was changed; layers that were laid out meanwhile and hold nothing are no change."""
    if not before:
        return all(held.keys is None for held in after)
    return len(before) == len(after) and all(a.same(b) for a, b in zip(before, after, strict=True))


def _among(mask: str, n: int, generator: torch.Generator) -> torch.Tensor:
    """``[n, n]``, added to logits among the new tokens."""
    if mask == "both":
        return torch.zeros(n, n)
    among = torch.zeros(n, n).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), HIDDEN)
    if mask == "documents":
        among[n // 2 :, : n // 2] = HIDDEN
    elif mask == "soft":
        among -= torch.rand(n, n, generator=generator)
    elif mask == "sparse":
        among = among.masked_fill(
            (torch.rand(n, n, generator=generator) < 0.4) & ~torch.eye(n, dtype=torch.bool), HIDDEN
        )
    return among
