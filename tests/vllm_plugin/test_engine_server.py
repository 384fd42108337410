"""The OpenAI-compatible server, started by the two flags of the documentation."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm")

from analysis.benchmarks.serving import HOST, free_port, get, healthy, metrics, running
from tests.vllm_plugin.engines import WORKER, expect_reference

pytestmark = pytest.mark.slow
OPTIONS = {"preset": "quick", "budget": 0.25, "interval": 64}


@pytest.fixture(scope="module")
def server(smollm2, tmp_path_factory):
    """The port of a running server, and its log."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", smollm2, "--served-model-name", "m",
        "--port", str(port), "--host", HOST, "--dtype", "float32", "--block-size", "32", "--max-model-len",
        "2048", "--kv-cache-memory-bytes", str(200 << 20), "--enforce-eager", "--max-logprobs", "5",
        "--worker-cls", WORKER, "--additional-config", json.dumps({"centroidkv": OPTIONS}),
    ]  # fmt: skip
    environment = {
        **os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path_factory.mktemp("metrics")), "VLLM_LOGGING_LEVEL": "INFO",
    }  # fmt: skip
    with running(command, environment, log) as process:
        for _ in range(240):
            assert process.poll() is None, log.read_text()[-3000:]
            if healthy(port):
                break
            time.sleep(1)
        yield port, log


def ask(port: int, prompt: list[int], steps: int):
    body = {
        "model": "m", "prompt": prompt, "max_tokens": steps, "temperature": 0, "logprobs": 5, "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    told = json.loads(get(port, "/v1/completions", body))["choices"][0]["logprobs"]

    def number(token: str) -> int:
        return int(token.removeprefix("token_id:"))

    steps_told = [
        {number(token): value for token, value in step.items()} | {number(chosen): sure}
        for step, chosen, sure in zip(told["top_logprobs"], told["tokens"], told["token_logprobs"], strict=True)
    ]
    return [number(token) for token in told["tokens"]], steps_told


def test_completions_equal_the_reference_and_are_counted(server, smollm2):
    from transformers import AutoTokenizer

    from analysis.evaluation.fidelity.texts import help_topics

    port, log = server
    tokens = AutoTokenizer.from_pretrained(smollm2)("\n\n".join(help_topics()))["input_ids"]
    prompts = [tokens[200 * number :][:size] for number, size in enumerate((600, 450, 40))]
    with ThreadPoolExecutor(3) as pool:
        outputs = list(pool.map(lambda prompt: ask(port, prompt, 100), prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        expect_reference(smollm2, prompt, output, OPTIONS)
    counted = metrics(get(port, "/metrics"))
    assert counted["centroidkv:clustered_requests_total"] == 2
    assert counted["centroidkv:clusterings_total"] == 4  # 600 and 450 tokens, and 64 later
    assert counted["centroidkv:returned_blocks_total"] > 20
    assert counted["centroidkv:clustering_seconds_total"] > 0
    told = log.read_text()
    assert "Clustering KV caches as ServingOptions(" in told
    assert re.search(r"Clustered [12] requests [12] times so far, returned \d+ blocks, spent", told)
