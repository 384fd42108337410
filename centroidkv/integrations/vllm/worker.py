"""The worker's side: cluster requests after the step that crossed an event."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from centroidkv.errors import ServingError
from centroidkv.integrations.vllm.checks import check_config
from centroidkv.integrations.vllm.metrics import ClusteringStats
from centroidkv.integrations.vllm.options import ServingOptions
from centroidkv.native import why_not_native
from centroidkv.paged.cluster import cluster

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as Base
else:
    Base = object


class ClusteringWorker(Base):
    """Goes before a vLLM worker class: clusters in all layers, outside of compiled and captured parts.

    The scheduler gives blocks back one step later at the earliest, and by then they have been read.
    """

    clusters_the_cache = True
    """By which a class named elsewhere is known to derive from this one."""

    def __init__(self, vllm_config: Any, *arguments: Any, **more: Any) -> None:
        options = ServingOptions.read(vllm_config.additional_config)
        if options is None:
            raise ServingError(
                "this worker class clusters caches, but the configuration does not say how: add "
                """--additional-config '{"centroidkv": {"budget": 0.25}}', or leave --worker-cls away"""
            )
        check_config(vllm_config)
        self.options = options
        super().__init__(vllm_config, *arguments, **more)
        self.clustering = ClusteringStats(str(vllm_config.model_config.served_model_name)) if self.rank == 0 else None

    def get_kv_cache_spec(self) -> Any:
        """The caches of all layers, as their back ends want them, who read our options off the configuration."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            return super().get_kv_cache_spec()

    def initialize_from_config(self, *arguments: Any, **more: Any) -> Any:
        """Allot the caches, then show the attention builders the runner, whose requests they ask for."""
        result = super().initialize_from_config(*arguments, **more)
        slow = why_not_native() if self.device.type == "cpu" else None
        logger().info("Clustering KV caches as %s%s", self.options, f"; slowly, because {slow}" if slow else "")
        groups = [group for some in self.model_runner.attn_groups for group in some]
        builders = [builder for group in groups for builder in group.metadata_builders]
        if len(groups) != 1 or not all(hasattr(builder, "attach") for builder in builders):
            raise ServingError(
                "all layers must share one kind of cache and the clustering attention back end (on a GPU: "
                "--attention-backend CUSTOM; if VLLM_PLUGINS is set, it must name centroidkv), got "
                f"{[group.backend.get_name() for group in groups]}"
            )
        for builder in builders:
            builder.attach(self.model_runner)
        self._builder = builders[0]
        return result

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any, *arguments: Any, **more: Any) -> Any:
        """A step, and then the compressions that it made due."""
        result = super().execute_model(scheduler_output, *arguments, **more)
        for request_id, new in scheduler_output.num_scheduled_tokens.items():
            request = self.model_runner.requests.get(request_id)
            if request is not None:
                self._cluster(request_id, request, request.num_computed_tokens + new)
        if self.clustering is not None:
            for request_id in scheduler_output.finished_req_ids:
                self.clustering.forget(request_id)
            line = self.clustering.line()
            if line is not None:
                logger().info(line)
        return result

    def _cluster(self, request_id: str, request: Any, computed: int) -> None:
        builder = self._builder
        for event in builder.plan.events(request.num_prompt_tokens, computed - 1, computed):
            start = time.perf_counter()
            cluster(builder.pages, request.block_ids[builder.group], event, builder.plan, builder.rotary)
            if self.clustering is not None:
                self.clustering.note(request_id, event, time.perf_counter() - start)


def logger() -> Any:
    """A logger that vLLM's own settings apply to."""
    from vllm.logger import init_logger

    return init_logger(f"vllm.{__name__}")
