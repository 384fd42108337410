"""What is refused before a server starts, and which classes serve."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from centroidkv.errors import ServingError
from centroidkv.integrations.vllm.checks import check_version, check_worker, reasons_against

PARTS = {
    "parallel_config": {
        "pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1,
        "use_ubatching": False,
        "worker_cls": "centroidkv.integrations.vllm.Worker", "tensor_parallel_size": 2,
    },
    "cache_config": {"cache_dtype": "auto"},
    "model_config": {
        "dtype": torch.bfloat16,
        "use_mla": False, "is_encoder_decoder": False, "is_attention_free": False, "runner_type": "generate",
    },
}  # fmt: skip
WHOLE = {"speculative_config": None, "kv_transfer_config": None, "use_v2_model_runner": False}


def config(additional_config=None, **changed):
    """As much of vLLM's configuration as is looked at, all of it servable but for what is ``changed``."""
    assert set(changed) <= {name for part in PARTS.values() for name in part} | set(WHOLE)
    parts = {
        name: SimpleNamespace(**{key: changed.get(key, value) for key, value in part.items()})
        for name, part in PARTS.items()
    }
    whole = {key: changed.get(key, value) for key, value in WHOLE.items()}
    options = {"centroidkv": {}} if additional_config is None else additional_config
    return SimpleNamespace(**parts, **whole, additional_config=options)


def test_a_usual_configuration_has_nothing_against_it():
    assert reasons_against(config()) == []
    assert reasons_against(config(cache_dtype="bfloat16")) == []
    check_worker(config())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"kv_transfer_config": object()}, "KV connectors"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"use_ubatching": True}, "micro-batches"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
        ({"cache_dtype": "float16"}, "kv_cache_dtype='float16' beside a model of torch.bfloat16"),
        ({"use_mla": True}, "latent attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"is_attention_free": True}, "no attention"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"runner_type": "pooling"}, "another task"),
    ],
)
def test_what_cannot_be_served_is_named(changed, says):
    (reason,) = reasons_against(config(**changed))
    assert says in reason


def test_all_reasons_are_given_at_once():
    assert len(reasons_against(config(speculative_config=object(), pipeline_parallel_size=4, use_mla=True))) == 3


@pytest.mark.parametrize("version", ["0.31.1", "0.33.0", "1.0", "dev"])
def test_releases_it_was_not_tried_on_are_refused(version):
    with pytest.raises(ServingError, match=rf"tried on vLLM 0\.32 .* this is {version}"):
        check_version(version)
    check_version("0.32.0")
    check_version("0.32.1+cpu")


@pytest.mark.parametrize("named", ["auto", "vllm.v1.worker.cpu_worker.CPUWorker"])
def test_a_worker_class_that_does_not_cluster_is_refused(named):
    with pytest.raises(ServingError, match=r"--worker-cls centroidkv\.integrations\.vllm\.Worker"):
        check_worker(config(worker_cls=named))


# -- with vLLM ---------------------------------------------------------------------------------------------------------


def chosen(monkeypatch, told):
    pytest.importorskip("vllm")
    import vllm.config

    from centroidkv.integrations.vllm import choose

    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: told)
    return choose.CpuBackend


def test_without_options_the_stock_back_end_is_handed_on(monkeypatch):
    told = chosen(monkeypatch, config(additional_config={}))
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert told is CPUAttentionBackend


def test_with_options_ours_is_and_only_beside_our_worker(monkeypatch):
    ours = chosen(monkeypatch, config())
    assert ours.get_impl_cls().__module__ == "centroidkv.integrations.vllm.cpu"
    with pytest.raises(ServingError, match="would not do it"):
        chosen(monkeypatch, config(worker_cls="auto"))
    with pytest.raises(ServingError, match="knows"):
        chosen(monkeypatch, config(additional_config={"centroidkv": {"buget": 1}}))


def test_the_worker_wants_to_be_told_how():
    pytest.importorskip("vllm")
    from centroidkv.integrations.vllm import Worker

    with pytest.raises(ServingError, match="does not say how"):
        Worker(config(additional_config={}))
    with pytest.raises(ServingError, match="speculative decoding"):
        Worker(config(speculative_config=object()))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"sliding_window": 512}, "a sliding window"),
        ({"logits_soft_cap": 30.0}, "a soft cap"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "shared between layers"),
        ({"sinks": 1.0}, "learned sinks"),
        ({"attn_type": "encoder"}, "of type encoder"),
    ],
)
def test_layers_that_attention_over_clusters_does_not_serve_are_named(given, says):
    pytest.importorskip("vllm")
    from centroidkv.integrations.vllm.backend import CentroidImpl

    with pytest.raises(ServingError, match=says):
        CentroidImpl(4, 32, 0.1, 2, **given)


def test_back_end_and_specification_without_our_worker_are_refused():
    pytest.importorskip("vllm")
    from centroidkv.integrations.vllm.backend import CentroidBackend

    with pytest.raises(ServingError, match="the worker does not cluster"):
        CentroidBackend.customize_spec(None)
