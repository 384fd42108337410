"""What a server must and must not be told beside our options."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from centroidkv.errors import ServingError
from centroidkv.integrations.vllm.options import WORKER

SUPPORTED = ((0, 32), (0, 33))
"""vLLM releases [from, until): the hooks used here are not promised to stay."""


def check_version(version: str) -> None:
    """Refuse releases of vLLM this was not tried on.

    Raises:
        ServingError: says which releases will do.
    """
    low, high = SUPPORTED
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        major, minor = -1, -1
    if not low <= (major, minor) < high:
        raise ServingError(
            f"clustering was tried on vLLM {low[0]}.{low[1]} up to but without {high[0]}.{high[1]}, this is {version}; "
            "install one of those, or serve without additional_config['centroidkv']"
        )


def reasons_against(config: Any) -> list[str]:
    """Why a vLLM configuration cannot be served with clustering; empty if it can."""
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    found = [
        (config.speculative_config is not None, "speculative decoding: it takes tokens back, and centroids cannot be"),
        (config.kv_transfer_config is not None, "KV connectors move blocks whose ln N they do not know"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism (tensor parallelism works)"),
        (parallel.decode_context_parallel_size > 1, "decode context parallelism splits requests over ranks"),
        (bool(getattr(parallel, "use_ubatching", False)), "micro-batches (dual batch overlap)"),
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "prefill context parallelism splits requests"),
        (cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")),
            f"kv_cache_dtype={cache.cache_dtype!r} beside a model of {model.dtype}; use 'auto'"),
        (model.use_mla, "multi-head latent attention caches no keys"),
        (model.is_encoder_decoder, "encoder-decoder models"),
        (model.is_attention_free, "this model has no attention"),
        (bool(getattr(config, "use_v2_model_runner", False)), "the V2 model runner; set VLLM_USE_V2_MODEL_RUNNER=0"),
        (getattr(model, "runner_type", "generate") != "generate", "another task than generation"),
    ]  # fmt: skip
    return [reason for applies, reason in found if applies]


def check_config(config: Any) -> None:
    """Refuse a configuration that clustering cannot serve.

    Raises:
        ServingError: with every reason.
    """
    import vllm

    check_version(vllm.__version__)
    reasons = reasons_against(config)
    if reasons:
        raise ServingError("clustering cannot serve this configuration: " + "; ".join(reasons))


def _clusters(named: str) -> bool:
    """Whether a class named elsewhere derives from ours."""
    module, _, name = named.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, ValueError, AttributeError):
        return False
    return isinstance(found, type) and bool(getattr(found, "clusters_the_cache", False))


def check_worker(config: Any) -> None:
    """Refuse a configuration that asks for clustering but names a worker class that does not cluster.

    Raises:
        ServingError: says which class to name.
    """
    named = str(config.parallel_config.worker_cls)
    if not named.startswith("centroidkv.integrations.vllm") and not _clusters(named):
        raise ServingError(
            f"additional_config['centroidkv'] asks for clustering, but the worker class is {named}, which would not "
            f"do it; add --worker-cls {WORKER}"
        )
