"""Requests of a server in one pool of pages, each of whose steps is held against the oracle. Copied into scripts.

The oracle: what a token sees are the tokens before it, every centroid put as many times as ln N says, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from centroidkv import Rotary
from centroidkv.attention import paged_degree_attention
from centroidkv.attention.limits import kernel_fits
from centroidkv.attention.paged.native import why_not
from centroidkv.integrations.vllm import ServingOptions, ServingPlan
from centroidkv.paged.attend import attend, causal_attention
from centroidkv.paged.batch import lay_out
from centroidkv.paged.cluster import cluster
from centroidkv.paged.pages import Pages, slot_bytes
from centroidkv.testing.strategies import make_keys
from tools.fuzz.found import expect, expect_close

TOKENS = 400
"""The longest request."""


class Request:
    """One request's numbers, made ahead, so that it brings the same ones when it is computed again."""

    def __init__(self, prompt: int, pool: Pool, generator: torch.Generator) -> None:
        shape = (TOKENS, pool.heads * pool.groups, pool.size)
        keys = make_keys(pool.text, (1, pool.heads, TOKENS, pool.size), generator)[0].transpose(0, 1)
        values = torch.randn(TOKENS, pool.heads, pool.value_size, generator=generator)
        self.query, self.keys, self.values = (
            x.to(pool.dtype) for x in (torch.randn(shape, generator=generator), keys, values)
        )
        self.prompt, self.computed = prompt, 0
        self.table: list[int] = []
        self.said: dict[int, torch.Tensor] = {}
        """What each token read when it was computed first."""


