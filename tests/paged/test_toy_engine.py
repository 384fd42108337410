"""A server in a hundred lines: a list of requests and a pool of blocks, by the paged parts alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch

from centroidkv import Budget, KVState, Rotary, presets
from centroidkv.attention import degree_attention
from centroidkv.paged import Pages, ServingPlan, attend, causal_attention, cluster, lay_out, slot_bytes
from centroidkv.preserve import Recent, Sinks
from centroidkv.state_ops import columns, join_slots

BLOCK, HEADS, GROUPS, SIZE, INTERVAL = 16, 2, 2, 16, 16
SCALE = SIZE**-0.5
ROTARY = Rotary.from_theta(1e4, SIZE)


@dataclass
class Request:
    """What it will ask and bring, token by token, and the blocks that hold it."""

    prompt: int
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    computed: int = 0
    table: list[int] = field(default_factory=list)


class ToyEngine:
    """Computes tokens of all requests together; gives blocks back as soon as the plan says that nobody reads them."""

    def __init__(self, plan: ServingPlan, blocks: int) -> None:
        self.plan, self.requests, self.free = plan, [], list(range(1, blocks + 1))
        positions = plan.compressor.needs_rotary
        channels = slot_bytes(SIZE, SIZE, torch.float32, positions) // 4
        self.pages = Pages.of(torch.zeros(blocks + 1, HEADS, BLOCK, channels), SIZE, SIZE, positions)

    def step(self, counts: list[int]) -> list[torch.Tensor]:
        """``counts`` new tokens of the requests, in one batch; what attention says to them."""
        spans = [slice(r.computed, r.computed + n) for r, n in zip(self.requests, counts, strict=True)]
        for request, span in zip(self.requests, spans, strict=True):
            for at in range(self.plan.region(request.prompt, request.computed).first):
                if request.table[at]:
                    self.free.append(request.table[at])
                    request.table[at] = 0
            while len(request.table) * BLOCK < span.stop:
                request.table.append(self.free.pop())
        width = max(len(r.table) for r in self.requests)
        table = torch.tensor([r.table + [0] * (width - len(r.table)) for r in self.requests])
        numbers = [torch.arange(s.start, s.stop) for s in spans]
        places = torch.cat([table[i, n // BLOCK] * BLOCK + n % BLOCK for i, n in enumerate(numbers)])

        def new(name: str) -> torch.Tensor:
            return torch.cat([getattr(r, name)[s] for r, s in zip(self.requests, spans, strict=True)])

        self.pages.write(new("keys"), new("values"), places)
        starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
        batch = lay_out(self.plan, [r.prompt for r in self.requests], starts, [s.stop for s in spans], table)

        def carry_out(blocks, event):
            cluster([self.pages], blocks.tolist(), event, self.plan, ROTARY)

        out = torch.zeros(starts[-1], HEADS * GROUPS, SIZE)
        attend(new("query"), self.pages, batch, SCALE, out, carry_out, causal_attention)
        for request, span in zip(self.requests, spans, strict=True):
            for event in self.plan.events(request.prompt, span.stop - 1, span.stop):
                cluster([self.pages], request.table, event, self.plan, ROTARY)
            request.computed = span.stop
        return list(out.split(counts))


def by_hand(plan: ServingPlan, request: Request, tokens: int) -> torch.Tensor:
    """What one request alone is told, token by token, with its cache in one state."""
    said, held = [], None
    for token in range(tokens):
        now = slice(token, token + 1)
        new = KVState.from_kv(*(x[now].transpose(0, 1)[None] for x in (request.keys, request.values)), rotary=ROTARY)
        new = new.map_slots(lambda x, new=new, token=token: x + token if x is new.positions else x)
        held = new if held is None else join_slots([held, new])
        query = request.query[now].transpose(0, 1)[None]
        said.append(degree_attention(query, held.keys, held.values, held.degree, scale=SCALE)[0].transpose(0, 1))
        full = (token + 1) // BLOCK * BLOCK
        slots = held.slots - (token + 1 - full)
        target = plan.compressor.budget.slots(full) // BLOCK * BLOCK if full else 0
        due = plan.trigger.due(request.prompt, token + 1) and 0 < target < slots
        if due and plan.compressor.fits(full, slots, Budget.tokens(target)):
            small = plan.sized(target)(columns(held, slice(0, slots)))
            held = join_slots([small, columns(held, slice(slots, None))])
    return torch.cat(said)


@pytest.mark.parametrize("preset", ["centroidkv", "distinctive", "quick"])
def test_requests_served_together_are_told_what_each_is_told_alone(preset):
    compressor = presets.ALL[preset](0.5)
    members = [Sinks(1), Recent(3), *[m for m in compressor.preservers.members if m.share is not None]]
    plan = ServingPlan(compressor.with_(preserve=members), BLOCK, INTERVAL)
    engine = ToyEngine(plan, blocks=60)
    for prompt in (70, 33, 9):
        query, *rest = (torch.randn(130, n, SIZE) for n in (HEADS * GROUPS, HEADS, HEADS))
        engine.requests.append(Request(prompt, query, *rest))
    told = [engine.step([70, 33, 9])]
    told += [engine.step([1, 1, 1]) for _ in range(20)]
    told += [engine.step([5, 2, 30])]
    told += [engine.step([1, 1, 1]) for _ in range(10)]
    assert len(engine.free) > 60 - sum(-(-r.computed // BLOCK) for r in engine.requests)  # blocks came back
    for number, request in enumerate(engine.requests):
        together = torch.cat([step[number] for step in told])
        assert torch.allclose(together, by_hand(plan, request, request.computed), atol=2e-5)


def test_no_engine_is_needed():
    code = "import sys, centroidkv.paged; print([m for m in ('vllm', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
