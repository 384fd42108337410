"""The worker's side: cluster requests after the step that crossed an event."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from centroidkv.errors import ServingError
from centroidkv.integrations.vllm.checks import check_config
from centroidkv.integrations.vllm.cluster import cluster
from centroidkv.integrations.vllm.options import ServingOptions

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as Base
else:
    Base = object


class ClusteringWorker(Base):
    """Goes before a vLLM worker class: clusters in all layers, outside of compiled and captured parts.

    The scheduler gives blocks back one step later at the earliest, and by then they have been read.
    """

    def __init__(self, vllm_config: Any, *arguments: Any, **more: Any) -> None:
        options = ServingOptions.read(vllm_config.additional_config)
        if options is None:
            raise ServingError(
                "this worker class clusters caches, but the configuration does not say how: add "
                """--additional-config '{"centroidkv": {"budget": 0.25}}', or leave --worker-cls away"""
            )
        check_config(vllm_config)
        self.options = options
        self.clustered_requests = 0
        self.clustering_events = 0
        self.clustering_seconds = 0.0
        self._clustered: set[str] = set()
        super().__init__(vllm_config, *arguments, **more)

    def get_kv_cache_spec(self) -> Any:
        """The caches of all layers, as their back ends want them, who read our options off the configuration."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            return super().get_kv_cache_spec()

    def initialize_from_config(self, *arguments: Any, **more: Any) -> Any:
        """Allot the caches, then show the attention builders the runner, whose requests they ask for."""
        result = super().initialize_from_config(*arguments, **more)
        for groups in self.model_runner.attn_groups:
            for group in groups:
                for builder in group.metadata_builders:
                    if hasattr(builder, "attach"):
                        builder.attach(self.model_runner)
                        self._builder = builder
        if not hasattr(self, "_builder"):
            raise ServingError(
                "no layer of this model was given to the clustering attention back end: "
                f"{self.model_runner.attn_groups!r}"
            )
        return result

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any, *arguments: Any, **more: Any) -> Any:
        """A step, and then the compressions that it made due."""
        result = super().execute_model(scheduler_output, *arguments, **more)
        for request_id, new in scheduler_output.num_scheduled_tokens.items():
            request = self.model_runner.requests.get(request_id)
            if request is not None:
                self._cluster(request_id, request, request.num_computed_tokens + new)
        for request_id in scheduler_output.finished_req_ids:
            self._clustered.discard(request_id)
        return result

    def _cluster(self, request_id: str, request: Any, computed: int) -> None:
        builder = self._builder
        for event in builder.plan.events(request.num_prompt_tokens, computed - 1, computed):
            start = time.perf_counter()
            blocks = request.block_ids[builder.group]
            cluster(builder.pages, blocks, event, builder.plan, builder.rotary)
            self._note(request_id, event, time.perf_counter() - start)

    def _note(self, request_id: str, event: Any, seconds: float) -> None:
        from vllm.logger import init_logger

        self.clustering_events += 1
        self.clustering_seconds += seconds
        if request_id not in self._clustered:
            self._clustered.add(request_id)
            self.clustered_requests += 1
        init_logger(__name__).debug(
            "request %s: %d of %d blocks left after %d tokens, %.0f ms (%d requests, %.1f s so far)",
            request_id, event.target_blocks, event.source_blocks, event.tokens, seconds * 1e3,
            self.clustered_requests, self.clustering_seconds,
        )  # fmt: skip
