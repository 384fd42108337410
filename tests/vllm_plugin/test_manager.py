"""The scheduler's side with a plain block pool: what is given back, what is shared, and that nothing leaks."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from centroidkv.errors import ServingError
from centroidkv.integrations.vllm import ServingOptions
from centroidkv.integrations.vllm.manager import CentroidManager, CentroidSpec, register_spec

BLOCK = 16
OPTIONS = ServingOptions(budget=0.25, interval=50, sinks=1, recent=4)
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
SPEC = CentroidSpec.from_full(FULL, OPTIONS, max_tokens=4096)


class Request(SimpleNamespace):
    """As much of vLLM's request as managers look at."""

    def __init__(self, name: str, tokens: list[int]) -> None:
        super().__init__(
            request_id=name, all_token_ids=list(tokens), num_prompt_tokens=len(tokens), skip_reading_prefix_cache=False,
            shared_prefix_boundary=0, lora_request=None, mm_features=[], cache_salt=None, prompt_embeds=None,
            kv_transfer_params=None, kv_cache_report_mode="incremental", block_hashes=[],
        )  # fmt: skip
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.block_hashes += self.hasher(self)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def append(self, token: int) -> None:
        self.all_token_ids.append(token)
        self.block_hashes += self.hasher(self)


class Engine:
    """Admission, growth and the end of requests, as the scheduler calls a manager."""

    def __init__(self, blocks: int = 400) -> None:
        init_none_hash(sha256)
        self.pool = BlockPool(blocks, True, BLOCK)
        self.manager = CentroidManager(
            SPEC, block_pool=self.pool, enable_caching=True, kv_cache_group_id=0, scheduler_block_size=BLOCK
        )
        self.written: dict[str, int] = {}

    def hit(self, request: Request):
        if request.skip_reading_prefix_cache:
            return [], 0
        (blocks,), length = CentroidManager.find_longest_cache_hit(
            block_hashes=request.block_hashes, max_length=request.num_tokens - 1, kv_cache_group_ids=[0],
            block_pool=self.pool, kv_cache_spec=SPEC, drop_eagle_block=False, alignment_tokens=BLOCK,
        )  # fmt: skip
        return blocks, length

    def admit(self, request: Request) -> int:
        blocks, length = self.hit(request)
        self.manager.add_local_computed_blocks(request.request_id, blocks, length, 0)
        return length

    def compute(self, request: Request, before: int, until: int) -> None:
        """Blocks for tokens up to ``until``, of which ``before`` are computed."""
        self.manager.remove_skipped_blocks(request.request_id, before, request.num_prompt_tokens)
        self.manager.allocate_new_blocks(request.request_id, until, until)
        self.manager.cache_blocks(request, min(until, request.num_tokens), replay_boundaries=())

    def targets_are_private(self, request: Request) -> None:
        """What the worker will write: neither shared nor registered."""
        held = self.manager.req_to_blocks[request.request_id]
        for event in SPEC.plan.events(request.num_prompt_tokens, 0, 2000):
            for block in held[event.after.first : event.after.end]:
                if not block.is_null:
                    assert block.ref_cnt == 1
                    assert block.block_hash is None


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


def test_the_specification_adds_ln_degree_and_where_needed_positions():
    assert SPEC.page_size_bytes == FULL.page_size_bytes + BLOCK * 2 * 4
    distinctive = CentroidSpec.from_full(FULL, ServingOptions(preset="distinctive"), 4096)
    assert distinctive.page_size_bytes == FULL.page_size_bytes + BLOCK * 2 * 8
    merged = CentroidSpec.merge([SPEC, SPEC])
    assert merged == SPEC
    assert merged.plan is SPEC.plan
    register_spec()
    register_spec()
    assert KVCacheSpecRegistry.get_manager_class(SPEC) is CentroidManager
    assert KVCacheSpecRegistry.get_manager_class(FULL) is FullAttentionManager


