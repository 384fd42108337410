"""Everything that may happen to a CentroidCache between two steps, and in the middle of one. Copied into scripts."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from centroidkv.cache import FixedState, GrowingState
from centroidkv.compressor import Compressor
from centroidkv.integrations.transformers import CentroidCache, enable
from tools.fuzz.alone import NotAlone
from tools.fuzz.cached import Cached, same_as
from tools.fuzz.found import expect
from tools.fuzz.models import attention_modules
from tools.fuzz.oracle import look


class Stopped(KeyboardInterrupt):
    """Ctrl-C, at a place of our choice."""


class Exhausted(MemoryError):
    """No memory, at a place of our choice."""


class Broken(ArithmeticError):
    """Anything else, at a place of our choice."""


ERRORS = {error.__name__: error for error in (Stopped, Exhausted, Broken)}
PLACES = ("attention", "attended", "append", "appended", "compress", "compressed")


class Life(Cached):
    """A cache that is cropped, reordered, copied, saved, shared and interrupted."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        super().__init__(**options)

    # -- between two steps --------------------------------------------------------------------------------------------

    def crop(self, tokens: int = 1) -> None:
        """Take back the last columns. transformers refuses on its own where a sliding window has moved on."""
        tokens = min(tokens, self.columns.shape[1])
        before = look(self.cache)
        refusals = len(self.refusals)
        try:
            with self.may_refuse(f"crop({tokens})"):
                self.cache.crop(-tokens)
        except (RuntimeError, ValueError) as error:
            expect("sliding" in self.kinds, "raw error", f"crop({tokens}): {type(error).__name__}: {error}")
            expect(same_as(before, look(self.cache)), "state", f"a crop was refused half-way: {error}")
            return
        if len(self.refusals) == refusals:
            left = self.columns.shape[1] - tokens
            gone, self.columns = self.columns[:, left:], self.columns[:, :left]
            self.check([], look(self.cache))
            self.alone.cropped(self, gone.sum(-1).tolist())

    def record(self) -> None:
        """Assisted generation begins: new tokens wait for a crop before they are clustered."""
        self.cache.activate_past_recording()
        self.alone = NotAlone()

    def reorder(self, rows: Sequence[int] = (0,), how: str = "reorder") -> None:
        """Rows of the batch are permuted, dropped ("select") or repeated ("repeat": ``rows[0] + 1`` times)."""
        rows = [row % self.batch for row in rows]
        if how == "reorder":
            rows = [rows[i % len(rows)] for i in range(self.batch)]
        elif how == "repeat":
            times = rows[0] % 3 + 1
            rows = [row for row in range(self.batch) for _ in range(times)]
        before = look(self.cache)
        if not before:
            return
        with self.may_refuse(how):
            if how == "reorder":
                self.cache.reorder_cache(torch.tensor(rows))
            elif how == "select":
                self.cache.batch_select_indices(torch.tensor(rows))
            else:
                self.cache.batch_repeat_interleave(len(rows) // self.batch)
            wanted = [held if held.keys is None else held.rows(rows) for held in before]
            pairs = zip(wanted, look(self.cache), strict=True)
            same = all(a.packed().same(b.packed()) for a, b in pairs) or not self.columns.shape[1]
            expect(same, "state", f"{how} {rows} did not move everything of the rows")
            self.batch, self.columns = len(rows), self.columns[rows]
            self.alone.reordered(rows)

    def copy(self, go_on_with: str = "copy") -> None:
        """A deep copy; the one that is not continued must stay as it is until the end."""
        before = look(self.cache)
        if any(x is not None and x.requires_grad for layer in self.cache.layers for x in (layer.keys, layer.values)):
            return  # a sliding window's, which are as in any cache of transformers: PyTorch copies no such tensor
        twin = copy.deepcopy(self.cache)
        expect(same_as(before, look(twin)), "state", "a deep copy is not equal")
        stays = self.cache
        if go_on_with == "copy":
            self.cache = twin
        else:
            stays = twin
        self.witnesses.append((stays, before))

    def save(self) -> None:
        """Written to a file and read back; what happens to the file afterwards must not matter."""
        before = look(self.cache)
        with tempfile.TemporaryDirectory() as folder, self.may_refuse("save"):
            path = Path(folder, "cache.safetensors")
            self.cache.save(path)
            loaded = CentroidCache.load(path, self.compressor, config=self.model.config, storage=self.storage)
            expect(same_as(before, look(loaded)), "state", "a loaded cache is not what was saved")
            with path.open("r+b") as file:
                file.write(b"\x3f" * path.stat().st_size)
            expect(same_as(before, look(loaded)), "state", "a loaded cache changes with its file")
            self.cache = loaded

    def wrong_batch(self, batch: int = 3) -> None:
        """Another number of rows on a used cache."""
        if not self.columns.shape[1] or batch == self.batch:
            return
        refusals = len(self.refusals)
        with self.may_refuse(f"{batch} rows on a cache of {self.batch}"), torch.no_grad():
            self.model(self.words(2, batch), past_key_values=self.cache)
        expect(len(self.refusals) > refusals, "unnamed", f"{batch} rows were taken by a cache of {self.batch}")

    # -- in the middle of a step --------------------------------------------------------------------------------------

    def interrupt(self, n: int = 1, where: str = "attention", at: int = 0, error: str = "Broken") -> None:
        """``n`` new tokens, but the ``at``-th time that ``where`` is reached, ``error`` is raised.

        Afterwards the step has not been, or it has, or the cache refuses to go on until reset().
        """
        before, seen = look(self.cache), self.columns

        def stop() -> None:
            raise ERRORS[error]

        try:
            with self.during(where, at, stop):
                self.feed(n)
            return  # so often it was not reached, and the step was checked
        except tuple(ERRORS.values()):
            self.columns = seen
        after = look(self.cache)
        if same_as(before, after):
            return
        if len({held.logical for held in after}) == 1 and after[0].logical == seen.shape[1] + n:
            self.columns = torch.cat((seen, torch.ones(self.batch, n, dtype=torch.bool)), -1)
            self.check([], after)
            return
        refusals = len(self.refusals)
        with self.may_refuse("a torn cache"), torch.no_grad():
            self.model(self.words(1, self.batch), past_key_values=self.cache)
        told = self.refusals[refusals:]
        expect(
            told, "difference", f"{error} in {where} {at} left layers of {[h.logical for h in after]} tokens, unnoticed"
        )
        expect("reset()" in told[0], "refusal", f"a torn cache says {told[0]!r}, not reset()")

    def leave(self, n: int = 1, where: str = "append", at: int = 0, alone: bool = False) -> None:
        """In the middle of a step the first user leaves ``enable``; another one stays (or nobody: ``alone``)."""
        if not self.handles:
            return
        first = self.handles.pop()
        if not alone:
            self.handles.append(enable(self.model))
        with self.during(where, at, first.undo):
            self.feed(n)
        first.undo()

    def neighbour(
        self, n: int = 1, where: str = "attention", at: int = 0, tokens: int = 20, enabled: bool = True,
        stays: bool = False,
    ) -> None:  # fmt: skip
        """In the middle of a step another thread uses the same model with a cache of its own.

        It calls ``enable`` if ``enabled``, and leaves before this step goes on, or after it if it ``stays``.
        """
        other = Life(**{**self.options, "enabled": False, "batch": 1, "beside": self})
        errors: list[BaseException] = []

        def job() -> None:
            try:
                if enabled:
                    other.switch()
                other.feed(tokens)
                other.feed(1)
                if not stays:
                    other.finish(alone=False)
            except BaseException as error:  # raised again in the thread that waits
                errors.append(error)

        def meanwhile() -> None:
            thread = threading.Thread(target=job)
            thread.start()
            thread.join()

        with self.during(where, at, meanwhile):
            self.feed(n)
        if stays:
            other.finish(alone=False)
        if errors:
            raise errors[0]

    @contextlib.contextmanager
    def during(self, where: str, at: int, action: Callable[[], None]) -> Iterator[None]:
        """Run ``action`` the ``at``-th time that ``where`` is reached in this thread, once."""
        self.alone = NotAlone()  # whose steps would be counted too
        here, count = threading.get_ident(), iter(range(10**9))

        def reached() -> None:
            if threading.get_ident() == here and next(count) == at:
                action()

        if where.startswith("att"):
            modules = attention_modules(self.model)
            add = [m.register_forward_pre_hook if where == "attention" else m.register_forward_hook for m in modules]
            hooks = [hook(lambda *_: reached()) for hook in add]
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()
            return
        if where == "handed":  # from the cache, not yet to the attention
            owners: list[tuple[type, str]] = [(CentroidCache, "update")]
        elif where.startswith("comp"):
            owners = [(Compressor, "__call__")]
        else:
            owners = [(GrowingState, "append"), (FixedState, "step")]
        with contextlib.ExitStack() as stack:
            for owner, name in owners:
                stack.enter_context(_around(owner, name, reached, after=where.endswith("ed")))
            yield

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self, alone: bool = True) -> None:
        """Copies that were left alone are what they were, and the model has its attention back."""
        for cache, held in self.witnesses:
            expect(same_as(held, look(cache)), "state", "a copy of the cache was changed by going on with the other")
        while self.handles:
            self.handles.pop().undo()
        now = self.model.config._attn_implementation
        expect(not alone or now == self.attention, "state", f"the model attends with {now!r} after enable was left")


@contextlib.contextmanager
def _around(owner: type, name: str, action: Callable[[], None], after: bool) -> Iterator[None]:
    plain = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if after:
            result = plain(*args, **kwargs)
            action()
            return result
        action()
        return plain(*args, **kwargs)

    setattr(owner, name, wrapped)
    try:
        yield
    finally:
        setattr(owner, name, plain)
