"""Engines in this process, and what their outputs are held against. Import it before vLLM."""

from __future__ import annotations

import os
import random
from contextlib import contextmanager
from functools import cache

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_ENABLE_V1_MULTIPROCESSING="0"
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch

from centroidkv.integrations.vllm import WORKER, ServingOptions
from tests.vllm_plugin.reference import compare, logprobs_along

BLOCK = 32


def tiny_model(folder) -> str:
    """A random Llama of two KV heads, saved to ``folder``; its weights are large enough for it to have opinions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, initializer_range=0.08,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def random_tokens(length: int, seed: int = 0) -> list[int]:
    """A prompt for the small random Llama."""
    return random.Random(seed).choices(range(500), k=length)


def start(model: str, options: dict | None, kv_mib: float = 40, **more):
    """An engine; without options a stock one."""
    from vllm import LLM

    ours = {} if options is None else {"worker_cls": WORKER, "additional_config": {"centroidkv": options}}
    defaults = {
        "dtype": "float32", "max_model_len": 4096, "block_size": BLOCK, "enforce_eager": True,
        "skip_tokenizer_init": True, "max_num_batched_tokens": 512, "max_num_seqs": 16,
    }  # fmt: skip
    return LLM(model, kv_cache_memory_bytes=int(kv_mib * 2**20), **{**defaults, **ours, **more})


def generate(engine, prompts, steps, top: int = 5):
    """Per prompt: the tokens, and per step a dict token -> log-probability. ``steps`` may differ by prompt."""
    from vllm import SamplingParams

    steps = [steps] * len(prompts) if isinstance(steps, int) else steps
    parameters = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=top, detokenize=False) for n in steps
    ]
    found = engine.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
    outs = [request.outputs[0] for request in found]
    return [
        (list(out.token_ids), [{token: told.logprob for token, told in step.items()} for step in out.logprobs])
        for out in outs
    ]


def block_pool(engine):
    return engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool


def manager(engine):
    held = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    return held.coordinator.single_type_managers[0]


def worker(engine):
    return engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def all_free(engine) -> bool:
    """Every block but the null block is free."""
    pool = block_pool(engine)
    return pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@cache
def dense(model: str):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def expect_reference(model: str, prompt, output, options: dict, least_events: int = 0, given=None) -> float:
    """The output is what the dense reference would say; returns the largest |dlogprob| of the chosen tokens.

    ``given``: the keys that the engine clustered (:func:`clustered_keys`), for the reference to cluster.
    """
    tokens, told = output
    compressor = ServingOptions(**options).compressor(torch.float32)
    if given is not None:  # as the engine: so that equal keys are compared alike
        compressor = compressor.with_(backend="fastest")
    interval = options["interval"]
    right, runs = logprobs_along(dense(model), prompt, tokens, compressor, interval, BLOCK, given)
    assert min(runs) >= least_events
    wrong, largest = compare(told, tokens, right)
    assert not wrong, wrong
    assert largest <= 0.02, largest
    return largest


@contextmanager
def clustered_keys(engine):
    """While it is open: the keys that are clustered, as ``found[prompt tokens][layer][event]``, each ``[H, T, D]``."""
    found: dict[int, list[list[torch.Tensor]]] = {}
    ours = worker(engine)
    builder, carry_out = ours._builder, ours._cluster

    def watched(request_id, request, computed):
        for event in builder.plan.events(request.num_prompt_tokens, computed - 1, computed):
            blocks = request.block_ids[builder.group][event.before.first : event.after.end]
            layers = found.setdefault(request.num_prompt_tokens, [[] for _ in builder.pages])
            for layer, pages in zip(layers, builder.pages, strict=True):
                layer.append(pages.read(torch.tensor(blocks))[0].clone())
        carry_out(request_id, request, computed)

    ours._cluster = watched
    try:
        yield found
    finally:
        ours._cluster = carry_out


def expect_alike(first, second) -> None:
    """Two runs of one request: the same tokens, or parting where the first one was not sure by 1e-3."""
    for step, (a, b) in enumerate(zip(first[0], second[0], strict=True)):
        if a != b:
            two = sorted(first[1][step].values())[-2:]
            assert two[1] - two[0] < 1e-3, (step, a, b, two)
            return
        assert abs(first[1][step][a] - second[1][step][a]) <= 0.02, (step, first[1][step], second[1][step])
