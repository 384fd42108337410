"""A step over pages against plain tensors: layout, clustering in place, attention, and runs cut into any steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from centroidkv import Budget, KVState, Rotary, native
from centroidkv.attention import degree_attention, paged_degree_attention
from centroidkv.errors import ServingError
from centroidkv.integrations.vllm import ServingOptions, ServingPlan
from centroidkv.paged.attend import attend, causal_attention
from centroidkv.paged.batch import lay_out, segments
from centroidkv.paged.cluster import cluster
from centroidkv.paged.pages import Pages, slot_bytes
from centroidkv.state_ops import join_rows

HEADS, GROUPS, SIZE, BLOCK = 2, 3, 8, 16
SCALE = SIZE**-0.5
ROTARY = Rotary.from_theta(1e4, SIZE)


def empty_pages(blocks: int, dtype=torch.float32, positions=True, value_size=SIZE) -> Pages:
    """Uninitialised memory is NaN: whatever is read before it was written shows."""
    channels = slot_bytes(SIZE, value_size, dtype, positions) // dtype.itemsize
    cache = torch.full((blocks, HEADS, BLOCK, channels), float("nan"), dtype=dtype)
    return Pages.of(cache, SIZE, value_size, positions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("positions", [True, False])
def test_pages_hold_what_is_written_and_share_no_number(dtype, positions):
    pages = empty_pages(5, dtype, positions, value_size=4)
    keys, values = torch.randn(40, HEADS, SIZE).to(dtype), torch.randn(40, HEADS, 4).to(dtype)
    blocks = torch.tensor([3, 1, 4])
    places = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:40]
    pages.write(keys, values, places)
    got_keys, got_values, log_degree = pages.read(blocks)
    assert got_keys[:, :40].equal(keys.transpose(0, 1))
    assert got_values[:, :40].equal(values.transpose(0, 1))
    assert (log_degree[:, :40] == 0).all()
    degree = torch.randint(1, 9, (HEADS, BLOCK)).float()
    where = torch.arange(HEADS * BLOCK).view(HEADS, BLOCK)
    new_keys, new_values = keys[:BLOCK].transpose(0, 1) + 1, values[:BLOCK].transpose(0, 1) + 1
    row = KVState(new_keys[None], new_values[None], degree[None], where[None])
    pages.fill(torch.tensor([2]), join_rows([row.map_slots(torch.zeros_like), row]), 1)
    for got, wanted in zip(pages.read(torch.tensor([2])), (new_keys, new_values, degree.log()), strict=True):
        assert got.equal(wanted)
    if positions:
        assert pages.read_positions(torch.tensor([2])).equal(where.int())
    assert pages.read(blocks)[0][:, :40].equal(keys.transpose(0, 1))  # the neighbours are as they were


@pytest.mark.parametrize("backend", ["sdpa", "native", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_of_attending_reads_pages_as_they_lie(backend, dtype):
    """On a GPU requests of one token go through the Triton kernel, here in its interpreter."""
    if backend == "triton":
        pytest.importorskip("triton")
    if backend == "native" and native.why_not_native() is not None:
        pytest.skip(str(native.why_not_native()))
    channels = slot_bytes(32, 32, dtype, positions=True) // dtype.itemsize
    cache = torch.full((9, HEADS, BLOCK, channels), float("nan"), dtype=dtype)
    pages = Pages.of(cache, 32, 32, positions=True)
    pages.keys.copy_(torch.randn(pages.keys.shape))
    pages.values.copy_(torch.randn(pages.values.shape))
    pages.log_degree.copy_(torch.randint(1, 9, pages.log_degree.shape).float().log())
    views = [part.transpose(1, 2) for part in (pages.keys, pages.values, pages.log_degree)]
    table = torch.tensor([[3, 1, 4], [5, 2, 6]], dtype=torch.int32)
    lengths = torch.tensor([40, 17], dtype=torch.int32)
    query = torch.randn(2, HEADS * GROUPS, 32).to(dtype)
    got, wanted = (
        paged_degree_attention(query, *views, table, lengths, scale=SCALE, backend=name)
        for name in (backend, "reference")
    )
    assert torch.allclose(got.float(), wanted.float(), atol=1e-5 if dtype == torch.float32 else 2**-6)


def test_a_page_of_another_size_is_refused():
    with pytest.raises(ServingError, match="must hold 68 bytes a slot"):
        Pages.of(torch.zeros(2, HEADS, BLOCK, 16), SIZE, SIZE, positions=False)
    with pytest.raises(ServingError, match="in one piece"):
        Pages.of(torch.zeros(2, BLOCK, HEADS, 17).transpose(1, 2), SIZE, SIZE, positions=False)


class Dense:
    """One request, token by token, in plain tensors: what pages are held against."""

    def __init__(self, plan: ServingPlan, prompt: int) -> None:
        self.plan, self.prompt = plan, prompt
        self.state: KVState | None = None
        self.seen = 0

    def step(self, query, keys, values):
        new = KVState.from_kv(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], rotary=ROTARY)
        new = replace(new, positions=new.positions + self.seen)
        held = new if self.state is None else self.join(self.state, new)
        self.seen += keys.shape[0]
        out = degree_attention(
            query.transpose(0, 1)[None], held.keys, held.values, held.degree, scale=SCALE, backend="reference"
        )
        due = self.plan.trigger.due(self.prompt, self.seen)
        self.state = self.compressed(held) if due else held
        return out[0].transpose(0, 1)

    def compressed(self, held: KVState) -> KVState:
        full = self.seen // BLOCK * BLOCK
        slots = held.slots - (self.seen - full)
        target = self.plan.compressor.budget.slots(full) // BLOCK * BLOCK if full else 0
        if not target or target >= slots or not self.plan.compressor.fits(full, slots, Budget.tokens(target)):
            return held
        sized = self.plan.compressor.with_(budget=Budget.tokens(target))
        return self.join(sized(held.map_slots(lambda x: x[:, :, :slots])), held.map_slots(lambda x: x[:, :, slots:]))

    @staticmethod
    def join(a: KVState, b: KVState) -> KVState:
        names = ("keys", "values", "degree", "positions")
        parts = {name: torch.cat((getattr(a, name), getattr(b, name)), 2) for name in names}
        return KVState(**parts, rotary=ROTARY)


class Paged:
    """Requests in one pool of pages; blocks are freed as the plan says and handed on to others at once."""

    def __init__(self, plan: ServingPlan, requests: int, blocks: int) -> None:
        self.plan, self.pages = plan, empty_pages(blocks + 1, positions=plan.compressor.needs_rotary)
        self.free = torch.randperm(blocks).add(1).tolist()
        self.tables: list[list[int]] = [[] for _ in range(requests)]
        self.computed = [0] * requests

    def step(self, prompts, queries, keys, values):
        """Whatever each request brings, in one batch; returns their outputs."""
        starts = [0]
        for request, new in enumerate(keys):
            length = self.computed[request] + len(new)
            first = self.plan.region(prompts[request], self.computed[request]).first
            table = self.tables[request]
            for at in range(first):
                if table[at]:
                    self.free.append(table[at])
                    table[at] = 0
            while len(table) * BLOCK < length:
                table.append(self.free.pop())
            starts.append(starts[-1] + len(new))
        width = max(map(len, self.tables))
        table = torch.tensor([row + [0] * (width - len(row)) for row in self.tables])
        lengths = [c + len(new) for c, new in zip(self.computed, keys, strict=True)]
        places = torch.cat(
            [
                table[request, torch.arange(self.computed[request], lengths[request]) // BLOCK] * BLOCK
                + torch.arange(self.computed[request], lengths[request]) % BLOCK
                for request in range(len(keys))
            ]
        )
        self.pages.write(torch.cat(keys), torch.cat(values), places)
        asked = torch.cat(queries)
        out = torch.full_like(asked, float("nan"))

        def carry_out(blocks, event):
            cluster([self.pages], blocks.tolist(), event, self.plan, ROTARY)

        attend(
            asked,
            self.pages,
            lay_out(self.plan, prompts, starts, lengths, table),
            SCALE,
            out,
            carry_out,
            causal_attention,
        )
        for request, length in enumerate(lengths):
            if length > self.computed[request]:
                for event in self.plan.events(prompts[request], length - 1, length):
                    cluster([self.pages], self.tables[request], event, self.plan, ROTARY)
        self.computed = lengths
        return [out[a:b] for a, b in pairwise(starts)]


steps = st.lists(st.integers(1, 70), min_size=1, max_size=40)


@given(
    preset=st.sampled_from(["centroidkv", "distinctive", "streaming_llm"]),
    budget=st.sampled_from([0.5, 0.25, 64]),
    interval=st.sampled_from([5, 32, 50]),
    requests=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 150), steps), min_size=1, max_size=3),
)
@settings(max_examples=15)
def test_requests_cut_into_any_steps_attend_as_each_does_alone(preset, budget, interval, requests):
    """Also chunks across events: a preempted request computes prompt and output again, in chunks of any size."""
    small = {} if preset == "streaming_llm" else {"sinks": 1, "recent": 4}
    options = ServingOptions(preset=preset, budget=budget, interval=interval, **small)
    plan = ServingPlan(options.compressor(), BLOCK, interval)
    streams, wanted = [], []
    for number, (prompt, more, _) in enumerate(requests):
        generator = torch.Generator().manual_seed(number)
        total = prompt + more
        query = torch.randn(total, HEADS * GROUPS, SIZE, generator=generator)
        keys, values = torch.randn(2, total, HEADS, SIZE, generator=generator)
        streams.append((query, keys, values))
        dense, outs = Dense(plan, prompt), []
        outs.append(dense.step(query[:prompt], keys[:prompt], values[:prompt]))
        for at in range(prompt, total):
            outs.append(dense.step(query[at : at + 1], keys[at : at + 1], values[at : at + 1]))
        wanted.append(torch.cat(outs))
    prompts = [prompt for prompt, _, _ in requests]
    paged = Paged(plan, len(requests), sum(-(-(p + m) // BLOCK) for p, m, _ in requests))
    got: list[list[torch.Tensor]] = [[] for _ in requests]
    turns = [iter([*cut, *[1] * 500]) for _, _, cut in requests]
    while any(c < len(s[0]) for c, s in zip(paged.computed, streams, strict=True)):
        spans = []
        for request, (query, _, _) in enumerate(streams):
            start = paged.computed[request]
            spans.append(slice(start, min(len(query), start + next(turns[request]))))
        parts = [[stream[i][span] for stream, span in zip(streams, spans, strict=True)] for i in range(3)]
        for request, out in enumerate(paged.step(prompts, *parts)):
            got[request].append(out)
    for outs, right in zip(got, wanted, strict=True):
        assert torch.allclose(torch.cat(outs), right, atol=2e-5)


def test_a_chunk_is_cut_where_an_event_is_due_within_it():
    plan = ServingPlan(ServingOptions(budget=0.25, sinks=1, recent=4).compressor(), BLOCK, 50)
    found = segments(plan, prompt=200, computed=0, start=7, new=320)
    assert [(part.start, part.stop) for part in found] == [(7, 207), (207, 257), (257, 307), (307, 327)]
    assert [part.event.tokens if part.event else None for part in found] == [200, 250, 300, None]
    assert [part.first for part in found] == [0, *(plan.region(200, n).first for n in (200, 250, 300))]
    assert [part.length for part in found] == [
        n - part.first * BLOCK for n, part in zip((200, 250, 300, 320), found, strict=True)
    ]
    # An event at the end of a step is left to the worker.
    assert [part.event for part in segments(plan, 200, 0, 0, 200)] == [None]


def test_many_layers_at_once_are_clustered_as_one_by_one():
    plan = ServingPlan(ServingOptions(preset="distinctive", budget=0.25, sinks=1, recent=4).compressor(), BLOCK, 50)
    event = next(plan.events(300, 0, 300))
    layers = [empty_pages(25) for _ in range(3)]
    blocks = torch.randperm(25).tolist()[:19]
    for pages in layers:
        places = (torch.tensor(blocks)[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:300]
        pages.write(torch.randn(300, HEADS, SIZE), torch.randn(300, HEADS, SIZE), places)
    alone = [empty_pages(25) for _ in range(3)]
    for one, pages in zip(alone, layers, strict=True):
        for a, b in zip(
            (one.keys, one.values, one.log_degree, one.positions),
            (pages.keys, pages.values, pages.log_degree, pages.positions),
            strict=True,
        ):
            a.copy_(b)
        cluster([one], blocks, event, plan, ROTARY)
    cluster(layers, blocks, event, plan, ROTARY)
    at = torch.tensor(blocks[event.after.first : event.after.end])
    for one, pages in zip(alone, layers, strict=True):
        for a, b in zip(one.read(at), pages.read(at), strict=True):
            assert a.equal(b)
        assert one.read_positions(at).equal(pages.read_positions(at))
    cluster([], blocks, event, plan, ROTARY)  # a rank without layers of this kind