class Pool:
    """A pool of pages, filled with NaN; blocks that are given back are handed on to others at once."""

    def __init__(
        self, preset: str = "centroidkv", budget: float | int = 0.25, interval: int = 32, sinks: int | None = 1,
        recent: int | None = 4, block: int = 16, heads: int = 2, groups: int = 2, size: int = 8,
        value_size: int | None = None, dtype: str = "float32", text: str = "gaussian", seed: int = 0,
    ) -> None:  # fmt: skip
        self.heads, self.groups, self.size, self.value_size = heads, groups, size, value_size or size
        self.dtype, self.text, self.block = getattr(torch, dtype), text, block
        if preset == "streaming_llm":
            sinks = recent = None
        options = ServingOptions(preset=preset, budget=budget, interval=interval, sinks=sinks, recent=recent)
        self.plan = ServingPlan(options.compressor(self.dtype), block, interval)
        self.evicts = bool(getattr(self.plan.compressor.matching, "evicts", False))
        self.rotary = Rotary.from_theta(1e4, size)
        self.generator = torch.Generator().manual_seed(seed)
        self.requests: list[Request] = []
        positions = self.plan.compressor.needs_rotary
        channels = slot_bytes(size, self.value_size, self.dtype, positions) // self.dtype.itemsize
        count = 5 * -(-TOKENS // block) + 1
        cache = torch.full((count, heads, block, channels), float("nan"), dtype=self.dtype)
        self.pages = Pages.of(cache, size, self.value_size, positions)
        self.free = (torch.randperm(count - 1, generator=self.generator) + 1).tolist()
        self.scale = size**-0.5
        self.refusals: list[str] = []

    def request(self, prompt: int = 40) -> None:
        """A new request; at most five at a time."""
        if len(self.requests) < 5:
            self.requests.append(Request(min(prompt, TOKENS), self, self.generator))

    def preempt(self, which: int = 0) -> None:
        """Take all blocks of a request away; it will compute prompt and output again, in steps of any size."""
        if self.requests:
            request = self.requests[which % len(self.requests)]
            self.free.extend(block for block in request.table if block)
            request.table, request.computed = [], 0

    def end(self, which: int = 0) -> None:
        """A request is done; its blocks go to others."""
        if self.requests:
            self.preempt(which)
            self.requests.pop(which % len(self.requests))

    @torch.no_grad()
    def step(self, new: Sequence[int] = (1,)) -> None:
        """One step: ``new`` tokens of each request, in turn."""
        requests, plan = self.requests, self.plan
        counts = [min(new[i % len(new)], TOKENS - r.computed) for i, r in enumerate(requests)]
        if not requests or not sum(counts):
            return
        starts, lengths = [0], []
        for request, count in zip(requests, counts, strict=True):
            lengths.append(request.computed + count)
            starts.append(starts[-1] + count)
            for at in range(plan.region(request.prompt, request.computed).first):
                if request.table[at]:
                    self.free.append(request.table[at])
                    request.table[at] = 0
            while len(request.table) * self.block < lengths[-1]:
                request.table.append(self.free.pop(0))
        spans = [slice(r.computed, length) for r, length in zip(requests, lengths, strict=True)]
        width = max(len(r.table) for r in requests)
        table = torch.tensor([r.table + [0] * (width - len(r.table)) for r in requests])
        places = torch.cat([
            table[i, torch.arange(s.start, s.stop) // self.block] * self.block
            + torch.arange(s.start, s.stop) % self.block for i, s in enumerate(spans)
        ])  # fmt: skip
        query = torch.cat([r.query[s] for r, s in zip(requests, spans, strict=True)])
        self.pages.write(*(torch.cat([getattr(r, name)[s] for r, s in zip(requests, spans, strict=True)])
                           for name in ("keys", "values")), places)  # fmt: skip
        batch = lay_out(plan, [r.prompt for r in requests], starts, lengths, table)
        seen = [self._visible(r, s.start) for r, s in zip(requests, spans, strict=True)]
        moments = [{s.start: was} for s, was in zip(spans, seen, strict=True)]
        by_table = {tuple(r.table): i for i, r in enumerate(requests)}

        def carry_out(blocks: torch.Tensor, event: Any) -> None:
            which = by_table[tuple(blocks.tolist())]
            self._cluster(requests[which], event)
            moments[which][event.tokens] = self._visible(requests[which], event.tokens)

        out = torch.full((len(query), self.heads * self.groups, self.value_size), float("nan"), dtype=self.dtype)
        attend(query, self.pages, batch, self.scale, out, carry_out, causal_attention)
        self._compare_back_ends(batch.decode, query, out)
        for i, (request, span) in enumerate(zip(requests, spans, strict=True)):
            self._compare(request, span, moments[i], out[starts[i] : starts[i + 1]], f"request {i}")
            if span.stop > span.start:
                for event in plan.events(request.prompt, span.stop - 1, span.stop):
                    self._cluster(request, event)
            request.computed = span.stop

    def _cluster(self, request: Request, event: Any) -> None:
        """Carry out an event, in which sums over tokens are kept.

        A slot is rounded once in its type, and before it in float32, where its mean is taken around the slot that
        stays: by that slot's size, which may be far above the mean's (200 tokens of one key join one slot).
        """
        before, after = event.before, event.after
        sums = [self._sums(request.table[before.first : after.end])]
        cluster([self.pages], request.table, event, self.plan, self.rotary)
        sums.append(self._sums(request.table[after.first : after.end]))
        for what, was, now, size in zip(("keys", "values"), *(s[:2] for s in sums), sums[0][2:], strict=True):
            off, (added, largest) = float((now - was).abs().max()), size
            allowed = 4 * (torch.finfo(self.dtype).eps * added + torch.finfo(torch.float32).eps * largest)
            fine = self.evicts or off <= allowed
            expect(fine, "difference", f"{what} added up over all tokens moved by {off:.2e}, allowed are {allowed:.2e}")

    def _sums(self, blocks: list[int]) -> tuple[Any, ...]:
        """The sum over all tokens of keys and of values; for each, of its sizes and of the largest size there is."""
        keys, values, log_degree = (x.double() for x in self.pages.read(torch.tensor(blocks)))
        times = log_degree.exp().round()[..., None]
        sums = [(times * x).sum(1) for x in (keys, values)]
        tokens = float(times.sum(1).max())
        sizes = [(float((times * x.abs()).sum(1).max()), tokens * float(x.abs().max())) for x in (keys, values)]
        return *sums, *sizes

    def _visible(self, request: Request, tokens: int) -> tuple[torch.Tensor, ...]:
        """Keys ``[H, T, D]``, values and degrees of what stands for the first ``tokens`` tokens."""
        first = self.plan.region(request.prompt, tokens).first
        blocks = torch.tensor(request.table[first : -(-tokens // self.block)], dtype=torch.long)
        held = [x[:, : tokens - first * self.block].clone() for x in self.pages.read(blocks)]
        return held[0], held[1], held[2].exp().round()

    def _compare(self, request: Request, span: slice, moments: dict[int, Any], out: torch.Tensor, who: str) -> None:
        for start, held in moments.items():
            stop = min([m for m in moments if m > start], default=span.stop)
            if stop == start:
                continue
            keys, values, degree = held
            total = degree.sum(-1)
            right = torch.full_like(total, degree.shape[1] if self.evicts else start)
            expect(total.equal(right), "state", f"{who}: degrees add up to {total.tolist()} after {start} tokens")
            new = slice(start, stop)
            given = (keys, values, degree, request.keys[new], request.values[new], self.scale)
            wanted = [repeat_attention(request.query[new].to(dtype), *given) for dtype in (self.dtype, torch.float64)]
            got = out[start - span.start : stop - span.start]
            expect_close(got, *wanted, f"{who}, tokens {start} to {stop}")
            for token in range(start, stop):
                again, before = got[token - start], request.said.get(token)
                if before is not None:
                    exact = wanted[1][token - start]
                    expect_close(before, wanted[0][token - start], exact, f"{who}, token {token} computed again")
                request.said[token] = again

    def _compare_back_ends(self, decode: Any, query: torch.Tensor, out: torch.Tensor) -> None:
        """Every way to attend that can, on the requests with one token."""
        if decode is None:
            return
        views = [x.transpose(1, 2) for x in (self.pages.keys, self.pages.values, self.pages.log_degree)]
        asked = query[decode.rows]
        names = ["reference", "sdpa"] + ["native"] * (why_not(asked, *views[:2]) is None)
        names += ["triton"] * bool(kernel_fits(asked, *views[:2]))
        exact = paged_degree_attention(
            asked.double(), *(x.double() for x in views[:2]), views[2], decode.table, decode.lengths,
            scale=self.scale, backend="reference",
        )  # fmt: skip
        plain = out[decode.rows]
        for name in names:
            got = paged_degree_attention(asked, *views, decode.table, decode.lengths, scale=self.scale, backend=name)
            expect_close(got, plain, exact, f"paged attention by {name!r}")

    def finish(self) -> None:
        """No block is lost or held twice."""
        held = [block for request in self.requests for block in request.table if block]
        everything = sorted(held + self.free)
        expect(everything == list(range(1, len(self.pages.keys))), "state", "blocks are lost or held twice")


def repeat_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, degree: torch.Tensor, new_keys: torch.Tensor,
    new_values: torch.Tensor, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Causal attention ``[L, Hq, Dv]`` of new tokens over ``degree`` copies of every slot, in the query's type."""
    length, heads = query.shape[0], keys.shape[0]
    groups = query.shape[1] // heads
    out = query.new_empty(length, query.shape[1], values.shape[-1])
    for head in range(heads):
        times = degree[head].long()
        k = torch.cat((keys[head].repeat_interleave(times, 0), new_keys[:, head])).to(query.dtype)
        v = torch.cat((values[head].repeat_interleave(times, 0), new_values[:, head])).to(query.dtype)
        hidden = torch.ones(length, len(k), dtype=torch.bool).triu(len(k) - length + 1)
        for group in range(head * groups, (head + 1) * groups):
            logits = (scale * query[:, group] @ k.T).masked_fill(hidden, float("-inf"))
            out[:, group] = logits.softmax(-1) @ v
    return out
