"""Which class serves: ours where the configuration asks for clustering, vLLM's own where it does not."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def worker_class() -> type:
    """The clustering worker of this platform."""
    from vllm.platforms import current_platform

    from centroidkv.integrations.vllm.worker import ClusteringWorker

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker as Stock
    else:
        from vllm.v1.worker.gpu_worker import Worker as Stock
    return type("Worker", (ClusteringWorker, Stock), {"__module__": __name__, "__doc__": ClusteringWorker.__doc__})


def __getattr__(name: str) -> Any:
    """``CpuBackend``: looked up by vLLM when it builds a model, with that model's configuration at hand."""
    if name != "CpuBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from centroidkv.integrations.vllm.checks import check_worker
    from centroidkv.integrations.vllm.options import ServingOptions

    config = get_current_vllm_config()
    if ServingOptions.read(config.additional_config) is None:
        return CPUAttentionBackend
    check_worker(config)
    from centroidkv.integrations.vllm.cpu import CentroidCpuBackend

    return CentroidCpuBackend
