"""vLLM: a plugin that clusters the caches of a server's requests and gives the blocks back. See docs/vllm.md.

Installed beside vLLM it does nothing. A server clusters if it is started with
``--worker-cls centroidkv.integrations.vllm.Worker --additional-config '{"centroidkv": {"budget": 0.25}}'``.
"""

from __future__ import annotations

from typing import Any

from centroidkv.integrations.vllm.options import SECTION, WORKER, ServingOptions
from centroidkv.paged.plan import ServingPlan

__all__ = ["SECTION", "WORKER", "ServingOptions", "ServingPlan", "Worker", "register"]


def register() -> None:
    """VLLM calls this in each of its processes (entry point ``vllm.general_plugins``).

    It names the attention back end and the cache manager that a server asks for by its configuration. On a release
    that this was not tried on it says so and does nothing.
    """
    import vllm

    from centroidkv.errors import ServingError
    from centroidkv.integrations.vllm.checks import check_version

    try:
        check_version(vllm.__version__)
    except ServingError as error:
        from vllm.logger import init_logger

        init_logger("vllm.centroidkv").warning("the plugin centroidkv is not used: %s", error)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from centroidkv.integrations.vllm.manager import register_spec

    register_spec()
    register_backend(AttentionBackendEnum.CUSTOM, "centroidkv.integrations.vllm.backend.CentroidBackend")
    # The CPU platform takes no other back end than this one; "choose" hands the stock class on unless asked otherwise.
    register_backend(AttentionBackendEnum.CPU_ATTN, "centroidkv.integrations.vllm.choose.CpuBackend")


def __getattr__(name: str) -> Any:
    """``Worker``: the clustering worker of the platform at hand; imported only when named, because vLLM is heavy."""
    if name == "Worker":
        from centroidkv.integrations.vllm.choose import worker_class

        return worker_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