def test_blocks_before_the_centroids_are_given_back_after_the_step_that_clustered():
    engine, request = Engine(), Request("a", tokens(1000))
    free = engine.pool.get_num_free_blocks()
    engine.admit(request)
    engine.compute(request, 0, 1000)
    assert engine.pool.get_num_free_blocks() == free - 63
    request.append(5)
    engine.compute(request, 999, 1000)  # not clustered yet
    assert engine.pool.get_num_free_blocks() == free - 63
    engine.compute(request, 1000, 1001)
    # 62 full blocks, 992 tokens, became 248 slots, 15 whole blocks; the 63rd is not full.
    assert engine.pool.get_num_free_blocks() == free - 16
    assert engine.manager.returned_blocks == 47
    blocks = engine.manager.req_to_blocks["a"]
    assert [block.is_null for block in blocks] == [True] * 47 + [False] * 16
    engine.manager.free("a")
    assert engine.pool.get_num_free_blocks() == free


def test_only_blocks_that_are_never_written_are_shared():
    engine, first = Engine(), Request("first", tokens(1000))
    engine.admit(first)
    engine.compute(first, 0, 1000)
    engine.targets_are_private(first)
    again = Request("again", tokens(1000))
    assert engine.admit(again) == 47 * BLOCK
    engine.compute(again, 47 * BLOCK, 1000)
    engine.targets_are_private(again)
    short = Request("short", tokens(1000)[:600])  # its own targets begin earlier
    assert engine.admit(short) == SPEC.plan.untouched_blocks(600, 4096) * BLOCK == 28 * BLOCK
    engine.compute(short, 28 * BLOCK, 600)
    engine.targets_are_private(short)
    # A clustered request gives its blocks back, yet those that were registered can still be found.
    first.append(1)
    engine.compute(first, 1000, 1001)
    engine.manager.free("first")
    engine.manager.free("again")
    late = Request("late", tokens(1000) + tokens(500, seed=1))
    assert engine.admit(late) == 47 * BLOCK


def test_a_request_that_comes_back_does_not_take_blocks_it_will_write():
    engine, long = Engine(), Request("long", tokens(2000))
    engine.admit(long)
    engine.compute(long, 0, 2000)
    request = Request("short", tokens(2000)[:1000])
    engine.admit(request)
    engine.compute(request, 47 * BLOCK, 1000)
    for token in tokens(2000)[1000:1300]:  # the output happens to go on as the long prompt does
        request.append(token)
    engine.manager.free("short")  # preempted before its first token was scheduled
    assert engine.hit(request) == ([], 0)
    # Looked up as a prompt of 1300 tokens it would have been given more than it may have.
    request.skip_reading_prefix_cache = False
    assert engine.hit(request)[1] > SPEC.plan.untouched_blocks(1000, 4096) * BLOCK


def test_a_prompt_that_grows_while_it_runs_is_refused():
    engine, request = Engine(), Request("session", tokens(1000))
    engine.admit(request)
    engine.compute(request, 0, 1000)
    engine.compute(request, 1000, 1001)
    with pytest.raises(ServingError, match="grew from 1000 to 1400 tokens"):
        engine.manager.remove_skipped_blocks("session", 1001, 1400)
    engine.manager.free("session")
    engine.manager.remove_skipped_blocks("session", 0, 1400)  # another request of that name


def test_many_requests_under_pressure_leave_a_full_pool():
    engine, rng = Engine(blocks=300), random.Random(3)
    free = engine.pool.get_num_free_blocks()
    running: list[tuple[Request, int]] = []
    for number in range(400):
        if rng.random() < 0.6 and engine.pool.get_num_free_blocks() > 90:
            request = Request(str(number), tokens(rng.randint(1, 1200), seed=rng.randint(0, 3)))
            at = engine.admit(request)
            running.append((request, at))
        for place, (request, at) in enumerate(running):
            until = min(request.num_tokens, at + rng.choice([1, 64, 512]))
            need = -(-until // BLOCK) - len(engine.manager.req_to_blocks[request.request_id])
            if until == at or need > engine.pool.get_num_free_blocks():
                continue
            engine.compute(request, at, until)
            engine.targets_are_private(request)
            if until >= request.num_tokens:
                request.append(rng.randrange(1000))
            running[place] = (request, until)
        for request, at in [pair for pair in running if rng.random() < 0.05 or pair[1] > 1500]:
            engine.manager.free(request.request_id)
            running.remove((request, at))
    for request, _ in running:
        engine.manager.free(request.request_id)
    assert engine.pool.get_num_free_blocks() == free
    assert engine.manager.returned_blocks > 0
