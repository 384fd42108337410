"""Installed but not asked for, the plugin changes nothing; asked for by halves, a server does not start."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

pytestmark = pytest.mark.slow

CODE = """
import json, sys
from tests.vllm_plugin.engines import generate, start, worker
prompts = [[(7 * i * i + 3 * j) % 500 for i in range(size)] for j, size in enumerate((300, 40, 700))]
engine = start(sys.argv[1], None, **json.loads(sys.argv[2]))
kinds = {type(layer.impl).__name__ for layer in
         worker(engine).model_runner.compilation_config.static_forward_context.values()}
print("RESULT", json.dumps([generate(engine, prompts, 40), sorted(kinds)]))
"""


def run(model: str, given: dict, **environment: str):
    done = subprocess.run(
        [sys.executable, "-c", CODE, model, json.dumps(given)], capture_output=True, text=True,
        env={**os.environ, **environment}, timeout=300,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(found[0].removeprefix("RESULT ")) if found else done.stderr + done.stdout


def test_a_stock_engine_says_the_same_with_and_without_the_plugin(tiny):
    without = run(tiny, {}, VLLM_PLUGINS="")
    assert without == run(tiny, {})
    assert without[1] == ["CPUAttentionBackendImpl"]


def test_options_without_our_worker_do_not_start(tiny):
    said = run(tiny, {"additional_config": {"centroidkv": {}}})
    assert "--worker-cls centroidkv.integrations.vllm.Worker" in said


def test_our_worker_without_options_does_not_start(tiny):
    said = run(tiny, {"worker_cls": "centroidkv.integrations.vllm.Worker"})
    assert "--additional-config" in said
