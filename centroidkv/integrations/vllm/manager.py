"""The scheduler's side: a cache specification that carries our options, and a manager that gives blocks back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, replace_as
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from centroidkv.errors import ServingError
from centroidkv.integrations.vllm.options import ServingOptions, plan_of
from centroidkv.paged.pages import slot_bytes
from centroidkv.paged.plan import ServingPlan


@dataclass(frozen=True, kw_only=True)
class CentroidSpec(FullAttentionSpec):
    """A full-attention cache whose requests are clustered as ``options`` say, up to ``max_tokens`` tokens long."""

    options: ServingOptions = field(default_factory=ServingOptions)
    max_tokens: int = 0
    positions: bool = False

    @classmethod
    def from_full(cls, spec: FullAttentionSpec, options: ServingOptions, max_tokens: int) -> CentroidSpec:
        """``spec`` with room for ln N, and for positions where the compressor needs them, beside keys and values."""
        positions = options.compressor().needs_rotary
        content = slot_bytes(spec.head_size, spec.head_size_v, spec.dtype, positions)
        return replace_as(
            spec, cls, state_content_bytes=content, options=options, max_tokens=max_tokens, positions=positions
        )

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        first = specs[0]
        own = {"options": first.options, "max_tokens": first.max_tokens, "positions": first.positions}
        return replace(super().merge(specs), **own)

    @property
    def plan(self) -> ServingPlan:
        """The plan that scheduler and workers share."""
        return plan_of(self.options, self.block_size, self.dtype)


class CentroidManager(FullAttentionManager):
    """Gives back the blocks a request no longer needs after it was clustered, and keeps shared blocks unwritten.

    Only leading blocks that no event ever writes are registered for prefix caching, and only so many are taken from
    it. A request keeps its logical block list, with null blocks in front, so positions and new tokens are untouched.
    """

    def __init__(self, kv_cache_spec: CentroidSpec, **arguments: Any) -> None:
        super().__init__(kv_cache_spec, **arguments)
        self.plan = kv_cache_spec.plan
        self._prompts: dict[str, int] = {}
        self.returned_blocks = 0
        """Blocks given back so far, of all requests."""

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give back what lies before the centroids of a request with that many tokens computed *and* clustered."""
        if num_prompt_tokens is None:
            return
        if self._prompts.setdefault(request_id, num_prompt_tokens) != num_prompt_tokens:
            raise ServingError(
                f"the prompt of request {request_id} grew from {self._prompts[request_id]} to {num_prompt_tokens} "
                "tokens while it ran (streamed input?); its cache was clustered for the shorter one"
            )
        if request_id not in self.req_to_blocks:
            return
        free = self.block_pool.get_num_free_blocks()
        first = self.plan.region(num_prompt_tokens, processed_computed_tokens).first
        self._remove_blocks_in_range(request_id, 0, first)
        self.returned_blocks += self.block_pool.get_num_free_blocks() - free

    def pop_blocks_for_free(self, request_id: str) -> Any:
        """All blocks of a request that ends or is preempted."""
        self._prompts.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def cache_blocks(
        self,
        request: Any,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Register full blocks for prefix caching, but none that clustering will write."""
        if num_tokens >= request.num_prompt_tokens:
            # Should it be preempted from now on and come back, it would be looked up by its prompt *and* output, as a
            # longer prompt that may share more blocks than this request: it would then write into blocks of others.
            request.skip_reading_prefix_cache = True
        untouched = self.plan.untouched_blocks(request.num_prompt_tokens, self.kv_cache_spec.max_tokens)
        super().cache_blocks(
            request,
            min(num_tokens, untouched * self.block_size),
            retention_interval,
            replay_boundaries=replay_boundaries,
        )

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: Any,
        block_pool: Any,
        kv_cache_spec: Any,
        **more: Any,
    ) -> Any:
        """The longest cached prefix within the blocks that no event of this request writes."""
        plan = kv_cache_spec.plan
        # The engine looks for one token less than the prompt, so that something is left to compute.
        untouched = plan.untouched_blocks(max_length + 1, kv_cache_spec.max_tokens)
        return super().find_longest_cache_hit(
            block_hashes=block_hashes,
            max_length=min(max_length, untouched * plan.block_size),
            kv_cache_group_ids=kv_cache_group_ids,
            block_pool=block_pool,
            kv_cache_spec=kv_cache_spec,
            **more,
        )


def register_spec() -> None:
    """Tell vLLM which manager serves a CentroidSpec. Harmless when repeated, and inert until such a spec is used."""
    KVCacheSpecRegistry._ensure_registered()  # its own specs first: it registers them only while none is known
    KVCacheSpecRegistry.register(CentroidSpec, CentroidManager, uniform_type_base_spec=FullAttentionSpec)
