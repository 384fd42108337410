"""What clustering did, for the server's log and its /metrics: counted in the API server, by the plan.

The processes that cluster and that give blocks back send no counts, and none are needed: what they do to a request is a
function of how many tokens it had. The seconds it took are known to the worker alone, which logs them itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import REGISTRY, Counter
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from centroidkv.integrations.vllm.checks import check_worker
from centroidkv.integrations.vllm.options import ServingOptions
from centroidkv.integrations.vllm.plan import ServingPlan, plan_of

# vLLM shows only what its own loggers and those below them say.
logger = init_logger(f"vllm.{__name__}")

METRICS = {
    "centroidkv:clustered_requests": "Finished requests whose cache was clustered at least once.",
    "centroidkv:clusterings": "How often a finished request was clustered, added up.",
    "centroidkv:returned_blocks": "Blocks that finished requests gave back before their end.",
}
"""Counters and what they count. Prometheus appends _total to the names."""


@dataclass(frozen=True)
class Counts:
    """What was done, in the order of METRICS."""

    requests: int = 0
    clusterings: int = 0
    blocks: int = 0

    @classmethod
    def of(cls, plan: ServingPlan, prompt: int, generated: int) -> Counts:
        """One finished request's, with ``prompt`` tokens read and ``generated`` tokens written.

        The last token that is written is not computed any more: prompt + generated - 1 are. Blocks are given back when
        the step after an event is scheduled, so an event in a request's last step gives none back; its end does.

        >>> plan = ServingPlan(ServingOptions(budget=0.25).compressor(), block_size=32, interval=128)
        >>> Counts.of(plan, prompt=4000, generated=129)
        Counts(requests=1, clusterings=2, blocks=94)
        """
        computed = prompt + generated - 1
        clusterings = sum(1 for _ in plan.events(prompt, 0, computed))
        return cls(int(clusterings > 0), clusterings, plan.region(prompt, computed - 1).first)

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.requests + other.requests, self.clusterings + other.clusterings, self.blocks + other.blocks)

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.requests - other.requests, self.clusterings - other.clusterings, self.blocks - other.blocks)


class ClusteringStats(AggregateStatLoggerBase):
    """Counts what clustering did to finished requests; vLLM makes one per API server (``vllm.stat_logger_plugins``).

    Without our options it touches nothing. A request is counted when it finishes, as one that ran through: a preempted
    request is computed and clustered again, and counted once; a step that was computed in vain because the request had
    stopped is not counted. Nor are aborted requests, which vLLM does not report. Blocks that requests share are counted
    for each request that gave them back.

    Args:
        vllm_config: of the server.
        engine_indexes: engines whose requests this server reports.

    Raises:
        ServingError: the options are malformed, or they ask for clustering and the worker class would not do it.
    """

    def __init__(self, vllm_config: Any, engine_indexes: Sequence[int] = (0,)) -> None:
        self.options = ServingOptions.read(vllm_config.additional_config)
        if self.options is None:
            return
        check_worker(vllm_config)
        model, cache = vllm_config.model_config, vllm_config.cache_config
        self.plan = plan_of(self.options, cache.block_size, model.dtype)
        self.counts = dict.fromkeys(engine_indexes, Counts())
        self._logged = dict(self.counts)
        counters = _counters()
        self._counters = {
            index: [counter.labels(model.served_model_name, str(index)) for counter in counters]
            for index in engine_indexes
        }

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Count the requests that finished in a step."""
        if self.options is None or iteration_stats is None:
            return
        for request in iteration_stats.finished_requests:
            new = Counts.of(self.plan, request.num_prompt_tokens, request.num_generation_tokens)
            self.counts[engine_idx] += new
            for counter, count in zip(
                self._counters[engine_idx], (new.requests, new.clusterings, new.blocks), strict=True
            ):
                counter.inc(count)

    def log(self) -> None:
        """One line per engine that clustered since the last one; vLLM asks every VLLM_LOG_STATS_INTERVAL seconds."""
        if self.options is None:
            return
        for index, total in self.counts.items():
            new = total - self._logged[index]
            self._logged[index] = total
            if new.clusterings:
                logger.info(
                    "Engine %03d: Clustered %d requests %d times, returned %d blocks (in all %d requests, %d blocks)",
                    index, new.requests, new.clusterings, new.blocks, total.requests, total.blocks,
                )  # fmt: skip

    def log_engine_initialized(self) -> None:
        """Say how the caches will be clustered."""
        if self.options is not None:
            logger.info("Clustering KV caches: %s, blocks of %d tokens", self.options, self.plan.block_size)


def _counters() -> list[Any]:
    """The counters, registered anew, as vLLM does with its own: another engine in this process begins at 0."""
    for name in METRICS:
        known = REGISTRY._names_to_collectors.get(name)
        if known is not None:
            REGISTRY.unregister(known)
    return [Counter(name, says, labelnames=["model_name", "engine"]) for name, says in METRICS.items()]
